"""The ledger of a device's memory: budget, uses, free bytes. Pure.

The budget is that of the whole process. Its baseline comes first and the rest is for models. A use
is entered before its memory is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge.errors import CapacityError, RequestError
from edge.host.free_memory import format_size

LEAST_MODEL_BYTES = 8 << 20
"""Least bytes that a budget must leave to models."""

MEASURING = "measuring "
"""Prefix of the names of short measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Memory that one shard, or a measurement, takes of its device."""

    weight_bytes: int = 0
    """Weights in memory, with the window of streamed layers."""
    kv_bytes: int = 0
    buffer_bytes: int = 0
    """Buffers of a step."""
    streamed_bytes: int = 0
    """Weights that each step reads from disk. They take no memory."""
    host_bytes: int = 0
    """Host memory for a device with its own memory. Not part of the total."""

    @property
    def model_bytes(self) -> int:
        """Weights and KV cache, which plans count."""
        return self.weight_bytes + self.kv_bytes

    @property
    def total(self) -> int:
        return self.model_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Memory of the process without models."""

    process_bytes: int
    """Resident once everything is imported."""
    work_bytes: int
    """Further bytes while it works, for code on first use and pieces of weights in transfer."""

    @property
    def total(self) -> int:
        return self.process_bytes + self.work_bytes

    @property
    def minimum_bytes(self) -> int:
        """The least possible budget."""
        return self.total + LEAST_MODEL_BYTES

    def __str__(self) -> str:
        return (
            f"the process itself takes {format_size(self.process_bytes)}, and up to "
            f"{format_size(self.work_bytes)} more while it works"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """An immutable ledger; changes return new ones. Uses are named, for example by session."""

    budget_bytes: int
    """Memory that the process may take in all."""
    baseline: Baseline
    model_limit_bytes: int | None = None
    """Most bytes of weights and KV caches together; None: no limit but the budget."""
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

    def within(self, most_bytes: int) -> Ledger:
        """The ledger with a budget of at most `most_bytes`, and at least of what is taken."""
        taken = self.budget_bytes - self.free_bytes
        least_bytes = max(taken, self.baseline.minimum_bytes)
        return replace(self, budget_bytes=min(self.budget_bytes, max(most_bytes, least_bytes)))

    def with_use(self, name: str, use: Use) -> Ledger:
        """The ledger with a further use. Raises CapacityError, with remedies, if it does not
        fit."""
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
    """The bytes of a use, for people."""
    return (
        f"{format_size(use.weight_bytes)} weights, {format_size(use.kv_bytes)} KV cache, "
        f"{format_size(use.buffer_bytes)} buffers"
    )
