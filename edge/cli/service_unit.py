"""The systemd unit of a daemon or a server: its text, its path and the commands that start it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from edge.cli.generated_files import write_own
from edge.errors import RequestError
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.home import expanded, under_home, user_name
from edge.membership.store import CONFIG_VARIABLE, TOKEN_VARIABLE

_MARK = "# Written by {}, which writes it anew.\n"
_CARRIED = (CACHE_VARIABLE, CONFIG_VARIABLE, TOKEN_VARIABLE, "HF_HOME", "HF_HUB_CACHE")
_SYSTEM_FOLDER = Path("/etc/systemd/system")

_EVERYWHERE = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
UMask=0077
"""
"""Hardening that a user's service manager supports, too; it has no user namespaces."""

_SYSTEM_ONLY = """\
CapabilityBoundingSet=
PrivateTmp=yes
ProtectSystem=full
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
"""
"""Hardening of a system unit. Homes stay writable for caches and keys; devices stay for a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTask:
    """A command to run as a service."""

    name: str
    """The name of the unit."""
    description: str
    words: tuple[str, ...]
    """The arguments of `edge`."""
    written_by: str
    """The command that writes its unit."""
    folder: str
    """The working directory, as systemd writes it."""
    stops_within_s: int
    reloads: bool = False
    """Whether SIGHUP reloads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A task with the environment that systemd gives it."""

    task: ServiceTask
    python: str
    is_system: bool
    user: str
    """The user whose keys and caches it uses."""
    environment: tuple[tuple[str, str], ...]

    @classmethod
    def of_this_process(cls, task: ServiceTask, *, is_system: bool) -> Service:
        """A service with this process's interpreter and folders, for the user who called it (by
        sudo or not)."""
        return cls(
            task=task,
            python=sys.executable,
            is_system=is_system,
            user=os.environ.get("SUDO_USER") or user_name(),
            environment=tuple(
                (name, str(expanded(os.environ[name]).absolute()))
                for name in _CARRIED
                if os.environ.get(name)
            ),
        )


def peer_task(config: Path | None) -> ServiceTask:
    """The service of `edge peer`, with its options in a file."""
    return ServiceTask(
        name="edge-peer",
        description="Edge peer, which lends this device to its cluster",
        words=("peer", *(() if config is None else ("--config", str(config)))),
        written_by="edge peer install",
        folder="~",
        stops_within_s=30,
    )


def server_task(arguments: Sequence[str], folder: Path) -> ServiceTask:
    """The service of `edge serve` with these arguments; relative paths begin at `folder`."""
    return ServiceTask(
        name="edge-serve",
        description="Edge server, which answers over HTTP",
        words=("serve", *arguments),
        written_by="edge serve --install",
        folder=_printable(str(folder)).replace("%", "%%"),  # quotes would be part of it
        stops_within_s=60,
        # Without keys to reload, the signal ends the server.
        reloads=any(word.partition("=")[0] == "--api-key-file" for word in arguments),
    )


def service_unit(service: Service) -> str:
    """The text of the unit's file."""
    task = service.task
    words = [service.python, "-P", "-m", "edge", *task.words]
    lines = [
        "[Unit]",
        f"Description={task.description}",
        *(["Wants=network-online.target", "After=network-online.target"] * service.is_system),
        "",
        "[Service]",
        f"ExecStart={' '.join(_quoted(word.replace('$', '$$')) for word in words)}",
        *(["ExecReload=kill -HUP $MAINPID"] * task.reloads),
        *([f"User={service.user}"] * service.is_system),
        f"WorkingDirectory={task.folder}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environment),
        "# Restarted if it cannot listen yet, but not after wrong options.",
        "Restart=on-failure",
        "RestartSec=5",
        "RestartPreventExitStatus=2",
        f"TimeoutStopSec={task.stops_within_s}",
    ]
    hardening = _EVERYWHERE + _SYSTEM_ONLY * service.is_system
    target = "multi-user.target" if service.is_system else "default.target"
    mark = _MARK.format(task.written_by)
    return mark + "\n".join(lines) + f"\n{hardening}\n[Install]\nWantedBy={target}\n"


def install_unit(service: Service) -> list[str]:
    """Write the unit. Returns lines for the user. Raises the errors of `write_unit`."""
    place = place_of(service)
    write_unit(place, service)
    return [f"Wrote {place}. Type next:", *(f"  {line}" for line in next_commands(service))]


def place_of(service: Service) -> Path:
    """The path at which systemd looks for the unit."""
    name = f"{service.task.name}.service"
    if service.is_system:
        return _SYSTEM_FOLDER / name
    return under_home(lambda: platformdirs.user_config_dir("systemd")) / "user" / name


def next_commands(service: Service) -> tuple[str, ...]:
    """The shell commands that start the unit now and at boot, and show its log."""
    name = service.task.name
    if service.is_system:
        return (
            "sudo systemctl daemon-reload",
            f"sudo systemctl enable --now {name}",
            f"journalctl -u {name} -f",
        )
    return (
        "systemctl --user daemon-reload",
        f"systemctl --user enable --now {name}",
        "loginctl enable-linger    # so it runs while you are not logged in, too",
        f"journalctl --user -u {name} -f",
    )


def write_unit(place: Path, service: Service) -> None:
    """Write the unit. Raises RequestError if it cannot, or if Edge did not write the present
    file."""
    writer = service.task.written_by
    try:
        write_own(place, service_unit(service), mark=_MARK.format(writer), writer=writer)
    except OSError as error:
        raise _unusable(place, error) from error


def _quoted(text: str) -> str:
    """A quoted word of a unit's file. Raises RequestError for a text of several lines."""
    if re.fullmatch(r"[\w/.:=+@,-]+", _printable(text), re.ASCII):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _printable(text: str) -> str:
    if not text.isprintable():
        raise RequestError(f"{text!r:.80} cannot be part of a unit", remedy="choose another path")
    return text


def _unusable(place: Path, error: OSError) -> RequestError:
    if isinstance(error, PermissionError) and place.is_relative_to(_SYSTEM_FOLDER):
        return RequestError(
            f"cannot write {place}: {error.strerror}",
            remedy="use sudo, or install it for your user only",
        )
    return RequestError(f"cannot write {place}: {error.strerror}", remedy="print it instead")
