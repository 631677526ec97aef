"""`edge chat` on a real terminal: editing, history, pasting, Ctrl-C, every command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Any

import pytest

from edge.backends.null.program import NullProgram
from edge.demos.bundled import MODEL
from edge.membership.current import CurrentMembership
from tests.multiprocess.conftest import LONG_CONTEXT, with_long_context
from tests.support.null_peers import null_peers
from tests.support.processes import PATIENCE_S, Daemon
from tests.support.slow_cases import repeats_are_slow
from tests.support.terminal import (
    ALT_ENTER,
    BACKSPACE,
    CTRL_C,
    CTRL_D,
    ENTER,
    LEFT,
    TAB,
    UP,
    Terminal,
    pasted,
)

Open = Callable[..., Terminal]

COLOURS = re.compile(r"\x1b\[[0-9;]*(?:3[0-79]|4[0-79]|9[0-7]|[34]8)(?:;[0-9;]*)?m")

WAITS, HIDDEN = "\x1b[?2004h", "\x1b[?25l"
"""What the program writes when a line was sent, and then when it begins to show an answer."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), "--no-announce") as daemon:
        yield daemon
        assert daemon.messages == ""


@pytest.fixture
def chat(talker: Path, daemon: Daemon, tmp_path: Path) -> Open:
    """Starts one: short answers, by the daemon."""

    def start(*options: object, **settings: Any) -> Terminal:
        command = ("chat", talker, "-n", 6, "--peer", daemon.address, *options)
        return Terminal(*command, state=tmp_path, **settings)

    return start


