"""Conversion of messages to the fields that a chat template reads. Pure.

Most templates read the fields of OpenAI's API for thinking, calls and results. Others are
recognised by their source, and turns are converted for them, so that callers need not know.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Turn = dict[str, Any]

# Reasoning comes under several names; templates read the first, gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")

_FIRST_CALL = re.compile(r"tool_calls['\"]?\]?\s*\[\s*0\s*\]")
_EACH_CALL = re.compile(r"\bin\s+\w+(?:\.|\[['\"])tool_calls\b")
_ENVIRONMENT = re.compile(r"['\"]environment['\"]")
_TOOL = re.compile(r"['\"]tool['\"]")
_OBSERVATION = re.compile(r"['\"]observation['\"]")
_THOUGHT_OR_SAID = re.compile(r"\.content and \w+\.thinking")

_SHORT_IDS = re.compile(r"\|\s*length\s*\)?\s*(?:!=|==)\s*9\b")
"""Mistral's templates refuse ids of calls that are not nine letters and digits."""
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")

_BETWEEN = "\n\n"


def template_turns(source: str, messages: Sequence[Mapping[str, object]]) -> list[Turn]:
    """The turns for a template. source: the template's. messages: each with a role."""
    turns = [_present(each) for each in messages]
    if _SHORT_IDS.search(source):
        turns = _with_short_ids(turns)
    if "tool_calls" not in source and "metadata" in source and _OBSERVATION.search(source):
        return [each for turn in _one_by_one(turns) for each in _with_metadata(turn)]
    if _FIRST_CALL.search(source) and not _EACH_CALL.search(source):
        turns = _one_by_one(turns)
    if _THOUGHT_OR_SAID.search(source):
        turns = [_thought_only(each) for each in turns]
    if _ENVIRONMENT.search(source) and not _TOOL.search(source):
        turns = [each | _role(each, "environment") for each in turns]
    return turns


def _present(message: Mapping[str, object]) -> Turn:
    """The message without absent values, and with its thinking under the names that templates
    read."""
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    if reasoning is not None:
        present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
    return present


def _one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """Turns with one call each, followed by its result, for templates that write only the first
    call of a turn."""
    found: list[Turn] = []
    place = 0
    while place < len(turns):
        turn, place = turns[place], place + 1
        calls = turn.get("tool_calls")
        if not isinstance(calls, list | tuple) or len(calls) < 2:
            found.append(turn)
            continue
        results = [*takewhile(lambda each: each.get("role") == "tool", turns[place:])]
        place += len(results)
        for number, call in enumerate(calls):
            first = turn if number == 0 else {"role": turn.get("role"), "content": ""}
            found.append({**first, "tool_calls": [call]})
            if (result := _result_of(call, results)) is not None:
                found.append(result)
                results = [each for each in results if each is not result]
        found += results
    return found


def _with_short_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Turns whose calls and results have ids of nine letters and digits, made from theirs. A call
    without an id gets one; a result without an id gets that of the first call without a result."""
    found: list[Turn] = []
    waiting: list[tuple[str, object]] = []
    """Ids of calls without results, and names of their tools."""
    for turn in turns:
        calls = turn.get("tool_calls")
        if isinstance(calls, list | tuple) and all(isinstance(each, Mapping) for each in calls):
            made = []
            for number, call in enumerate(calls):
                id = _short_id(call.get("id") or f"{len(found)}.{number}")
                function = call.get("function", call)
                name = function.get("name") if isinstance(function, Mapping) else None
                waiting.append((id, name))
                made.append({**call, "id": id})
            turn = {**turn, "tool_calls": made}  # noqa: PLW2901
        if turn.get("role") == "tool":
            given, name = turn.get("tool_call_id"), turn.get("name")
            id = _short_id(given) if given else ""
            if not given and waiting:
                id = next((each for each, called in waiting if called == name), waiting[0][0])
            waiting = [each for each in waiting if each[0] != id]
            turn = {**turn, "tool_call_id": id or _short_id(len(found))}  # noqa: PLW2901
        found.append(turn)
    return found


def _short_id(id: object) -> str:
    """The id, or nine hexadecimal digits that follow from it."""
    text = str(id)
    if _SHORT_ID.fullmatch(text):
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _result_of(call: object, results: Sequence[Turn]) -> Turn | None:
    """The result that names the call; results without names are in the order of calls."""
    if isinstance(call, Mapping) and (id := call.get("id")) is not None:
        named = next((each for each in results if each.get("tool_call_id") == id), None)
        if named is not None:
            return named
    return next((each for each in results if "tool_call_id" not in each), None)


def _thought_only(turn: Turn) -> Turn:
    """The turn with only its thinking: gpt-oss' template writes thinking or text before a call,
    both as thinking."""
    if not turn.get("tool_calls"):
        return turn
    texts = [turn.get("thinking"), turn.get("content")]
    if not all(isinstance(each, str) and each for each in texts):
        return turn
    return {**turn, "thinking": _BETWEEN.join(map(str, texts)), "content": ""}


def _with_metadata(turn: Turn) -> Iterator[Turn]:
    """The turns in GLM 4's format: a tool's name beside its arguments, and results as
    observations."""
    calls = turn.get("tool_calls")
    if not isinstance(calls, list | tuple) or not calls:
        yield turn | _role(turn, "observation")
        return
    if turn.get("content"):
        yield {name: value for name, value in turn.items() if name != "tool_calls"}
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        yield {"role": turn.get("role"), "metadata": function.get("name"), "content": arguments}


def _role(turn: Turn, role: str) -> Turn:
    return {"role": role} if turn.get("role") == "tool" else {}
