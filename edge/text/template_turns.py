"""The turns of a conversation as a chat template reads them: thoughts, calls, results. Pure.

Most templates read the names of OpenAI's interface. What others read instead is told by their
source, and a turn is made into it here, so that who talks with a model need not know which it is.
"""

from __future__ import annotations

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

_BETWEEN = "\n\n"


def template_turns(source: str, messages: Sequence[Mapping[str, object]]) -> list[Turn]:
    """source: the template's. messages: each with a role."""
    turns = [_present(each) for each in messages]
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
    """Without absent values, its reasoning under the names that templates read."""
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    if reasoning is not None:
        present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
    return present


def _one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """For templates that write the first call of a turn and no other: one for each, its result
    behind it."""
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


def _result_of(call: object, results: Sequence[Turn]) -> Turn | None:
    """The one that names it; results without names are in the order of calls."""
    if isinstance(call, Mapping) and (id := call.get("id")) is not None:
        named = next((each for each in results if each.get("tool_call_id") == id), None)
        if named is not None:
            return named
    return next((each for each in results if "tool_call_id" not in each), None)


def _thought_only(turn: Turn) -> Turn:
    """gpt-oss' template writes one of both before a call, either as what was thought."""
    if not turn.get("tool_calls"):
        return turn
    texts = [turn.get("thinking"), turn.get("content")]
    if not all(isinstance(each, str) and each for each in texts):
        return turn
    return {**turn, "thinking": _BETWEEN.join(map(str, texts)), "content": ""}


def _with_metadata(turn: Turn) -> Iterator[Turn]:
    """As GLM 4 has it: the name of a tool next to its arguments, and results as observations."""
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
