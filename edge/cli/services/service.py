"""Commands of Edge that run as services of a system."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge.cli.generated_files import write_own
from edge.errors import RequestError
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.home import expanded, user_name
from edge.membership.store import CONFIG_VARIABLE, TOKEN_VARIABLE

_CARRIED = (CACHE_VARIABLE, CONFIG_VARIABLE, TOKEN_VARIABLE, "HF_HOME", "HF_HUB_CACHE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTask:
    """A command to run as a service."""

    name: str
    """The name of the service."""
    description: str
    words: tuple[str, ...]
    """The arguments of `edge`."""
    written_by: str
    """The command that writes its file."""
    folder: Path | None
    """The working directory; None: the user's home folder."""
    stops_within_s: int
    reloads: bool = False
    """Whether SIGHUP reloads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A task with the environment that the system gives it."""

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
        folder=None,
        stops_within_s=30,
    )


def server_task(arguments: Sequence[str], folder: Path) -> ServiceTask:
    """The service of `edge serve` with these arguments; relative paths begin at `folder`."""
    return ServiceTask(
        name="edge-serve",
        description="Edge server, which answers over HTTP",
        words=("serve", *arguments),
        written_by="edge serve --install",
        folder=Path(printable(str(folder))),
        stops_within_s=60,
        # Without keys to reload, the signal ends the server.
        reloads=any(word.partition("=")[0] == "--api-key-file" for word in arguments),
    )


class ServiceManager(Protocol):
    """The program of a system that starts services."""

    def text(self, service: Service) -> str:
        """The file that describes the service. Raises RequestError for words with controls."""
        ...

    def mark(self, service: Service) -> str:
        """A part of the file that says who wrote it."""
        ...

    def place(self, service: Service) -> Path:
        """The path of that file."""
        ...

    def next_commands(self, service: Service) -> tuple[str, ...]:
        """Shell commands that start the service now and each time, and show its log."""
        ...


def install_service(manager: ServiceManager, service: Service) -> list[str]:
    """Write the service's file. Returns lines for the user. Raises RequestError if it cannot be
    written, or if Edge did not write the present file."""
    place, writer = manager.place(service), service.task.written_by
    try:
        write_own(place, manager.text(service), mark=manager.mark(service), writer=writer)
    except OSError as error:
        if isinstance(error, PermissionError) and service.is_system:
            remedy = "use sudo, or install it for your user only"
        else:
            remedy = "print it instead"
        raise RequestError(f"cannot write {place}: {error.strerror}", remedy=remedy) from error
    return [f"Wrote {place}. Type next:", *(f"  {line}" for line in manager.next_commands(service))]


def command_of(service: Service) -> list[str]:
    """The program and its arguments."""
    return [service.python, "-P", "-m", "edge", *service.task.words]


def printable(text: str) -> str:
    """The text. Raises RequestError for one of several lines or with other controls."""
    if not text.isprintable():
        raise RequestError(
            f"{text!r:.80} cannot be part of a service", remedy="choose another path"
        )
    return text
