"""Line input of any length, for a terminal that cannot move its cursor."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field

from edge.cli.hangup import HungUp
from edge.system.terminal import LineKeys, has_hung_up, single_keys

_READ_BYTES = 1 << 16
_ERASED = b"\b \b"


class LongLineInput:
    """Line input like the system's, with Backspace, Ctrl-U and Ctrl-D, but without its limit of
    4,095 bytes, beyond which the system drops pasted text."""

    interrupted = False

    def __init__(self, descriptor: int) -> None:
        """descriptor: the terminal's."""
        self._descriptor = descriptor
        self._came = b""
        """Keys typed after the last line."""

    def ask(self) -> str | None:
        sys.stdout.flush()
        with single_keys(self._descriptor) as keys:
            while (line := self._line(keys)) is not None:
                if text := line.decode(errors="surrogateescape").strip():
                    return text
            return None

    def _line(self, keys: LineKeys | None) -> bytes | None:
        """None at the end."""
        if keys is None:
            return sys.stdin.buffer.readline() or None
        line = TypedLine(erase=keys.erase, kill=keys.kill, end=keys.end)
        while not line.is_whole:
            if not self._came:
                self._came = os.read(self._descriptor, _READ_BYTES)
                if not self._came:
                    if has_hung_up():
                        raise HungUp
                    return bytes(line.text) or None
            shown, self._came = line.take(self._came)
            if keys.is_echoed:
                with contextlib.suppress(OSError):  # it may be read-only
                    os.write(self._descriptor, shown)
        return None if line.is_end else bytes(line.text)


@dataclass(slots=True, kw_only=True)
class TypedLine:
    """A line as it is typed. Pure. erase, kill, end: the user's keys for these."""

    erase: bytes
    kill: bytes
    end: bytes
    text: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    is_end: bool = False
    """Whether the user leaves: end of input at the start of a line."""

    def take(self, keys: bytes) -> tuple[bytes, bytes]:
        """(The echo of these keys, the keys behind the end of the line)."""
        shown = bytearray()
        for place, number in enumerate(keys):
            key = bytes([number])
            if key in (b"\n", b"\r", self.end):
                self.is_whole = True
                self.is_end = key == self.end and not self.text
                shown += b"" if self.is_end else b"\r\n"
                return bytes(shown), keys[place + 1 :]
            if key == self.erase:
                if self.text:
                    self._erase_character()
                    shown += _ERASED
            elif key == self.kill:
                self.text.clear()
                shown += b"\r\n"
            else:
                self.text += key
                shown += key if number >= ord(" ") or key == b"\t" else b"^" + bytes([number + 64])
        return bytes(shown), b""

    def _erase_character(self) -> None:
        while len(self.text) > 1 and self.text[-1] & 0xC0 == 0x80:  # a character of several bytes
            self.text.pop()
        self.text.pop()
