"""How much a model is to think, in the words of each dialect, as names that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.server.fields import Fields
from edge.text.thinking import SWITCHES

EFFORTS: Mapping[str, str | None] = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""What clients say, and what templates know; None: it does not think."""


def effort_variables(body: Fields | None, name: str) -> dict[str, object]:
    """Variables for a field with an effort; none where it is not there."""
    if body is None or name not in body:
        return {}
    effort = EFFORTS[body.one_of(name, tuple(EFFORTS))]
    if effort is None:
        return switched(False)
    return {**switched(True), "reasoning_effort": effort}


def switched(thinks: bool) -> dict[str, object]:
    return dict.fromkeys(SWITCHES, thinks)


def anthropic_variables(body: Fields, messages: Sequence[Fields] = ()) -> dict[str, object]:
    """Variables for `thinking`, and for the effort in `output_config` of the last message or the
    body."""
    found = effort_variables(body.object("output_config"), "effort")
    if messages:
        found |= effort_variables(messages[-1].object("output_config"), "effort")
    thinking = body.object("thinking")
    if thinking is None:
        return found
    kind = thinking.one_of("type", ("enabled", "adaptive", "between_tools", "disabled"))
    return {**found, **switched(kind != "disabled")}


def ollama_variables(body: Fields) -> dict[str, object]:
    """Variables for `think`: whether, or how much."""
    if isinstance(body.raw("think"), str):
        return effort_variables(body, "think")
    return {} if "think" not in body else switched(body.flag("think"))
