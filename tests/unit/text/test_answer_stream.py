"""Stop strings end answers where they are said, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
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


WORDS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "a", "ab", "b", "\n\n", " ", "<"]
)


@given(st.lists(WORDS, max_size=9), st.lists(st.text("ab <\n", min_size=1, max_size=3), max_size=2))
def test_an_answer_ends_where_its_said_text_has_a_stop_string(
    words: list[str], stop: list[str]
) -> None:
    """However it is cut into pieces; what is shown is a beginning of the text."""
    text = "".join(words)
    whole = [read([text], stop), read(list(text), stop), read(words, stop)]
    assert whole[0] == whole[1] == whole[2]
    shown, found, stopped = whole[0]
    assert text.startswith(shown)
    if stopped is None:
        assert (shown, found) == (text, read_answer(text, tools=TOOLS))
    else:
        assert stopped in stop
        assert not found.tool_calls or stopped not in found.content


@pytest.mark.parametrize("stop", [[""], ["a", ""], "a"])
def test_what_is_no_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(RequestError, match="stop must be a list of strings"):
        AnswerStream(AnswerParser(), stop)
