"""Stop strings end answers where they are said, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import RequestError
from edge.text.answer_forms import AnswerForm
from edge.text.answer_parser import AnswerParser, read_answer, whole_answer
from edge.text.answer_parts import ReadAnswer, ToolCall
from edge.text.answer_stream import AnswerStream

TOOLS: dict[str, Any] = {"f": {}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": "Question: no"}}</tool_call>'
CHANNELS = AnswerForm(calls="channels", thoughts="analysis")
START = "<|channel|>analysis<|message|>The Question: hm.<|end|><|start|>assistant"


def read(
    pieces: Sequence[str], stop: Sequence[str], form: AnswerForm | None = None, **how: Any
) -> tuple[str, ReadAnswer, str | None]:
    stream = AnswerStream(AnswerParser(form, tools=TOOLS, **how), stop)
    told = [stream.push(piece) for piece in pieces]
    told.append(stream.finish())
    text = "".join(shown for shown, _parts in told)
    return (
        text,
        whole_answer(itertools.chain(*(parts for _shown, parts in told))),
        stream.stopped_by,
    )


def answer(content: str, reasoning: str = "", *calls: ToolCall) -> ReadAnswer:
    return ReadAnswer(content=content, reasoning=reasoning, tool_calls=calls)


CASES: list[Any] = [
    ("So. Question: why", None, {}, ("So. ", answer("So. "))),
    (
        "<think>I see a Question: it is easy.</think>The answer is 4. Question: x",
        None,
        {},
        (
            "<think>I see a Question: it is easy.</think>The answer is 4. ",
            answer("The answer is 4. ", "I see a Question: it is easy."),
        ),
    ),
    (
        "a Question: b</think>\n\nYes Question:",
        None,
        {"thinking": True},
        ("a Question: b</think>\n\nYes ", answer("Yes ", "a Question: b")),
    ),
    (
        f"Look. {CALL}Question: more",
        None,
        {},
        (
            f"Look. {CALL}",
            answer("Look.", "", ToolCall(name="f", arguments={"x": "Question: no"})),
        ),
    ),
    (
        f"{START}<|channel|>final<|message|>It is 4. Question: more",
        CHANNELS,
        {},
        (
            f"{START}<|channel|>final<|message|>It is 4. ",
            answer("It is 4. ", "The Question: hm."),
        ),
    ),
    # What only looks like a call is said.
    ("Quest <tool_call>Question: x", None, {}, ("Quest <tool_call>", answer("Quest <tool_call>"))),
]


@pytest.mark.parametrize(("text", "form", "how", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stop_string_counts_in_what_is_said(
    text: str, form: AnswerForm | None, how: dict[str, Any], expected: Any, size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    shown, found, stopped = read(pieces, ["Question:", "Observation:"], form, **how)
    assert (shown, found) == expected
    assert stopped == "Question:"


@pytest.mark.parametrize(
    ("text", "form", "stop"),
    [
        (f"{START}<|channel|>final<|message|>It is 4.", CHANNELS, ["<|", "<|end|>", "analysis"]),
        ("<think>a</think>b", None, ["<think>", "</think>", "think"]),
        (f"a{CALL}", None, ["tool_call", '"name"', "a<"]),
        ("Quest<think>ion:", None, ["Question:"]),
        ("Ques" + CALL + "tion:", None, ["Question:"]),
    ],
)
def test_marks_thoughts_and_calls_stop_nothing(
    text: str, form: AnswerForm | None, stop: list[str]
) -> None:
    for size in (1, 4, 100):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(pieces, stop, form) == (text, read_answer(text, form, tools=TOOLS), None)


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL]
OF_CHANNELS = [
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "analysis", "final"),
    "<|channel|>final<|message|>",
]
PLAIN = ["a", "ab", "b", "\n\n", " ", "<"]


@settings(max_examples=400)
@given(st.data(), st.sampled_from([None, CHANNELS]), st.booleans())
def test_an_answer_ends_where_its_said_text_has_a_stop_string(
    data: st.DataObject, form: AnswerForm | None, thinking: bool
) -> None:
    """However it is cut into pieces; what is shown reads as what was told."""
    marks = MARKS if form is None else OF_CHANNELS
    words = data.draw(st.lists(st.sampled_from([*marks, *PLAIN]), max_size=9))
    stop = data.draw(st.lists(st.text("ab <\n", min_size=1, max_size=3), max_size=2))
    text = "".join(words)
    whole = [read(pieces, stop, form, thinking=thinking) for pieces in ([text], list(text), words)]
    assert whole[0] == whole[1] == whole[2]
    shown, found, stopped = whole[0]
    assert text.startswith(shown)
    again = read_answer(shown, form, tools=TOOLS, thinking=thinking)
    assert again.content.strip() == found.content.strip()
    assert again.tool_calls == found.tool_calls
    said = read_answer(text, form, tools=TOOLS, thinking=thinking).content
    if stopped is None:
        assert (shown, found) == (
            text,
            read_answer(text, form, tools=TOOLS, thinking=thinking),
        )
    else:
        assert stopped in stop
        assert stopped in said or found.tool_calls or "\n" in stopped or " " in stopped
        assert not any(each in found.content for each in stop) or found.tool_calls


@pytest.mark.parametrize("stop", [(), ("zebra",)])
def test_a_stop_string_that_does_not_come_changes_no_part(stop: tuple[str, ...]) -> None:
    """A client would get an event for each character."""
    stream = AnswerStream(AnswerParser(tools=TOOLS), stop)
    words = ["<think>", "Hm, ", "so.", "</think>", "The ", "answer ", "is ", CALL, " four", "."]
    counts = [len(stream.push(word)[1]) for word in words]
    assert counts == [0, 1, 1, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("stop", [[""], ["a", ""], "a"])
def test_what_is_no_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(RequestError, match="stop must be a list of strings"):
        AnswerStream(AnswerParser(), stop)
