"""Tasks of the task scheduler, which starts services of users on Windows."""

from __future__ import annotations

import subprocess
from pathlib import Path
from xml.etree import ElementTree

import platformdirs

from edge.cli.services.service import Service, command_of, printable
from edge.host.home import under_home

_NAMESPACE = "http://schemas.microsoft.com/windows/2004/02/mit/task"
_AGAIN_AFTER, _TIMES = "PT1M", "255"
"""A task that ended with an error is started again after a minute, the least that Windows takes;
the times are the most of its schema."""

_USUAL_PRIORITY = "5"
"""Otherwise tasks compute and read below other programs."""


class TaskScheduler:
    """See ServiceManager."""

    def mark(self, service: Service) -> str:
        return f"<!-- Written by {service.task.written_by}, which writes it anew. -->\n"

    def text(self, service: Service) -> str:
        task = service.task
        root = ElementTree.Element("Task", {"version": "1.2", "xmlns": _NAMESPACE})
        told = ElementTree.SubElement(root, "RegistrationInfo")
        _add(told, Description=task.description)
        triggers = ElementTree.SubElement(root, "Triggers")
        user = printable(service.user)
        if service.is_system:
            _add(ElementTree.SubElement(triggers, "BootTrigger"), Enabled="true")
        else:  # only an administrator may start tasks when any user logs on
            _add(ElementTree.SubElement(triggers, "LogonTrigger"), Enabled="true", UserId=user)
        principals = ElementTree.SubElement(root, "Principals")
        _add(
            ElementTree.SubElement(principals, "Principal", {"id": "Author"}),
            UserId=user,
            LogonType="S4U" if service.is_system else "InteractiveToken",
            RunLevel="LeastPrivilege",
        )
        settings = ElementTree.SubElement(root, "Settings")
        _add(
            settings,
            MultipleInstancesPolicy="IgnoreNew",
            DisallowStartIfOnBatteries="false",
            StopIfGoingOnBatteries="false",
            ExecutionTimeLimit="PT0S",  # no limit
            Priority=_USUAL_PRIORITY,
        )
        again = ElementTree.SubElement(settings, "RestartOnFailure")
        _add(again, Interval=_AGAIN_AFTER, Count=_TIMES)
        actions = ElementTree.SubElement(root, "Actions", {"Context": "Author"})
        program, *words = (printable(word) for word in command_of(service))
        action = ElementTree.SubElement(actions, "Exec")
        _add(action, Command=program, Arguments=subprocess.list2cmdline(words))
        if task.folder is not None:
            _add(action, WorkingDirectory=str(task.folder))
        ElementTree.indent(root)
        written = ElementTree.tostring(root).decode("ascii")  # right in each code page
        return f'<?xml version="1.0"?>\n{self.mark(service)}{written}\n'

    def place(self, service: Service) -> Path:
        return under_home(lambda: platformdirs.user_config_dir("edge")) / f"{service.task.name}.xml"

    def next_commands(self, service: Service) -> tuple[str, ...]:
        name = service.task.name
        return (
            *(f'setx {variable} "{value}"' for variable, value in service.environment),
            f'schtasks /Create /F /TN {name} /XML "{self.place(service)}"',
            f"schtasks /Run /TN {name}",
        )


def _add(parent: ElementTree.Element, **values: str) -> None:
    for name, value in values.items():
        ElementTree.SubElement(parent, name).text = value
