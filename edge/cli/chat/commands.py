"""The commands of a conversation: lines that begin with a slash and a word.

Case does not matter. A first word with another slash in it, such as /usr/bin, is text; a word with
punctuation, such as /help!, is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from edge.cli.chat.conversation import Conversation, check_text
from edge.cli.chat.settings import Settings, near_setting, setting_names, words_of
from edge.errors import RequestError, printable
from edge.host.home import expanded
from edge.kernels.sampling.parameters import SamplingParameters
from edge.offload import read_file
from edge.pictures.messages import file_of

_COMMAND = re.compile(r"/([^\W\d_][^\s/]*|\?)(?:\s+(.*))?", re.DOTALL)
_FILE_AND_TEXT = re.compile(r'("[^"\n]+"|\S+)\s*(.*)', re.DOTALL)
"""A file name; one with spaces is in quotes."""
_OF_FILES = ("/file", "/image", "/load", "/save")
_MOST_TEXT_BYTES = 16 << 20


class Talk(Protocol):
    """The conversation as commands see and change it."""

    conversation: Conversation
    settings: Settings

    @property
    def model_name(self) -> str: ...

    @property
    def usual_sampling(self) -> SamplingParameters: ...

    def check(
        self, *, settings: Settings | None = None, conversation: Conversation | None = None
    ) -> None:
        """Raises RequestError if the chat template refuses them, or the context is too short.
        None: the present ones.
        """

    def say(self, text: str) -> None:
        """Print lines that are not the model's."""

    def ask(self, question: str, images: Sequence[bytes] = ()) -> None:
        """Have the model answer. images: files of the pictures that the question is about."""

    def ask_again(self) -> None:
        """Have the model answer the last question."""

    def show_figures(self) -> None:
        """Show the speed of the last answer and the use of the context."""

    def show_plan(self) -> None:
        """Show the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command. run: takes the text after its name; returns False at the end of the chat."""

    usage: str
    help: str
    run: Callable[[Talk, str], bool | None]


def is_command(line: str) -> bool:
    """Whether a line is a command, and not a question to the model."""
    return _COMMAND.fullmatch(line) is not None


def as_question(line: str) -> str:
    """The question of a line that is not a command: //word is sent as /word; a comment of a program
    keeps both slashes."""
    return line[1:] if line.startswith("//") and is_command(line[1:]) else line


def run_command(talk: Talk, line: str) -> bool:
    """Run the command of a line. Returns False at the end of the chat. Raises RequestError for an
    unknown command, and for one that fails."""
    found = _COMMAND.fullmatch(line)
    assert found is not None
    name, rest = found.group(1), (found.group(2) or "").strip()
    command = name.lower()
    command = _ALSO.get(command, command)
    if command == "help":
        _help(talk)
        return True
    if command not in COMMANDS:
        raise RequestError(
            f"/{printable(name, 40)} is no command",
            remedy=f"{_near(command)}/help lists them all, and a question that begins with it is "
            "written with two slashes",
        )
    return COMMANDS[command].run(talk, rest) is not False


def _near(name: str) -> str:
    """The beginning of a remedy: a similar command or setting; "": none is similar."""
    if setting := near_setting(name):
        return f"/set {setting} VALUE sets that, "
    near = difflib.get_close_matches(name, [*COMMANDS, *_ALSO], 1)
    return f"/{_ALSO.get(near[0], near[0])} is near it, " if near else ""


def suggestions(line: str) -> Sequence[str] | None:
    """Completions of the last word of a line; None: file names."""
    if not line.startswith("/") or "\n" in line:
        return []
    command, *words = line.split(" ")
    if not words:
        return [f"/{name}" for name in ("help", *COMMANDS)]
    command = command.lower()
    if command == "/set":
        return setting_names() if len(words) == 1 else words_of(words[0]) * (len(words) == 2)
    return None if command in _OF_FILES and len(words) == 1 else []


def _help(talk: Talk) -> None:
    rows = [(each.usage, each.help) for each in COMMANDS.values()]
    rows.append(("/help", "Show these lines."))
    width = max(len(usage) for usage, _help in rows)
    lines = [f"{usage:<{width}}  {text}" for usage, text in rows]
    lines += [
        "",
        "Enter sends, Alt-Enter begins a new line, Up and Down go through the history.",
        "Ctrl-C stops an answer; twice, or Ctrl-D, leaves. A question that begins like a",
        "command is written with two slashes, and sent with one.",
    ]
    talk.say("\n".join(lines))


def _bye(_talk: Talk, _rest: str) -> bool:
    return False


