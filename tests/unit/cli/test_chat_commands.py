"""What the lines of a conversation mean, what is set, and files of conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.answers.terms import GenerationOptions
from edge.cli.chat.commands import COMMANDS, as_question, is_command, run_command, suggestions
from edge.cli.chat.conversation import Conversation
from edge.cli.chat.settings import Settings, setting_names, words_of
from edge.errors import RequestError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.pictures.messages import taken_out

SETTINGS = Settings(generation=GenerationOptions(max_new_tokens=None))


@pytest.mark.parametrize(
    "name", [*COMMANDS, "help", "?", "nothing", "New", "BYE", "a-b", "max_tokens", "help!", "été"]
)
def test_a_slash_and_a_word_are_a_command(name: str) -> None:
    for line in (f"/{name}", f"/{name} something", f"/{name}\nlines", f"/{name} a/b"):
        assert is_command(line)
        assert as_question(f"/{line}") == line, "two slashes send it"


@pytest.mark.parametrize(
    "line",
    ["/", "//", "/usr/bin is what?", "new", " /new", "/1", "/ new", "// a comment", "//a/b", "/_"],
)
def test_other_lines_go_to_the_model(line: str) -> None:
    assert not is_command(line)
    assert as_question(line) == line


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/halp", "/halp is no command; /help is near it, /help lists"),
        ("/Byee", "/Byee is no command; /bye is near it"),
        ("/quti now", "/bye is near it"),
        ("/bye!", "/bye is near it"),
        ("/max_tokens 5", "/max_tokens is no command; /set max-new-tokens VALUE sets that"),
        ("/Temprature 1", "/set temperature VALUE sets that"),
        ("/zzzz\u202e", r"/zzzz\\u202e is no command; /help lists them all, and a question"),
    ],
)
def test_a_command_that_is_none_names_what_is_near(line: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        run_command(Silent(), line)


def test_commands_are_known_in_capitals_and_by_other_names() -> None:
    for name in ("bye", "BYE", "Exit", "QUIT"):
        assert run_command(Silent(), f"/{name}") is False
    talk = Silent()
    talk.conversation.ask("a")
    assert run_command(talk, "/Clear")
    assert talk.conversation.turns == []
    assert run_command(talk, "/Help")
    assert talk.said[-1].startswith("/new ")
    assert "seed" in (suggestions("/SET s") or ())


class Silent:
    """A conversation without a model."""

    model_name = "m"
    usual_sampling = SamplingParameters()

    def __init__(self) -> None:
        self.conversation = Conversation()
        self.settings = SETTINGS
        self.said: list[str] = []

    def check(
        self, *, settings: Settings | None = None, conversation: Conversation | None = None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)

    def ask(self, question: str, images: Sequence[bytes] = ()) -> None:
        self.conversation.ask(question, images)

    def ask_again(self) -> None:
        raise AssertionError

    def show_figures(self) -> None:
        raise AssertionError

    def show_plan(self) -> None:
        raise AssertionError


def test_what_is_set() -> None:
    found = SETTINGS
    for name, value in (
        ("max-tokens", "7"),
        ("temperature", "0.5"),
        ("--top-p", "0.9"),
        ("top_k", "3"),
        ("stop", "and then"),
        ("seed", "12"),
        ("markdown", "off"),
        ("thoughts", "hide"),
        ("thinking", "off"),
        ("logit-bias", "7=-100,8=.5"),
    ):
        found = found.changed(name, value)
    assert found == Settings(
        generation=GenerationOptions(
            max_new_tokens=7,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            stop=("and then",),
            seed=12,
            thinking=False,
            logit_bias={7: -100, 8: 0.5},
        ),
        markdown=False,
        thoughts="hide",
    )
    usual = SamplingParameters(temperature=0.3, min_p=0.1)
    assert ("max-new-tokens", "7") in found.rows(usual)
    assert ("stop", "and then") in found.rows(usual)
    books = found.changed("context", "handbook, law")
    assert ("context", "handbook, law") in books.rows(usual)
    assert books.changed("context", "none").generation.context == ()
    assert ("temperature", "0.5") in found.rows(usual)
    assert ("min-p", "0.1 (the model's)") in found.rows(usual)
    assert ("thinking", "off") in found.rows(usual)
    assert ("logit-bias", "7=-100,8=0.5") in found.rows(usual)
    assert found.changed("thinking", "on").generation.thinking is True
    for name in ("max-tokens", "stop", "seed", "temperature", "thinking", "logit-bias"):
        found = found.changed(name, "none")
    assert (found.generation.max_new_tokens, found.generation.stop) == (None, ())
    assert (found.generation.seed, found.generation.temperature) == (None, None)
    assert (found.generation.thinking, found.generation.logit_bias) == (None, None)


@pytest.mark.parametrize("name", [name for name, _ in SETTINGS.rows(SamplingParameters())])
def test_whatever_is_listed_can_be_set(name: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    special = {
        "markdown": "off",
        "thinking": "off",
        "thoughts": "hide",
        "logit-bias": "3=1",
        "json-schema": str(schema),
    }
    found = SETTINGS.changed(name, special.get(name, "1"))
    assert found != SETTINGS
    if name == "json-schema":
        assert found.generation.json_schema == {"type": "integer"}
        assert SETTINGS.changed(name, "object").generation.json_schema == "object"


@pytest.mark.parametrize("name", setting_names())
def test_whatever_is_suggested_can_be_set(name: str) -> None:
    assert name in (suggestions("/set t") or ())
    for word in words_of(name):
        assert word in (suggestions(f"/set {name} ") or ())
        SETTINGS.changed(name, word)


def test_what_is_suggested_of_a_line() -> None:
    assert set(suggestions("/s") or ()) == {"/help", *(f"/{name}" for name in COMMANDS)}
    assert suggestions("/set thoughts s") == ["fold", "show", "hide"]
    for line in ("/load ~/t", "/save t", "/file a"):
        assert suggestions(line) is None, "names of files"
    for line in ("", "hello", "/set seed 3", "/set thinking on ", "/file a b", "/show a", "/x\n/"):
        assert suggestions(line) == [], line


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temprature", "1", "cannot be set; do you mean temperature"),
        ("x", "1", "cannot be set; there are max-new-tokens"),
        ("top-k", "1.5", "top-k is a whole number"),
        ("temperature", "-1", "temperature must be"),
        ("temperature", "nan", "temperature must be"),
        ("temperature", "hot", "temperature is a number"),
        ("max-tokens", "0", "max_new_tokens must be 1 or more"),
        ("markdown", "yes", "markdown is one of on, off"),
        ("thinking", "hide", "thinking is one of on, off, default, not 'hide'"),
        ("logit-bias", "3", "'3' is no logit bias; write ID=BIAS"),
        ("logit-bias", "-1=2", "a token id of logit_bias must be a whole number"),
        ("ignore-eos", "1", "cannot be set"),
    ],
)
def test_what_cannot_be_set(name: str, value: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        SETTINGS.changed(name, value)
    assert raised.value.remedy


@settings(max_examples=25)
@given(st.none() | st.text(min_size=1), st.lists(st.tuples(st.text(), st.text()), max_size=4))
def test_a_conversation_is_what_was_kept(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, turns: list[tuple[str, str]]
) -> None:
    file = tmp_path_factory.mktemp("kept") / "talk.json"
    talk = Conversation(system=system)
    for question, answer in turns:
        talk.ask(question)
        talk.answered(answer)
    if any("\ud800" <= letter <= "\udfff" for letter in str(talk)):
        return
    talk.save(file, model="m")
    assert Conversation.load(file) == talk
    assert file.stat().st_mode & 0o777 == 0o600, "for nobody else"


def test_turns_are_taken_back() -> None:
    talk = Conversation(system="S")
    assert not talk.forget_answer()
    talk.ask("a")
    assert not talk.forget_answer()
    talk.answered("b")
    assert talk.messages() == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert talk.forget_answer()
    talk.forget_question()
    assert talk.turns == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is no conversation; /save writes one"),
        ({}, "is no conversation"),
        ({"format": "edge conversation"}, "is damaged"),
        ({"format": "edge conversation", "system": 1, "turns": []}, "is damaged"),
        ({"format": "edge conversation", "turns": [{"role": "user", "content": "x"}]}, "damaged"),
        (
            {
                "format": "edge conversation",
                "turns": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}],
            },
            "is damaged",
        ),
        (
            {
                "format": "edge conversation",
                "turns": [{"role": "user", "content": []}, {"role": "assistant", "content": ""}],
            },
            "is damaged",
        ),
    ],
)
def test_files_that_hold_no_conversation(tmp_path: Path, value: object, message: str) -> None:
    file = tmp_path / "file"
    file.write_text(json.dumps(value))
    with pytest.raises(RequestError, match=message):
        Conversation.load(file)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff{")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(RequestError, match=f"{path.name} .*; name a file that /save wrote"):
            Conversation.load(path)
    with pytest.raises(RequestError, match=r"cannot be used.*; name another file"):
        Conversation().save(tmp_path / "missing" / "file", model="m")


def test_an_image_is_asked_about_and_kept_with_the_conversation(tmp_path: Path) -> None:
    talk = Silent()
    (tmp_path / "a b.png").write_bytes(b"a picture")
    (tmp_path / "c.png").write_bytes(b"another")
    run_command(talk, f'/image "{tmp_path}/a b.png" What is it?')
    talk.conversation.answered("A dog.")
    run_command(talk, f"/image {tmp_path}/c.png")
    talk.conversation.answered("A cat.")
    talk.conversation.save(tmp_path / "kept", model="m")
    kept = Conversation.load(tmp_path / "kept")
    assert kept == talk.conversation
    messages, files = taken_out(kept.messages())
    assert files == [b"a picture", b"another"]
    assert messages == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "A cat."},
    ]


def test_an_image_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="/image has no file; write /image FILE"):
        run_command(Silent(), "/image")
    with pytest.raises(RequestError, match=r"none\.png cannot be read"):
        run_command(Silent(), f"/image {tmp_path}/none.png What?")
    assert suggestions("/image a") is None


@pytest.mark.parametrize("images", ["/etc/passwd", ["/etc/passwd"], [3], {}])
def test_images_of_a_file_are_its_own(tmp_path: Path, images: object) -> None:
    """A conversation that somebody sent reads no other files."""
    talk = Silent()
    talk.conversation.ask("a", [b"x"])
    talk.conversation.answered("b")
    talk.conversation.save(tmp_path / "kept", model="m")
    value = json.loads((tmp_path / "kept").read_text())
    value["turns"][0]["images"] = images
    (tmp_path / "kept").write_text(json.dumps(value))
    with pytest.raises(RequestError, match="is damaged"):
        Conversation.load(tmp_path / "kept")
