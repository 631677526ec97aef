"""Terminals: single keys instead of lines, and a terminal that has gone."""

import contextlib
import errno
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

if sys.platform != "win32":
    import termios

_INPUT_FLAGS, _LOCAL_FLAGS, _CHARACTERS = 0, 3, 6
"""Places in what `termios` tells."""

_STANDARD_STREAMS = (0, 1, 2)


class TerminalError(Exception):
    """A terminal that cannot be set, as one that has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineKeys:
    """The user's keys of the system's line input, and whether it shows what is typed."""

    erase: bytes
    kill: bytes
    end: bytes
    is_echoed: bool


def has_hung_up() -> bool:
    """Whether a standard stream is a terminal that has hung up."""
    if sys.platform != "win32":
        for descriptor in _STANDARD_STREAMS:
            try:
                termios.tcgetattr(descriptor)
            except termios.error as error:
                if error.args[0] == errno.EIO:
                    return True
    return False


@contextlib.contextmanager
def single_keys(descriptor: int) -> Iterator[LineKeys | None]:
    """Keys come one by one and are not shown. None, and nothing changed, where the terminal has
    lines of any length by itself. Raises TerminalError."""
    if sys.platform == "win32":
        yield None
    else:
        with _changed(descriptor) as (found, wanted):
            wanted[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)
            keys = list(found[_CHARACTERS])
            keys[termios.VMIN], keys[termios.VTIME] = 1, 0
            wanted[_CHARACTERS] = keys
            _set(descriptor, wanted)
            usual = found[_CHARACTERS]
            yield LineKeys(
                erase=usual[termios.VERASE],
                kill=usual[termios.VKILL],
                end=usual[termios.VEOF],
                is_echoed=bool(found[_LOCAL_FLAGS] & termios.ECHO),
            )


@contextlib.contextmanager
def unshown_keys(descriptor: int) -> Iterator[None]:
    """Typed text is kept for later and not shown, Enter as Enter. Raises TerminalError."""
    if sys.platform == "win32":
        yield
    else:
        with _changed(descriptor) as (_found, wanted):
            wanted[_INPUT_FLAGS] &= ~termios.ICRNL
            wanted[_LOCAL_FLAGS] &= ~termios.ECHO
            _set(descriptor, wanted)
            yield


if sys.platform != "win32":
    _Settings = list[Any]
    """What `termios.tcgetattr` returns."""

    @contextlib.contextmanager
    def _changed(descriptor: int) -> Iterator[tuple[_Settings, _Settings]]:
        """The terminal's settings, and a copy to change; they are restored at the end."""
        try:
            found: _Settings = termios.tcgetattr(descriptor)
        except termios.error as error:
            raise TerminalError(*error.args) from error
        try:
            yield found, list(found)
        finally:
            with contextlib.suppress(termios.error):  # it may have gone
                termios.tcsetattr(descriptor, termios.TCSADRAIN, found)

    def _set(descriptor: int, wanted: _Settings) -> None:
        try:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, wanted)
        except termios.error as error:
            raise TerminalError(*error.args) from error
