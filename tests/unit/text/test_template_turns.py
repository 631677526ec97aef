"""Thoughts, calls and results reach templates that read them in ways of their own."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from edge.text import Tokenizer
from tests.support.small_tokenizers import byte_level, write_checkpoint

CALLS = [
    {"id": id, "type": "function", "function": {"name": name, "arguments": {"x": name}}}
    for id, name in (("c1", "f"), ("c2", "g"))
]
ASKED = {"role": "user", "content": "Hi"}
CALLING = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Hm.",
    "tool_calls": CALLS,
}
RESULTS = [
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
]
LATER = {"role": "user", "content": "So?"}

FIRST_CALL = """{% for m in messages %}<{{ m.role }}>\
{% if m.tool_calls %}{% if m.content and m.thinking %}\
{{ raise_exception('Cannot pass both') }}{% elif m.thinking %}({{ m.thinking }}){% endif %}\
{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}\
{% else %}{{ m.content }}{% endif %}{% endfor %}"""
EACH_CALL = """{% for m in messages %}<{{ m.role }}>{{ m.content }}\
{% if m.tool_calls and m.tool_calls[0] %}\
{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endif %}\
{% endfor %}{{ 'tool' == '' }}"""
METADATA = """{% for m in messages %}<{{ m.role }}>{{ m.metadata }}|{{ m.content }}\
{{ '' if m.role == 'observation' }}{% endfor %}"""
ENVIRONMENT = """{% for m in messages %}<{{ m.role }}>\
{% if m['role'] == 'environment' %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (FIRST_CALL, '<user>Hi<assistant>(Hm.\n\nI look.)f{"x": "f"}<tool>one'
         '<assistant>g{"x": "g"}<tool>two<user>So?'),
        (EACH_CALL, "<user>Hi<assistant>I look.fg<tool>two<tool>one<user>So?False"),
        (METADATA, '<user>|Hi<assistant>|I look.<assistant>f|{"x": "f"}<observation>|one'
         '<assistant>g|{"x": "g"}<observation>|two<user>|So?'),
        (ENVIRONMENT, "<user><assistant><environment>two<environment>one<user>"),
    ],
    ids=["first call", "each call", "metadata", "environment"],
)  # fmt: skip
def test_what_was_called_and_came_of_it_is_told_whole(
    template: str, written: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, byte_level(), {"chat_template": template})
    tokenizer = Tokenizer.open(folder)
    try:
        assert tokenizer.chat([ASKED, CALLING, *RESULTS, LATER]) == written
        unnamed = [{"role": "tool", "content": each} for each in ("one", "two")]
        if template not in (EACH_CALL, ENVIRONMENT):
            assert tokenizer.chat([ASKED, CALLING, *unnamed, LATER]) == written
        for odd in ({}, {"tool_calls": 5}, {"tool_calls": [5, 6]}, {"tool_calls": ["a"]}):
            _no_defect(tokenizer, [{"role": "assistant", "content": "x", **odd}, *RESULTS])
    finally:
        tokenizer.close()


def _no_defect(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> None:
    """Templates may refuse such messages."""
    with contextlib.suppress(ValueError):
        tokenizer.chat(messages)


NINE = """{% for m in messages %}<{{ m.role }}>\
{% for c in m.tool_calls or [] %}{% if not c.id is defined or c.id|length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
[{{ c.id }}:{{ c.function.name }}]{% endfor %}\
{% if m.role == 'tool' %}{% if not m.tool_call_id is defined or m.tool_call_id|length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
[{{ m.tool_call_id }}]{% endif %}{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    "ids",
    [
        ("c1", "c2"),
        ("call_0123456789abcdef01234567", "toolu_0123456789abcdef01234567"),
        ("AbCdEf123", "123456789"),
        (None, None),
        ("é" * 9, "a-b-c-d-e"),
    ],
)
def test_ids_of_calls_are_as_mistrals_templates_want_them(
    ids: tuple[str | None, ...], tmp_path: Path
) -> None:
    names = ("f", "g")
    calls = [
        {"type": "function", "function": {"name": name, "arguments": {}}}
        | ({} if id is None else {"id": id})
        for id, name in zip(ids, names, strict=True)
    ]
    results = [
        {"role": "tool", "content": f"of {name}", "name": name}
        | ({} if id is None else {"tool_call_id": id})
        for id, name in zip(reversed(ids), reversed(names), strict=True)
    ]
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    conversation: list[Any] = [ASKED, calling, *results, LATER, calling, *results]
    write_checkpoint(tmp_path, byte_level(), {"chat_template": NINE})
    with contextlib.closing(Tokenizer.open(tmp_path)) as found:
        told = found.chat(conversation)
    by_name = re.findall(r"\[([A-Za-z0-9]{9}):([fg])\]", told)
    of_results = re.findall(r"<tool>\[([A-Za-z0-9]{9})\]of ([fg])", told)
    assert len(by_name) == len(of_results) == 4
    assert set(by_name[:2]) == set(of_results[:2])
    assert set(by_name[2:]) == set(of_results[2:])
    assert len({id for id, _name in by_name[:2]}) == 2
    if ids[0] == "AbCdEf123":
        assert {id for id, _name in by_name} == set(ids)


@pytest.mark.parametrize("calls", [[{"function": "f"}], ["f"], [{"id": "", "function": {}}], 5])
def test_odd_calls_for_a_template_with_short_ids(calls: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level(), {"chat_template": NINE})
    with contextlib.closing(Tokenizer.open(tmp_path)) as found:
        odd: list[Any] = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
        _no_defect(found, [*odd, {"role": "tool", "content": "x", "tool_call_id": ""}])
