"""The ledger of a device's memory: budget, uses, free bytes. Pure.

The budget is that of the whole process. Its baseline is taken first; the rest is for models, and
each is entered, line by line, before anything is allocated for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge.errors import CapacityError, RequestError
from edge.host.free_memory import format_size

LEAST_MODEL_BYTES = 8 << 20
"""A promise that leaves less than this to models is of no use to anybody."""

MEASURING = "measuring "
"""Prefix of the names of uses that are over in moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Memory that one shard, or a measurement, takes of its device."""

    weight_bytes: int = 0
    """Held all the time, the window of streamed layers included."""
    kv_bytes: int = 0
    buffer_bytes: int = 0
    """What a step computes with."""
    streamed_bytes: int = 0
    """Read from disk for each step; takes no memory."""
    host_bytes: int = 0
    """What its host holds for a device with memory of its own. Not a part of the total."""

    @property
    def model_bytes(self) -> int:
        """Weights and KV cache: what plans count."""
        return self.weight_bytes + self.kv_bytes

    @property
    def total(self) -> int:
        return self.model_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Memory that the process takes with no model loaded."""

    process_bytes: int
    """Resident once everything is imported."""
    work_bytes: int
    """More of that while it works: code that was not used yet, pieces of weights on their way."""

    @property
    def total(self) -> int:
        return self.process_bytes + self.work_bytes

    @property
    def minimum_bytes(self) -> int:
        """The least that can be promised."""
        return self.total + LEAST_MODEL_BYTES

    def __str__(self) -> str:
        return (
            f"the process itself takes {format_size(self.process_bytes)}, and up to "
            f"{format_size(self.work_bytes)} more while it works"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Changes are new ledgers. Uses have names, of sessions or others."""

    budget_bytes: int
    """The promise."""
    baseline: Baseline
    model_limit_bytes: int | None = None
    """The most that weights and KV caches may take together; None: what the promise leaves."""
    uses: Mapping[str, Use] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.budget_bytes < self.baseline.minimum_bytes:
            raise RequestError(
                f"a budget of {format_size(self.budget_bytes)} is below the minimum of "
                f"{format_size(self.baseline.minimum_bytes)}: {self.baseline}, and a model needs "
                "room, too"
            )

    @property
    def room_bytes(self) -> int:
        """Bytes of the budget for models and measurements, free or not."""
        room = self.budget_bytes - self.baseline.total
        return room if self.model_limit_bytes is None else min(room, self.model_limit_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that are free; never below 0."""
        taken = self.baseline.total + sum(use.total for use in self.uses.values())
        return max(0, self.budget_bytes - taken)

    @property
    def model_free_bytes(self) -> int:
        """The most bytes that weights and KV cache of a new model may take, without its buffers."""
        if self.model_limit_bytes is None:
            return self.free_bytes
        taken = sum(use.model_bytes for use in self.uses.values())
        return max(0, min(self.free_bytes, self.model_limit_bytes - taken))

    def with_use(self, name: str, use: Use) -> Ledger:
        """The ledger with a further use. Raises CapacityError, with remedies, when its bytes are
        not free."""
        others = self.without(name)
        lacking = max(use.total - others.free_bytes, use.model_bytes - others.model_free_bytes)
        if lacking > 0:
            raise CapacityError(
                f"this shard needs {format_size(use.total)} ({in_words(use)}) and "
                f"{format_size(min(others.free_bytes, others.model_free_bytes))} are free: "
                f"{format_size(lacking)} are missing. Give the peer more --memory, choose a "
                "smaller dtype or context, or share the model with more peers"
            )
        return replace(others, uses={**others.uses, name: use})

    def without(self, name: str) -> Ledger:
        """The ledger without this use. Unknown names are ignored."""
        return replace(self, uses={each: use for each, use in self.uses.items() if each != name})


def in_words(use: Use) -> str:
    """The lines of a use for people."""
    return (
        f"{format_size(use.weight_bytes)} weights, {format_size(use.kv_bytes)} KV cache, "
        f"{format_size(use.buffer_bytes)} buffers"
    )
