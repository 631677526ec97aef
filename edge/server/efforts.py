"""How much a model is to think, in the words of each dialect, as names that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from edge.text.thinking import SWITCHES

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_KNOWN: Mapping[Effort, str] = {"minimal": "low", "xhigh": "high", "max": "high"}
"""What templates know, where clients say more."""


def effort_variables(effort: Effort | None) -> dict[str, object]:
    """Variables for an effort; none where nothing is said of it."""
    if effort is None:
        return {}
    if effort == "none":
        return switched(False)
    return {**switched(True), "reasoning_effort": _KNOWN.get(effort, effort)}


def switched(thinks: bool) -> dict[str, object]:
    return dict.fromkeys(SWITCHES, thinks)
