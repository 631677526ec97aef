"""A router, and gated feed-forward blocks of which each token goes through a few."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from edge.errors import shown
from edge.kernels.gated_mlp.reference import ACTIVATIONS, Activation
from edge.models.parts import (
    MatrixSlice,
    PartWeights,
    VectorSlice,
    Weights,
    check_flags,
    check_sizes,
    whole_vector,
)

MAX_EXPERTS = 1024
"""Of one layer; Kimi K2 has 384."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A unit is a column of every expert, so that shards are in step whatever is chosen.

    Each shard with units has the whole router, and chooses for itself.
    """

    kind: ClassVar[str] = "experts"

    num_experts: int
    top_k: int
    """How many each token goes through."""
    columns: int
    """Of each expert."""
    activation: Activation
    renormalized: bool
    """Weights of those that are chosen add up to 1."""

    def __post_init__(self) -> None:
        check_sizes(num_experts=self.num_experts, top_k=self.top_k, expert_columns=self.columns)
        check_flags(renormalized=self.renormalized)
        if self.num_experts > MAX_EXPERTS:
            raise ValueError(f"a layer has at most {MAX_EXPERTS} experts, not {self.num_experts}")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"a token cannot go through {self.top_k} of {self.num_experts} experts"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {shown(self.activation)} is not one of {', '.join(ACTIVATIONS)}"
            )

    @property
    def bias(self) -> bool:
        return False

    @property
    def has_norm(self) -> bool:
        return True

    @property
    def has_post_norm(self) -> bool:
        return False

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"router.weight": (self.num_experts, hidden_size)}
        for number in range(self.num_experts):
            prefix = f"experts.{number}."
            shapes[f"{prefix}gate.weight"] = (self.columns, hidden_size)
            shapes[f"{prefix}up.weight"] = (self.columns, hidden_size)
            shapes[f"{prefix}down.weight"] = (hidden_size, self.columns)
        shapes["mlp_norm"] = (hidden_size,)
        return shapes

    def weights(self, hidden_size: int) -> PartWeights:
        router, column = self.num_experts * hidden_size, self.num_experts * hidden_size
        return PartWeights(
            unit=Weights(
                matrices=tuple((f"{role}.weight", column) for role in ("gate", "up", "down"))
            ),
            fixed=Weights(matrices=(("router.weight", router),), vector=hidden_size),
        )

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """Of each chosen expert what a gated block has, its inputs and results, and those once
        more in the order of tokens, and weighted; and who has chosen what."""
        return self.top_k * (3 * self.columns + 5 * hidden_size + 4 * self.num_experts)

    def of_units(self, units: range) -> Experts | None:
        return dataclasses.replace(self, columns=len(units)) if units else None

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        if not units:
            return
        hidden = range(hidden_size)
        router = ((f"{layer}router.weight", range(self.num_experts)),)
        yield MatrixSlice(name=f"{layer}router", parts=router, columns=hidden)
        for number in range(self.num_experts):
            own = expert_name(layer, number)
            gate_up = ((f"{own}gate.weight", units), (f"{own}up.weight", units))
            down = ((f"{own}down.weight", hidden),)
            yield MatrixSlice(name=f"{own}gate_up", parts=gate_up, columns=hidden)
            yield MatrixSlice(name=f"{own}down", parts=down, columns=units)

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        if units:
            yield whole_vector(f"{layer}mlp_norm", hidden_size)


def expert_name(layer: str, number: int) -> str:
    """What names of an expert's matrices begin with."""
    return f"{layer}experts.{number}."


def expert_number(name: str) -> int | None:
    """Of which expert of its layer a matrix is; None for others."""
    _before, is_one, after = name.partition(".experts.")
    return int(after.partition(".")[0]) if is_one else None
