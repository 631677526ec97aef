"""How urgent a request is, in the words of each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from edge.scheduling.fairness import PRIORITIES, Priority
from edge.server.fields import Fields

TIERS: Mapping[str, Priority] = {
    "auto": "normal",
    "default": "normal",
    "scale": "normal",
    "flex": "low",
    "priority": "high",
    "fast": "high",
    "ultrafast": "high",
}
"""OpenAI's `service_tier`."""


def priority_of(body: Fields) -> Priority:
    """The value of `priority`, which every dialect has here."""
    if "priority" not in body:
        return "normal"
    return cast(Priority, body.one_of("priority", PRIORITIES))


def priority_or_tier_of(body: Fields) -> Priority:
    """Likewise, or of `service_tier`, where OpenAI's clients say it."""
    tier = TIERS[body.one_of("service_tier", tuple(TIERS))] if "service_tier" in body else "normal"
    return priority_of(body) if "priority" in body else tier
