"""The priority of a request, from the fields of each dialect."""

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
    """The value of `priority`, a field that Edge adds to all dialects, or else OpenAI's tier."""
    if priority is None and tier is not None:
        return _OTHERS.get(tier, "normal")
    return priority or "normal"
