"""A systemd unit that runs the daemon: its text, its place, and what is typed after it."""

from __future__ import annotations

import getpass
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from edge.errors import RequestError
from edge.host.cache_paths import CACHE_VARIABLE
from edge.membership.store import CONFIG_VARIABLE, TOKEN_VARIABLE

NAME = "edge-peer"

_MARK = "# Written by edge peer install, which writes it anew.\n"
_CARRIED = (CACHE_VARIABLE, CONFIG_VARIABLE, TOKEN_VARIABLE)
_SYSTEM_FOLDER = Path("/etc/systemd/system")
_MOST_UNIT_BYTES = 64 << 10

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
"""Hardening that a user's own service manager can do, too, without namespaces of users."""

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
"""Homes stay writable, for caches and keys lie there; devices stay visible, for a GPU is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The daemon as systemd is to run it."""

    python: str
    config: Path | None
    is_system: bool
    user: str
    """Whose keys and caches it uses."""
    environment: tuple[tuple[str, str], ...]

    @classmethod
    def of_this_process(cls, config: Path | None, *, is_system: bool) -> Service:
        """With its interpreter and its folders, for the user who called it, by sudo or without."""
        return cls(
            python=sys.executable,
            config=config,
            is_system=is_system,
            user=os.environ.get("SUDO_USER") or getpass.getuser(),
            environment=tuple(
                (name, str(Path(os.environ[name]).expanduser().absolute()))
                for name in _CARRIED
                if os.environ.get(name)
            ),
        )


def service_unit(service: Service) -> str:
    """The text of the unit's file."""
    words = [service.python, "-P", "-m", "edge", "peer"]
    if service.config is not None:
        words += ["--config", str(service.config)]
    lines = [
        "[Unit]",
        "Description=Edge peer, which lends this device to its cluster",
        *(["Wants=network-online.target", "After=network-online.target"] * service.is_system),
        "",
        "[Service]",
        f"ExecStart={' '.join(_quoted(word.replace('$', '$$')) for word in words)}",
        *([f"User={service.user}"] * service.is_system),
        "WorkingDirectory=~",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environment),
        "# A daemon that cannot listen yet tries again; wrong options need a hand.",
        "Restart=on-failure",
        "RestartSec=5",
        "RestartPreventExitStatus=2",
        "TimeoutStopSec=30",
    ]
    hardening = _EVERYWHERE + _SYSTEM_ONLY * service.is_system
    target = "multi-user.target" if service.is_system else "default.target"
    return _MARK + "\n".join(lines) + f"\n{hardening}\n[Install]\nWantedBy={target}\n"


def place_of(service: Service) -> Path:
    """Where systemd looks for it."""
    if service.is_system:
        return _SYSTEM_FOLDER / f"{NAME}.service"
    return Path(platformdirs.user_config_dir("systemd")) / "user" / f"{NAME}.service"


def next_commands(service: Service) -> tuple[str, ...]:
    """What a user types to have it run, now and later, and to see what it does."""
    if service.is_system:
        return (
            "sudo systemctl daemon-reload",
            f"sudo systemctl enable --now {NAME}",
            f"journalctl -u {NAME} -f",
        )
    return (
        "systemctl --user daemon-reload",
        f"systemctl --user enable --now {NAME}",
        "loginctl enable-linger    # so it runs while you are not logged in, too",
        f"journalctl --user -u {NAME} -f",
    )


def write_unit(place: Path, text: str) -> None:
    """Raises RequestError where nothing can be written, and for a file that somebody else wrote."""
    try:
        with place.open("rb") as file:
            is_ours = file.read(_MOST_UNIT_BYTES).startswith(_MARK.encode())
    except FileNotFoundError:
        is_ours = True
    except OSError as error:
        raise _unusable(place, error) from error
    if not is_ours:
        raise RequestError(
            f"{place} is there already, and not written by edge peer install; move it away, or "
            "take over what you want by edge peer install --print"
        )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unusable(place, error) from error


def _quoted(text: str) -> str:
    """One word in a unit's file, where % begins a specifier. Raises RequestError for lines."""
    if not text.isprintable():
        raise RequestError(f"{text!r:.80} cannot stand in a unit; choose another path")
    if re.fullmatch(r"[\w/.:=+@,-]+", text, re.ASCII):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _unusable(place: Path, error: OSError) -> RequestError:
    if isinstance(error, PermissionError) and place.is_relative_to(_SYSTEM_FOLDER):
        return RequestError(
            f"cannot write {place}: {error.strerror}; call it by sudo, or leave out --system"
        )
    return RequestError(f"cannot write {place}: {error.strerror}; --print prints it instead")