@pytest.fixture(scope="module")
def endless_talker(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_long_context(talker, tmp_path_factory.mktemp("endless"))


def turns_of(terminal: Terminal, file: Path) -> list[dict[str, str]]:
    """What was said, by what `/save` writes."""

    def times_told() -> int:  # a narrow window breaks the line anywhere
        return " ".join(terminal.text.split()).count("turns are in")

    before = times_told()
    terminal.say(f"/save {file.name}")
    terminal.wait(lambda: times_told() > before)
    terminal.wait_for_prompt()
    turns: list[dict[str, str]] = json.loads(file.read_text())["turns"]
    return turns


def test_lines_are_edited_and_kept_for_the_next_time(chat: Open, tmp_path: Path) -> None:
    with chat() as terminal:
        terminal.wait_for_prompt()
        assert "talker (int4) on 1 device, context 512\n" in terminal.text
        terminal.send(f"Helxlo{LEFT * 2}{BACKSPACE}")
        terminal.wait_for("> Hello")
        terminal.send(ENTER)
        terminal.wait_for("[cut at 6 tokens; /set max-tokens N for longer ones]")
        terminal.wait_for_prompt()
        terminal.send(f"one{ALT_ENTER}")
        terminal.say("two")
        terminal.wait(lambda: terminal.text.count("[cut at 6") == 2)
        terminal.wait_for_prompt()
        asked = turns_of(terminal, tmp_path / "a.json")[::2]
        assert [each["content"] for each in asked] == ["Hello", "one\ntwo"]
        terminal.send(CTRL_D)
        assert terminal.end() == 0
    history = tmp_path / "edge" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    with chat() as terminal:
        terminal.wait_for_prompt()
        terminal.send(UP * 4)  # a turn of two lines takes two
        terminal.wait_for("> Hello")
        terminal.send(ENTER)
        terminal.wait_for("[cut at 6")
        terminal.wait_for_prompt()
        terminal.say("/bye")
        assert terminal.end() == 0


def test_a_window_that_changes(chat: Open, tmp_path: Path) -> None:
    """What is typed is laid out anew, and is sent whole."""
    line = "0123456789" * 8
    with chat() as terminal:
        terminal.wait_for_prompt()
        terminal.send(line)
        terminal.wait(lambda: terminal.last_line == f"> {line}")
        terminal.resize(60, 20)
        terminal.wait(lambda: terminal.last_line == f"  {line[58:]}")
        terminal.resize(100, 30)
        terminal.wait(lambda: terminal.last_line == f"> {line}")
        terminal.send(ENTER)
        terminal.wait_for("[cut at 6")
        terminal.wait_for_prompt()
        assert turns_of(terminal, tmp_path / "a.json")[0]["content"] == line
        terminal.say("/bye")
        assert terminal.end() == 0


def test_a_long_paste_of_three_lines_is_one_turn(endless_talker: Path, tmp_path: Path) -> None:
    """And is answered, by a peer that computes nothing: it would take a while."""
    text = "\n".join("Hello there " * 560 + f"line {number}" for number in range(3)) + "y" * 20
    assert len(text) > 20_000
    with Daemon(tmp_path / "daemon", "--no-announce", "--backend", "null") as daemon:
        command = ("chat", endless_talker, "-n", 6, "--peer", daemon.address)
        with Terminal(*command, "--context", LONG_CONTEXT, state=tmp_path) as terminal:
            terminal.wait_for_prompt()
            terminal.send(pasted(text))
            terminal.wait(lambda: terminal.last_line.endswith("yyyyyyyyyy"))
            terminal.send(ENTER)
            terminal.wait_for("tokens, first after ")
            terminal.wait_for_prompt()
            question, _answer = turns_of(terminal, tmp_path / "a.json")
            assert question == {"role": "user", "content": text}
            terminal.say("/bye")
            assert terminal.end() == 0


def test_what_has_no_room_is_refused_when_it_is_typed(chat: Open, tmp_path: Path) -> None:
    """And is not kept: the next question is answered."""
    turns = [{"role": "user", "content": "x" * 900}, {"role": "assistant", "content": "y"}]
    kept = {"format": "edge conversation", "model": "m", "system": None, "turns": turns}
    (tmp_path / "long").write_text(json.dumps(kept))
    with chat() as terminal:
        terminal.wait_for_prompt()
        for number, line in enumerate((f"/system {pasted('x' * 900)}", "/load long"), 1):
            terminal.send(line)
            terminal.wait(lambda: not terminal.last_line.endswith(">"))
            terminal.send(ENTER)
            terminal.wait(lambda: terminal.text.count("the context has room") == number)  # noqa: B023 - at once
            terminal.wait_for_prompt()
        terminal.say("Hello")
        terminal.wait_for("[cut at 6")
        terminal.wait_for_prompt()
        assert len(turns_of(terminal, tmp_path / "a.json")) == 2
        assert json.loads((tmp_path / "a.json").read_text())["system"] is None
        terminal.say("/bye")
        assert terminal.end() == 0


@contextlib.contextmanager
def waiting_peer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Event, Event]]:
    """A peer of this process: its address, what is set when it should compute, what lets it."""
    asked, done = Event(), Event()
    forward = NullProgram.forward

    def waits(self: NullProgram, *given: Any) -> Any:
        asked.set()
        done.wait()
        return forward(self, *given)

    async def serve(address: Queue[str], ended: asyncio.Event) -> None:
        async with null_peers(folder, 1, membership=CurrentMembership("tests").current()) as (
            daemon,
        ):
            monkeypatch.setattr(NullProgram, "forward", waits)
            address.put(daemon.resources.addresses[0])
            await ended.wait()

    loop, address, ended = asyncio.new_event_loop(), Queue[str](), asyncio.Event()
    thread = Thread(target=loop.run_until_complete, args=(serve(address, ended),))
    thread.start()
    try:
        yield address.get(timeout=PATIENCE_S), asked, done
    finally:
        done.set()
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def test_ctrl_c_before_an_answer_begins(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its peer computes: the question is taken back, and told so."""
    with (
        waiting_peer(tmp_path / "peer", monkeypatch) as (address, asked, done),
        Terminal("chat", talker, "-n", 6, "--peer", address, state=tmp_path) as terminal,
    ):
        terminal.wait_for_prompt()
        terminal.say("Hello")
        assert asked.wait(PATIENCE_S)
        terminal.send(CTRL_C)
        terminal.wait_for("[stopped before an answer began; the conversation is as it was]")
        terminal.wait_for_prompt()
        assert turns_of(terminal, tmp_path / "a.json") == []
        done.set()
        terminal.say("/bye")
        assert terminal.end() == 0


def test_what_is_typed_ahead_is_sent_as_it_was_typed(chat: Open, tmp_path: Path) -> None:
    """While the model is loaded, and while it answers."""
    with chat() as terminal:
        terminal.wait(lambda: "\x1b[?2004h" in terminal.output)
        terminal.send(f"Hello{ENTER}/show{ENTER}{pasted('two' + ENTER + 'lines')}")
        terminal.wait_for("max-new-tokens      6")
        assert terminal.text.index("[cut at 6") > terminal.text.index("> Hello")
        terminal.wait_for("  lines")
        terminal.send(ENTER)
        terminal.wait(lambda: terminal.text.count("[cut at 6") == 2)
        terminal.wait_for_prompt()
        asked = turns_of(terminal, tmp_path / "a.json")[::2]
        assert [each["content"] for each in asked] == ["Hello", "two\nlines"]
        terminal.say("/bye")
        assert terminal.end() == 0
        assert terminal.is_as_found()


def test_ctrl_c_at_the_prompt(chat: Open) -> None:
    with chat() as terminal:
        terminal.wait_for_prompt()
        terminal.send("half a line")
        terminal.wait_for("> half a line")
        terminal.send(CTRL_C)
        terminal.wait_for_prompt()
        assert "Press Ctrl-C again" not in terminal.text
        terminal.send(CTRL_C)
        terminal.wait_for("Press Ctrl-C again, or Ctrl-D, to leave.")
        terminal.wait_for_prompt()
        terminal.send("another")
        terminal.wait_for("> another")
        terminal.send(CTRL_C)
        terminal.wait_for_prompt()
        terminal.say("Hello")
        terminal.wait_for("[cut at 6")
        terminal.wait_for_prompt()
        terminal.send(CTRL_C)
        terminal.wait(lambda: terminal.text.count("Press Ctrl-C again") == 2)
        terminal.wait_for_prompt()
        terminal.send(CTRL_C)
        assert terminal.end() == 0


def test_ctrl_c_in_an_answer(daemon: Daemon, endless_talker: Path, tmp_path: Path) -> None:
    """It stops, what was said counts, and the model answers on; also while the window changes."""
    command = (
        "chat",
        endless_talker,
        "--dtype",
        "int4-pure",
        "--peer",
        daemon.address,
        "--context",
        LONG_CONTEXT,
    )
    with Terminal(*command, state=tmp_path) as terminal:
        terminal.wait_for_prompt()
        terminal.say("Hello")
        begun = len(terminal.text)
        terminal.wait(lambda: len(terminal.text) > begun + 500)
        terminal.resize(60, 20)
        seen = len(terminal.output)
        terminal.wait(lambda: len(terminal.output) > seen + 2000)
        terminal.send(CTRL_C)
        terminal.wait_for("[stopped]")
        terminal.wait_for_prompt()
        terminal.say("/stats")
        terminal.wait_for("when it was stopped, on 1 device]")
        terminal.wait_for_prompt()
        question, answer = turns_of(terminal, tmp_path / "a.json")
        assert (question["content"], question["role"]) == ("Hello", "user")
        assert len(answer["content"]) > 200
        terminal.say("/set max-tokens 3")
        terminal.wait_for("max-new-tokens: 3")
        terminal.wait_for_prompt()
        terminal.say("And now?")
        terminal.wait_for("[cut at 3 tokens")
        terminal.wait_for_prompt()
        assert len(turns_of(terminal, tmp_path / "b.json")) == 4
        terminal.say("/set max-tokens none")
        terminal.wait(lambda: terminal.last_line == ">")
        terminal.say("More")
        seen = len(terminal.output)
        terminal.wait(lambda: len(terminal.output) > seen + 2000)
        terminal.send(CTRL_C)
        terminal.wait(lambda: terminal.text.count("[stopped]") == 2)
        terminal.wait_for_prompt()
        terminal.send(CTRL_C)
        assert terminal.end() == 0, "twice leaves"
    assert daemon.messages == ""


@pytest.mark.parametrize(
    ("kind", "moment"),
    repeats_are_slow(product(["xterm-256color", "dumb"], ["at the prompt", "in an answer"])),
)
def test_a_terminal_that_goes_away(
    daemon: Daemon, endless_talker: Path, tmp_path: Path, kind: str, moment: str
) -> None:
    """It ends as by a hangup, also where it was to outlive its terminal, and nobody answers on."""
    command = (
        "chat",
        endless_talker,
        "--dtype",
        "int4-pure",
        "--peer",
        daemon.address,
        "--context",
        LONG_CONTEXT,
    )
    settings: Any = {"environment": {"TERM": kind}, "ignores_hangup": True}
    with Terminal(*command, state=tmp_path, **settings) as terminal:
        if kind == "dumb":
            terminal.wait(terminal.reads_keys)
        else:
            terminal.wait_for_prompt()
        if moment == "in an answer":
            terminal.send(f"Hello{ENTER}")
            begun = len(terminal.output)
            terminal.wait(lambda: len(terminal.output) > begun + 500)
        assert terminal.go_away() == 128 + signal.SIGHUP
    assert daemon.messages == ""


def test_a_lost_peer_does_not_end_the_conversation(talker: Path, tmp_path: Path) -> None:
    with Daemon(tmp_path / "daemon", "--no-announce") as daemon:
        command = ("chat", talker, "-n", 6, "--peer", daemon.address)
        with Terminal(*command, state=tmp_path) as terminal:
            terminal.wait_for_prompt()
            terminal.say("Hello")
            terminal.wait_for("[cut at 6")
            terminal.wait_for_prompt()
            daemon.kill()
            terminal.say("Are you there?")
            terminal.wait(lambda: "/save keeps it" in terminal.text.replace("\n", ""))
            terminal.wait_for_prompt()
            assert len(turns_of(terminal, tmp_path / "a.json")) == 2
            terminal.say("And now?")
            terminal.wait(lambda: terminal.text.count("edge: none of the cluster's peers") >= 1)
            terminal.wait_for_prompt()
            terminal.say("/bye")
            assert terminal.end() == 0


def test_every_command(chat: Open, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Grüße")
    with chat("--system", "Be brief.") as terminal:

        def say(line: str, answer: str) -> None:
            terminal.wait_for_prompt()
            before = told(answer)
            terminal.say(line)
            terminal.wait(lambda: told(answer) > before)

        def told(answer: str) -> int:
            """How often, wherever a long path has broken the line."""
            return " ".join(terminal.text.split()).count(" ".join(answer.split()))

        say("/help", "/retry             Answer the last question again.")
        say("/hlep", "edge: /hlep is no command; /help is near it, /help lists them all")
        say("/retry", "edge: there is no answer yet to try again")
        say("/stats", "edge: there is no answer yet; ask something first")
        say("Hello", "[cut at 6")
        say("/stats", "the conversation has ")
        say("/plan", "talker on 1 of 1 peers")
        say("/show", "max-new-tokens      6")
        say("/set top-k 2", "top-k: 2")
        say("/set temperature 0.5", "temperature: 0.5")
        say("/set --seed 7", "seed: 7")
        say("/show", "seed                7")
        say("/set temperatur 1", "edge: temperatur cannot be set; do you mean temperature?")
        say("/set temperature hot", "edge: temperature is a number, not 'hot'")
        say("/set temperature -1", "edge: temperature must be")
        say("/set seed", "edge: /set seed has no value; write /set seed VALUE")
        say("/set thoughts loud", "edge: thoughts is one of fold, show, hide, not 'loud'")
        say("/set thinking loud", "edge: thinking is one of on, off, default, not 'loud'")
        say("/set logit-bias 3=-1,4=2", "logit-bias: 3=-1,4=2")
        tokens = int(terminal.text.rpartition("the conversation has ")[2].split()[0])
        say("/set thinking off", "thinking: off")
        say("/stats", f"the conversation has {tokens + len('<quick>')} of")
        say("/set markdown off", "markdown: off")
        say("/retry", "[cut at 6")
        say("/system", "system: Be brief.")
        say("/system Be long.", "system: Be long.")
        say("/file text What is it?", "[cut at 6")
        say("/file .", "edge: ")
        say("/file", "edge: /file has no file; write /file FILE")
        say("//not a command", "[cut at 6")
        say("/usr/bin is a path", "[cut at 6")
        terminal.wait_for_prompt()
        turns = turns_of(terminal, tmp_path / "a.json")
        assert [each["content"] for each in turns[::2]] == [
            "Hello",
            "Grüße\n\nWhat is it?",
            "/not a command",
            "/usr/bin is a path",
        ]
        say("/new", ">")
        assert turns_of(terminal, tmp_path / "b.json") == []
        say("/load a.json", "8 turns; the conversation continues from there")
        say("/load text", "is no conversation")
        say("/save text", "exists already and is no")
        say("/save /", "edge: / exists already and is no")
        assert turns_of(terminal, tmp_path / "c.json") == turns
        for typed, offered, completed in (
            ("/sa", "/save", "> /save"),
            (" te", "text", "> /save text"),
            (f"{CTRL_C}/set mnp", "min-p", "> /set min-p"),
        ):
            terminal.send(typed)
            terminal.wait(lambda: terminal.text.endswith(f" {offered}"))  # noqa: B023 - at once
            terminal.send(TAB)
            terminal.wait(lambda: terminal.last_line == completed)  # noqa: B023 - at once
        terminal.send(CTRL_C)
        say("/bye", "/bye")
        assert terminal.end() == 0


def test_characters_that_are_split_over_tokens(daemon: Daemon, tmp_path: Path) -> None:
    """They come whole, also those of several columns: the bundled model has a token a byte."""
    said = "Grüße, 😀 日本"
    (tmp_path / "said.json").write_text(json.dumps({"const": said}))
    command = ("chat", MODEL, "--json-schema", "said.json", "--peer", daemon.address)
    with Terminal(*command, state=tmp_path, columns=40) as terminal:
        terminal.wait_for_prompt()
        terminal.say("Wie geht's, 日本?")
        terminal.wait(lambda: said in terminal.output)
        terminal.wait_for_prompt()
        asked, answer = turns_of(terminal, tmp_path / "a.json")
        assert asked["content"] == "Wie geht's, 日本?"
        assert json.loads(answer["content"]) == said
        assert "\N{REPLACEMENT CHARACTER}" not in terminal.output


def test_without_colours(chat: Open) -> None:
    for environment, has_colours in (({"NO_COLOR": "1"}, False), ({}, True)):
        with chat(environment=environment) as terminal:
            terminal.wait_for_prompt()
            terminal.say("/plan")
            terminal.wait_for("The speed is not known")
            terminal.wait_for_prompt()
            terminal.say("Hello")
            terminal.wait_for("[cut at 6")
            terminal.wait_for_prompt()
            terminal.send("/")
            terminal.wait_for("/retry")
            terminal.send(CTRL_C)
            terminal.wait_for_prompt()
            terminal.send(CTRL_D)
            assert terminal.end() == 0
            assert bool(COLOURS.search(terminal.output)) == has_colours


def test_a_terminal_that_moves_no_cursor(
    daemon: Daemon, endless_talker: Path, tmp_path: Path
) -> None:
    """Lines are read as the system reads them, but whole: it keeps 4,095 bytes of one."""
    command = ("chat", endless_talker, "-n", 6, "--peer", daemon.address)
    with Terminal(
        *command, "--context", LONG_CONTEXT, state=tmp_path, environment={"TERM": "dumb"}
    ) as terminal:
        terminal.wait(terminal.reads_keys)
        terminal.send(f"Helxx{BACKSPACE}{BACKSPACE}lo{ENTER}")
        terminal.wait_for("Hello")
        terminal.wait_for("[cut at 6")
        terminal.wait(terminal.reads_keys)
        text = "x" * 9_000 + "ü its end"
        terminal.send(f"/system {text}{ENTER}")
        terminal.wait_for("system: xxxx")
        terminal.wait(terminal.reads_keys)
        terminal.send(f"/save a.json{ENTER}")
        terminal.wait_for("2 turns are in")
        kept = json.loads((tmp_path / "a.json").read_text())
        assert (kept["system"], kept["turns"][0]["content"]) == (text, "Hello")
        terminal.wait(terminal.reads_keys)
        terminal.send(CTRL_D)
        assert terminal.end() == 0
        assert "\x1b" not in terminal.output
