"""The input of a conversation: a line editor on a terminal, else lines of standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import click

from edge.cli.chat.long_lines import LongLineInput
from edge.cli.hangup import HungUp
from edge.host.state_paths import state_root
from edge.system.signals import on_signal
from edge.system.terminal import has_hung_up, unshown_keys

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History

_PASTES_ARE_TOLD, _PASTES_ARE_NOT_TOLD = "\x1b[?2004h", "\x1b[?2004l"
"""Escape sequences that turn a terminal's bracketed paste on and off."""

_LEAVING = "Press Ctrl-C again, or Ctrl-D, to leave."


Suggest = Callable[[str], Sequence[str] | None]
"""Completions of the last word of a line; None: file names."""


class LineInput(Protocol):
    """Asks the user."""

    interrupted: bool
    """Whether Ctrl-C was pressed last: another one ends the conversation."""

    def ask(self) -> str | None:
        """The user's next text, stripped; None: the user leaves."""


class PipedInput:
    """Takes each line of standard input as a turn."""

    interrupted = False

    def ask(self) -> str | None:
        while line := sys.stdin.readline():
            if line.strip():
                return line.strip()
        return None


class Editor:
    """A line editor with a persistent history, completion of commands, and multi-line paste."""

    def __init__(self, suggest: Suggest) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        self.interrupted = False
        keys = KeyBindings()

        @keys.add("enter")
        def _accept(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=_completer(suggest),
            complete_while_typing=Condition(self._is_a_command),
            key_bindings=keys,
            multiline=True,
            prompt_continuation="  ",
            enable_open_in_editor=True,
            enable_suspend=True,
        )

    def ask(self) -> str | None:
        while True:
            try:
                with _told_to_end() as listen:
                    text = self._session.prompt("> ", pre_run=listen).strip()
            except KeyboardInterrupt:
                if self._session.default_buffer.text:  # Ctrl-C discards the line
                    self.interrupted = False
                    continue
                if self.interrupted:
                    return None
                self.interrupted = True
                click.echo(_LEAVING, err=True)
                continue
            except EOFError:
                if has_hung_up():
                    raise HungUp from None
                return None
            self.interrupted = False
            sys.stdout.write(_PASTES_ARE_TOLD)  # the prompt turned it off
            sys.stdout.flush()
            if text:
                return text

    def _is_a_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


@contextlib.contextmanager
def _told_to_end() -> Iterator[Callable[[], None]]:
    """A function to call when the prompt begins. SIGTERM then ends the prompt and raises its error
    there. Raised inside a task of the editor's loop, the editor would report it as its own failure,
    with "Press ENTER to continue"."""
    usual = signal.getsignal(signal.SIGTERM)
    if not callable(usual):
        yield lambda: None
        return
    is_told = False

    def listen() -> None:
        from prompt_toolkit.application import get_app

        app, loop = get_app(), asyncio.get_running_loop()

        def leave() -> None:
            nonlocal is_told
            is_told = True
            try:
                usual(signal.SIGTERM, None)
            except SystemExit as end:
                if app.future is None or app.future.done():
                    raise
                app.exit(exception=end)

        on_signal(loop, signal.SIGTERM, leave)

    try:
        yield listen
    finally:
        if not is_told:  # the loop has restored the default handler
            signal.signal(signal.SIGTERM, usual)


def _completer(suggest: Suggest) -> Completer:
    """Completes by prefix; without a match, by letters in their order."""
    from prompt_toolkit.completion import (
        CompleteEvent,
        Completer,
        Completion,
        FuzzyWordCompleter,
        PathCompleter,
    )
    from prompt_toolkit.document import Document

    class LastWord(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterable[Completion]:
            line = document.text_before_cursor
            last = line.rpartition(" ")[2]
            words = suggest(line)
            if words is None:
                names = PathCompleter(expanduser=True)
                return names.get_completions(Document(last, len(last)), complete_event)
            alike = FuzzyWordCompleter(
                [each for each in words if each.startswith(last)] or list(words), WORD=True
            )
            return alike.get_completions(document, complete_event)

    return LastWord()


def line_input(suggest: Suggest) -> LineInput:
    if is_a_terminal():
        return Editor(suggest)
    if sys.stdin.isatty():
        return LongLineInput(sys.stdin.fileno())
    return PipedInput()


@contextlib.contextmanager
def typed_ahead() -> Iterator[None]:
    """Keep typed text for the next prompt while there is none.

    Otherwise the terminal would echo it between bars and answers, and pass on each Enter as the key
    for a new line. Does nothing without a terminal.
    """
    if not is_a_terminal():
        yield
        return
    with unshown_keys(sys.stdin.fileno()):
        sys.stdout.write(_PASTES_ARE_TOLD)
        sys.stdout.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it may have gone
                sys.stdout.write(_PASTES_ARE_NOT_TOLD)
                sys.stdout.flush()


def is_a_terminal() -> bool:
    """Whether input and output are a terminal that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _history() -> History:
    """The history in a file that only the user can read; in memory if there can be no file."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    with contextlib.suppress(OSError):
        folder = state_root()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "chat_history"
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))

        class KeptHistory(FileHistory):
            """A history file whose write errors do not end the conversation."""

            def store_string(self, string: str) -> None:
                with contextlib.suppress(OSError):
                    super().store_string(string)

        return KeptHistory(path)
    return InMemoryHistory()
