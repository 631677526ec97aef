"""The reasoning effort of a request, as variables that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from edge.text.thinking import SWITCHES

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_KNOWN: Mapping[Effort, str] = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that templates do not know, and the nearest one that they know."""


def effort_variables(effort: Effort | None) -> dict[str, object]:
    """Template variables for an effort; none without one."""
    if effort is None:
        return {}
    if effort == "none":
        return switched(False)
    return {**switched(True), "reasoning_effort": _KNOWN.get(effort, effort)}


def switched(thinks: bool) -> dict[str, object]:
    return dict.fromkeys(SWITCHES, thinks)
