"""Fits loaded shards to a new memory budget by streaming more or fewer of their layers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edge.errors import RequestError
from edge.host.free_memory import format_size
from edge.memory.ledger import Ledger, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceOptions:
    """The memory of a shard with various numbers of layers read from disk."""

    uses: Mapping[int, Use]
    """Uses by the number of such layers, in ascending order."""
    planned: int
    """The first of these numbers, with which it was loaded. It never reads fewer layers."""


def fit(
    ledger: Ledger, budget_bytes: int, shards: Mapping[str, RebalanceOptions]
) -> tuple[Ledger, dict[str, int]]:
    """The ledger with the new budget, and the number of layers that each shard reads from disk.

    The numbers are as small as possible; the largest shard gives first. Raises RequestError, with
    the minimum and its parts, for a budget that is too small even if all layers are streamed.
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
                f"loaded models take {format_size(models)} even with every layer read from disk"
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
    """Bytes of the process and of all uses, some of which are changed."""
    return ledger.baseline.total + sum(use.total for use in {**ledger.uses, **changed}.values())


def _next(shard: RebalanceOptions, count: int) -> int | None:
    """The next number of streamed layers with which the shard takes less; None if there is none."""
    now = shard.uses[count].total
    return next(
        (more for more, use in shard.uses.items() if more > count and use.total < now), None
    )
