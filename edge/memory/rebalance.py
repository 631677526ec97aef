"""Fitting loaded shards to another promise: which of them read how many layers from disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edge.errors import RequestError
from edge.host.free_memory import format_size
from edge.memory.ledger import Ledger, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceOptions:
    """What one shard would take with some numbers of its layers read from disk."""

    uses: Mapping[int, Use]
    """By such numbers, in ascending order."""
    planned: int
    """The first of them, as it was loaded: it never reads fewer."""


def fit(
    ledger: Ledger, budget_bytes: int, shards: Mapping[str, RebalanceOptions]
) -> tuple[Ledger, dict[str, int]]:
    """The ledger of the new promise, and how many layers each shard reads from disk under it.

    As few as possible; the shard that holds most gives first. Raises RequestError, with the
    minimum and why, for a promise that cannot be kept even if all of them read every layer.
    """
    least = {
        name: min(each.uses.values(), key=lambda use: use.total) for name, each in shards.items()
    }
    minimum_bytes = max(ledger.baseline.minimum_bytes, _taken(ledger, least))
    if budget_bytes < minimum_bytes:
        models = sum(use.total for use in least.values())
        raise RequestError(
            f"a budget of {format_size(budget_bytes)} is below the minimum of "
            f"{format_size(minimum_bytes)}: {ledger.baseline}, and "
            + (
                f"what is loaded takes {format_size(models)} even with every layer read from disk"
                if shards
                else "a model needs room, too"
            )
            + f"; it stays at {format_size(ledger.budget_bytes)}"
        )
    counts = {name: each.planned for name, each in shards.items()}

    def uses() -> dict[str, Use]:
        return {name: shards[name].uses[count] for name, count in counts.items()}

    while _taken(ledger, uses()) > budget_bytes:
        ahead = {name: _next(shards[name], count) for name, count in counts.items()}
        name = max(
            (each for each in ahead if ahead[each] is not None),
            key=lambda each: shards[each].uses[counts[each]].weight_bytes,
        )
        counts[name] = ahead[name] or 0
    changed = replace(ledger, budget_bytes=budget_bytes, uses={**ledger.uses, **uses()})
    return changed, counts


def _taken(ledger: Ledger, changed: Mapping[str, Use]) -> int:
    """By the process and every use, some of which are changed."""
    return ledger.baseline.total + sum(use.total for use in {**ledger.uses, **changed}.values())


def _next(shard: RebalanceOptions, count: int) -> int | None:
    """The next number with which the shard takes less; None where there is none."""
    now = shard.uses[count].total
    return next(
        (more for more, use in shard.uses.items() if more > count and use.total < now), None
    )
