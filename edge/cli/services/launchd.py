"""Property lists of launchd, which starts services on macOS."""

from __future__ import annotations

import plistlib
import shlex
from pathlib import Path
from typing import Any

from edge.cli.services.service import Service, command_of, printable
from edge.host.home import under_home

_SYSTEM_FOLDER, _SYSTEM_LOGS = Path("/Library/LaunchDaemons"), Path("/Library/Logs")
_WRONG_OPTIONS_S = 30
"""Seconds between two starts: launchd knows no exit code after which it stays off."""


class Launchd:
    """See ServiceManager."""

    def mark(self, service: Service) -> str:
        return f"<!-- Written by {service.task.written_by}, which writes it anew. -->\n"

    def text(self, service: Service) -> str:
        task = service.task
        values: dict[str, Any] = {
            "Label": _label(service),
            "ProgramArguments": [printable(word) for word in command_of(service)],
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _WRONG_OPTIONS_S,
            "ExitTimeOut": task.stops_within_s,
            "ProcessType": "Interactive",  # otherwise it computes on the slow cores
            "Umask": 0o077,
            "StandardOutPath": str(_log(service)),
            "StandardErrorPath": str(_log(service)),
        }
        if task.folder is not None:
            values["WorkingDirectory"] = str(task.folder)
        if service.is_system:
            values["UserName"] = service.user
        written = plistlib.dumps(values, sort_keys=False).decode()
        head, line, rest = written.partition("<plist ")
        return head + self.mark(service) + line + rest

    def place(self, service: Service) -> Path:
        folder = _SYSTEM_FOLDER
        if not service.is_system:
            folder = under_home(lambda: Path.home() / "Library" / "LaunchAgents")
        return folder / f"{_label(service)}.plist"

    def next_commands(self, service: Service) -> tuple[str, ...]:
        place, log = shlex.quote(str(self.place(service))), shlex.quote(str(_log(service)))
        sudo, domain = ("sudo ", "system") if service.is_system else ("", "gui/$(id -u)")
        return (
            f"{sudo}launchctl bootout {domain}/{_label(service)}    # if it runs already",
            f"{sudo}launchctl bootstrap {domain} {place}",
            f"tail -f {log}",
        )


def _label(service: Service) -> str:
    return f"org.edge-inference.{service.task.name}"


def _log(service: Service) -> Path:
    name = f"{service.task.name}.log"
    if service.is_system:
        return _SYSTEM_LOGS / name
    return under_home(lambda: Path.home() / "Library" / "Logs") / name
