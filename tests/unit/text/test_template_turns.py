"""Thoughts, calls and results reach templates that read them in ways of their own."""

from __future__ import annotations

import contextlib
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
