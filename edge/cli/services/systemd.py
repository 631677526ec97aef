"""Units of systemd, which starts services on most Linux systems."""

from __future__ import annotations

import re
from pathlib import Path

import platformdirs

from edge.cli.services.service import Service, command_of, printable
from edge.host.home import under_home

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


class Systemd:
    """See ServiceManager."""

    def mark(self, service: Service) -> str:
        return f"# Written by {service.task.written_by}, which writes it anew.\n"

    def text(self, service: Service) -> str:
        task = service.task
        # Quotes would be part of a folder's name.
        folder = "~" if task.folder is None else str(task.folder).replace("%", "%%")
        words = command_of(service)
        lines = [
            "[Unit]",
            f"Description={task.description}",
            *(["Wants=network-online.target", "After=network-online.target"] * service.is_system),
            "",
            "[Service]",
            f"ExecStart={' '.join(_quoted(word.replace('$', '$$')) for word in words)}",
            *(["ExecReload=kill -HUP $MAINPID"] * task.reloads),
            *([f"User={service.user}"] * service.is_system),
            f"WorkingDirectory={folder}",
            *(f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environment),
            "# Restarted if it cannot listen yet, but not after wrong options.",
            "Restart=on-failure",
            "RestartSec=5",
            "RestartPreventExitStatus=2",
            f"TimeoutStopSec={task.stops_within_s}",
        ]
        hardening = _EVERYWHERE + _SYSTEM_ONLY * service.is_system
        target = "multi-user.target" if service.is_system else "default.target"
        return (
            self.mark(service) + "\n".join(lines) + f"\n{hardening}\n[Install]\nWantedBy={target}\n"
        )

    def place(self, service: Service) -> Path:
        name = f"{service.task.name}.service"
        if service.is_system:
            return _SYSTEM_FOLDER / name
        return under_home(lambda: platformdirs.user_config_dir("systemd")) / "user" / name

    def next_commands(self, service: Service) -> tuple[str, ...]:
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


def _quoted(text: str) -> str:
    """A quoted word of a unit's file. Raises RequestError for a text of several lines."""
    if re.fullmatch(r"[\w/.:=+@,-]+", printable(text), re.ASCII):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
