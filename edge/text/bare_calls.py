"""Tool calls without a mark at the start of an answer, known by their first characters. Pure.

{"name": …, "parameters": …}; …     Llama 3, and many others
name                                GLM 4 before its 4.5
{…}
"""

from __future__ import annotations

import re
from functools import partial

from edge.text.tool_call_bodies import Body, JsonBody, json_calls
from edge.text.tool_types import ToolTypes

_BETWEEN = " \t\r\n;,"
"""The separators of calls."""
_KEYS = ("name", "type", "function", "id", "arguments", "parameters")
_LINE = re.compile(r"([A-Za-z0-9_.-]{1,128})[ \t\r]{0,8}\n\s{0,8}(?=\{)")
_LINE_SO_FAR = re.compile(r"([A-Za-z0-9_.-]{1,128})([ \t\r]{0,8}(?:\n\s{0,8})?)")


def bare_json(_types: ToolTypes, head: str) -> tuple[Body, int] | str | None:
    """The reader of an answer that may begin with a JSON call; see ChosenBody."""
    start = head.lstrip(_BETWEEN)
    is_call = _may_be_call(start)
    if is_call:
        return JsonBody(json_calls), len(head) - len(start)
    return None if is_call is None else "text"


def bare_line(types: ToolTypes, head: str) -> tuple[Body, int] | str | None:
    """The reader of a call whose first line is the tool's name; see ChosenBody."""
    start = head.lstrip(_BETWEEN)
    place = len(head) - len(start)
    if (named := _LINE.match(start)) is not None and named[1] in types:
        return JsonBody(partial(json_calls, name=named[1])), place + named.end()
    so_far = _LINE_SO_FAR.fullmatch(start)
    if not start or (so_far is not None and any(_begins(each, *so_far.groups()) for each in types)):
        return None
    return bare_json(types, head)


def _begins(name: str, word: str, behind: str) -> bool:
    return name == word if behind else name.startswith(word)


def _may_be_call(start: str) -> bool | None:
    """Whether an answer's beginning is that of JSON calls; None: not known yet."""
    rest = start.lstrip("[ \t\r\n")
    if not rest.startswith("{"):
        return None if not rest else False
    rest = rest[1:].lstrip()
    if not rest.startswith('"'):
        return None if not rest else False
    key, quote, _rest = rest[1:].partition('"')
    if quote:
        return key in _KEYS
    return None if any(each.startswith(key) for each in _KEYS) else False
