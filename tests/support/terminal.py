"""A program on a terminal of its own, and what is to be seen there."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyte

from edge.host.state_paths import STATE_VARIABLE
from tests.support.processes import EDGE

UP, DOWN, LEFT, BACKSPACE = "\x1b[A", "\x1b[B", "\x1b[D", "\x7f"
CTRL_C, CTRL_D, ENTER, ALT_ENTER, TAB = "\x03", "\x04", "\r", "\x1b\r", "\t"
_AT_ONCE_S = 0.1
_LOCAL_FLAGS = 3
"""Their place in what `termios` tells."""
PATIENCE_S = 120.0


def pasted(text: str) -> str:
    """As terminals send what is pasted, when a program has asked to be told."""
    return f"\x1b[200~{text}\x1b[201~"


class Terminal:
    """A command of edge, and the screen that it draws on. A context manager: it is ended."""

    def __init__(
        self,
        *arguments: object,
        state: Path,
        environment: Mapping[str, str] | None = None,
        columns: int = 100,
        lines: int = 30,
        ignores_hangup: bool = False,
    ) -> None:
        """state: where histories are kept, and where it is started: files there have short names,
        which no window breaks. ignores_hangup: as what `nohup` starts.
        """
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._screen.write_process_input = self.send
        self._stream = pyte.Stream(self._screen)
        self.output = ""
        """Every byte so far."""
        self._end, theirs = pty.openpty()
        self._set_size(columns, lines)
        self._found = termios.tcgetattr(self._end)
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

        def begin() -> None:
            """Where the program is not forked from one that has begun: as `tests/support/forked.py`
            does there."""
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

        try:
            self._process = subprocess.Popen(
                [*EDGE, *map(str, arguments)],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env={
                    **os.environ,
                    "TERM": "xterm-256color",
                    STATE_VARIABLE: str(state / "edge"),
                    **(environment or {}),
                },
                cwd=state,
                start_new_session=True,
                preexec_fn=begin if ignores_hangup else None,
            )
        finally:
            os.close(theirs)

    @property
    def text(self) -> str:
        """All lines, also those that scrolled away, without what fills them up."""
        gone = ["".join(line[x].data for x in sorted(line)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*gone, *self._screen.display]).rstrip()

    @property
    def last_line(self) -> str:
        """Where the cursor is."""
        return str(self._screen.display[self._screen.cursor.y]).rstrip()

    def send(self, text: str) -> None:
        data = text.encode()
        while data:  # as much at once as the terminal has room for
            data = data[os.write(self._end, data) :]

    def say(self, line: str) -> None:
        """Type a line, see it, and send it: what is typed ahead of a prompt is not its to send."""
        end = line[-10:].strip()
        self.send(line)
        self.wait(lambda: self.last_line.endswith(end))
        self.send(ENTER)
        self.wait(lambda: not self.last_line.endswith(end))

    def wait(self, is_there: Callable[[], object]) -> None:
        """Until it is to be seen."""
        end_s = time.monotonic() + PATIENCE_S
        while not is_there():
            assert time.monotonic() < end_s, self.text
            assert self._read(), f"it ended:\n{self.text}"

    def wait_for(self, text: str) -> None:
        self.wait(lambda: text in self.text)

    def wait_for_prompt(self) -> None:
        """An empty one, below whatever was said last."""
        self.wait(lambda: self.last_line == ">")

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        end_s = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < end_s, self.text
        return self._process.wait()

    def go_away(self) -> int:
        """The window is closed; the exit code of the program, once it has ended by that."""
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), self._end)
        return self._process.wait()

    def terminate(self) -> int:
        """Send SIGTERM; the signal that has ended it, once it has."""
        self._process.terminate()
        end_s = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < end_s, self.text
        return -self._process.wait()

    def is_as_found(self) -> bool:
        """Whether lines are edited and echoed as before the program, and the cursor is seen."""
        is_hidden = self.output.rpartition("\x1b[?25")[2].startswith("l")
        is_aside = self.output.rpartition("\x1b[?1049")[2].startswith("h")
        now = termios.tcgetattr(self._end)
        return now == self._found and not is_hidden and not is_aside

    def reads_keys(self) -> bool:
        """Whether the program is asking, and reads what is typed key by key."""
        return not termios.tcgetattr(self._end)[_LOCAL_FLAGS] & termios.ICANON

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._end)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> bool:
        """What has come; False at the end."""
        if not select.select([self._end], [], [], _AT_ONCE_S)[0]:
            return True
        try:
            part = os.read(self._end, 1 << 16)
        except OSError:  # nobody has the other end any more
            part = b""
        if not part:
            return False
        text = self._decode(part)
        self.output += text
        self._stream.feed(text)
        return True
