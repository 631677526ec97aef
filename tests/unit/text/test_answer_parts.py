"""What is said, thought and called is told apart, however an answer's text is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.text.answer_parser import AnswerParser, read_answer
from edge.text.answer_parts import ReadAnswer, Said, ToolCall
from tests.support.call_templates import cut, parts_of

PARIS = ToolCall(name="weather", arguments={"city": "Paris", "days": [1, {"a": "}]</tool_call>"}]})
LIMA = ToolCall(name="add.one", arguments={})
ONE = json.dumps({"name": PARIS.name, "arguments": PARIS.arguments})
LLAMA = json.dumps({"name": PARIS.name, "parameters": PARIS.arguments})
OTHER = json.dumps({"name": LIMA.name, "arguments": {}})
TOOLS: dict[str, dict[str, tuple[str, ...]]] = {PARIS.name: {}, LIMA.name: {}}

CALLS = {
    f"<tool_call>\n{ONE}\n</tool_call>": [PARIS],
    f"<tool_call>{ONE}</tool_call>\n<tool_call>{OTHER}</tool_call>": [PARIS, LIMA],
    f"<tool_call>[{ONE}, {OTHER}]</tool_call>": [PARIS, LIMA],
    f"<tool_call>\n{ONE}": [PARIS],
    f"[TOOL_CALLS][{ONE}, {OTHER}]": [PARIS, LIMA],
    f"[TOOL_CALLS] [{ONE}]": [PARIS],
    f"[TOOL_CALLS]weather[ARGS]{json.dumps(PARIS.arguments)}": [PARIS],
    f"[TOOL_CALLS]weather[CALL_ID]ab12[ARGS]{json.dumps(PARIS.arguments)}[TOOL_CALLS]add.one{{}}": [
        PARIS,
        LIMA,
    ],
    f"[{ONE}, {OTHER}]": [PARIS, LIMA],
    LLAMA: [PARIS],
    f"\n{LLAMA}; {OTHER}": [PARIS, LIMA],
    f"<|python_tag|>{LLAMA}": [PARIS],
    json.dumps({"type": "function", "function": "weather", "parameters": PARIS.arguments}): [PARIS],
    json.dumps({"name": "weather", "arguments": json.dumps(PARIS.arguments)}): [PARIS],
    json.dumps({"id": "1", "function": {"name": "add.one"}}): [LIMA],
}


def whole(calls: list[ToolCall], content: str = "", reasoning: str = "") -> ReadAnswer:
    return ReadAnswer(content=content, reasoning=reasoning, tool_calls=tuple(calls))


@pytest.mark.parametrize("text", CALLS)
def test_every_common_form_of_a_call(text: str) -> None:
    assert read_answer(text, tools=TOOLS) == whole(CALLS[text])
    thought = f"<think>\nI need {{the}} weather\n</think>\n\n{text}"
    assert read_answer(thought, tools=TOOLS) == whole(CALLS[text], reasoning="I need {the} weather")
    if text.startswith("<tool_call>"):
        said = read_answer(f"I look it up. {text}", tools=TOOLS)
        assert said == whole(CALLS[text], content="I look it up.")


@pytest.mark.parametrize(
    "text",
    [
        "Hello <tool_call>, and [TOOL_CALLS] too.",
        "<tool_call>{broken}</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
        '<tool_call>{"name": "f", "argum',
        '{"name": "stranger", "arguments": {}}',
        '<tool_call>{"name": "stranger", "arguments": {}}</tool_call> it is',
        f'[TOOL_CALLS][{ONE}, {{"name": "stranger"}}]',
        '{"answer": 42}',
        '[{"name": "weather"}, 3]',
        "[1, 2, 3] are numbers",
        "  {",
        "[",
        "a < b and [c]",
        "[TOOL_CALLS]no arguments at all, but words",
        "<tool_call>" + "[" * 5000 + "]" * 5000,
        "",
    ],
)
def test_what_is_no_call_stays_text_to_the_letter(text: str) -> None:
    assert read_answer(text, tools=TOOLS) == whole([], content=text)


def test_json_is_an_answer_where_no_tool_was_given() -> None:
    for text in (LLAMA, f"<tool_call>{ONE}</tool_call>", f"[TOOL_CALLS][{ONE}]"):
        assert read_answer(text) == whole([], content=text)


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("why?</think>\nSo.", True, whole([], "So.", "why?")),
        ("<think>why?</think>\n\nSo.", False, whole([], "So.", "why?")),
        (" <think>on and on", False, whole([], "", "on and on")),
        ("No <think>thought</think>", False, whole([], "No <think>thought</think>")),
    ],
)
def test_thoughts_are_apart(text: str, begun: bool, expected: ReadAnswer) -> None:
    assert read_answer(text, thinking=begun) == expected


fragments = st.sampled_from(
    [*CALLS, "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{",
     "[", '{"name"', "]}", "\n", " ", "; ", "weather", "hi <", "é", "<|python_tag|>", " " * 9]
)  # fmt: skip


@given(
    st.lists(fragments | st.text(max_size=5), max_size=6).map("".join),
    st.lists(st.integers(0, 2000), max_size=12),
    st.booleans(),
    st.booleans(),
)
@example("[TOOL_CALLS]a" + " " * 300 + "{}", [13, 200], False, True)
@example("[TOOL_CALLS]" + " " * 300 + "a{}", [13, 200], False, True)
def test_pieces_change_nothing(text: str, cuts: list[int], thinking: bool, has_tools: bool) -> None:
    tools = TOOLS if has_tools else {}
    pieces = cut(text, cuts)
    expected = parts_of([text], thinking=thinking, tools=tools)
    assert parts_of(pieces, thinking=thinking, tools=tools) == expected
    assert parts_of(list(text), thinking=thinking, tools=tools) == expected


def test_text_is_not_held_back_without_a_reason() -> None:
    parser = AnswerParser(tools=TOOLS)
    shown = [parser.feed(piece) for piece in ("Hel", "lo {x", "} <to", "ol_x", " {", '"answer')]
    assert shown == [
        [Said("Hel")], [Said("lo {x")], [Said("} ")], [Said("<tool_x")], [Said(" {")],
        [Said('"answer')],
    ]  # fmt: skip
    assert AnswerParser(tools=TOOLS).feed('{"answer"') == [Said('{"answer"')]