def _new(talk: Talk, _rest: str) -> None:
    talk.conversation = Conversation(system=talk.conversation.system)


def _system(talk: Talk, rest: str) -> None:
    check_text(rest)
    if rest:
        said = None if rest in ("none", '""') else rest
        talk.check(conversation=replace(talk.conversation, system=said))
        talk.conversation.system = said
    talk.say(f"system: {talk.conversation.system or 'none'}")


def _set(talk: Talk, rest: str) -> None:
    name, _space, value = rest.partition(" ")
    if not name:
        _show(talk, "")
        return
    if not value.strip():
        raise RequestError(
            f"/set {name} has no value", remedy=f"write /set {name} VALUE; /show lists what is set"
        )
    changed = talk.settings.changed(name, value.strip())
    talk.check(settings=changed)
    talk.settings = changed
    talk.say(talk.settings.told(name, talk.usual_sampling))


def _show(talk: Talk, _rest: str) -> None:
    system = talk.conversation.system or "none"
    rows = [
        ("model", talk.model_name),
        ("system", system),
        *talk.settings.rows(talk.usual_sampling),
    ]
    width = max(len(name) for name, _value in rows)
    talk.say("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def _stats(talk: Talk, _rest: str) -> None:
    talk.show_figures()


def _plan(talk: Talk, _rest: str) -> None:
    talk.show_plan()


def _save(talk: Talk, rest: str) -> None:
    path = _path(rest, "save")
    talk.conversation.save(path, model=talk.model_name)
    talk.say(f"{len(talk.conversation.turns)} turns are in {path}")


def _load(talk: Talk, rest: str) -> None:
    kept = Conversation.load(_path(rest, "load"))
    talk.check(conversation=kept)
    talk.conversation = kept
    talk.say(f"{len(talk.conversation.turns)} turns; the conversation continues from there")


def _retry(talk: Talk, _rest: str) -> None:
    before = list(talk.conversation.turns)
    if not talk.conversation.forget_answer():
        raise RequestError("there is no answer yet to try again", remedy="ask something first")
    try:
        talk.ask_again()
    except BaseException:
        talk.conversation.turns = before
        raise


def _file(talk: Talk, rest: str) -> None:
    path, question = _file_and_text(rest, "file")
    try:
        text = read_file(path, _MOST_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8 text (byte {error.start})", remedy="name a text file"
        ) from error
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read ({error.strerror or error})", remedy="name another file"
        ) from error
    except ValueError as error:
        raise RequestError(f"{path} cannot be sent: {error}", remedy="name another file") from error
    talk.ask(f"{text}\n\n{question}" if question.strip() else text)


def _image(talk: Talk, rest: str) -> None:
    path, question = _file_and_text(rest, "image")
    talk.ask(question.strip(), [file_of(path)])


def _file_and_text(rest: str, command: str) -> tuple[Path, str]:
    found = _FILE_AND_TEXT.fullmatch(rest)
    return _path(found.group(1) if found else "", command), found.group(2) if found else ""


def _path(text: str, command: str) -> Path:
    if not text:
        raise RequestError(f"/{command} has no file", remedy=f"write /{command} FILE")
    return expanded(text.strip('"'))


COMMANDS = {
    "new": Command(usage="/new", help="Begin anew; the system message stays.", run=_new),
    "retry": Command(usage="/retry", help="Answer the last question again.", run=_retry),
    "system": Command(
        usage="/system [TEXT]", help="Set the system message; none removes it.", run=_system
    ),
    "file": Command(
        usage="/file FILE [TEXT]", help="Send a text file, and a question about it.", run=_file
    ),
    "image": Command(
        usage="/image FILE [TEXT]", help="Send an image, and a question about it.", run=_image
    ),
    "set": Command(
        usage="/set NAME VALUE", help="Set temperature, max-tokens and others.", run=_set
    ),
    "show": Command(usage="/show", help="Show what is set.", run=_show),
    "stats": Command(
        usage="/stats", help="Show the last answer's speed, and the free context.", run=_stats
    ),
    "plan": Command(usage="/plan", help="Show what runs where, and how fast.", run=_plan),
    "save": Command(usage="/save FILE", help="Save the conversation to a file.", run=_save),
    "load": Command(usage="/load FILE", help="Continue a saved conversation.", run=_load),
    "bye": Command(usage="/bye", help="Leave.", run=_bye),
}
"""The commands by name, without the slash."""

_ALSO = {"?": "help", "help": "help", "exit": "bye", "quit": "bye", "clear": "new"}
"""Aliases from other programs."""
