"""How urgent a request is, in the words of each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from edge.scheduling.fairness import Priority

Tier = Literal["auto", "default", "scale", "flex", "priority", "fast", "ultrafast"]
"""OpenAI's `service_tier`."""

_OTHERS: Mapping[Tier, Priority] = {
    "flex": "low",
    "priority": "high",
    "fast": "high",
    "ultrafast": "high",
}


def priority_of(priority: Priority | None, tier: Tier | None = None) -> Priority:
    """The value of `priority`, which every dialect has here, else that of OpenAI's tier."""
    if priority is None and tier is not None:
        return _OTHERS.get(tier, "normal")
    return priority or "normal"
