"""Mixture of experts: a router, and gated feed-forward blocks of which each token uses a few.

Some models have a shared expert in addition, a block that every token uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from edge.errors import shown
from edge.kernels.activation.reference import ACTIVATIONS, Activation
from edge.kernels.experts.reference import BEST_OF_GROUP, SCORINGS, Routing, Scoring
from edge.kernels.gated_mlp.reference import Clamp
from edge.models.parts import (
    MatrixSlice,
    PartWeights,
    VectorSlice,
    Weights,
    check_flags,
    check_sizes,
    finite,
    made_of,
    whole_vector,
)

SHARED = "shared."
"""The prefix of a shared expert's weights within its layer."""

_PRE_NORMS = ("experts_norm", "router_norm")
POST_NORMS = ("shared_post_norm", "experts_post_norm")
"""The norms of the shared expert's output and of the others', if they are separate."""

MAX_EXPERTS = 1024
"""Most experts of one layer; Kimi K2 has 384."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """A block that every token uses, with the activation of the others."""

    columns: int
    is_gated: bool
    """The output is multiplied by the sigmoid of a gate per token."""

    def __post_init__(self) -> None:
        check_sizes(shared_expert_columns=self.columns)
        check_flags(is_gated=self.is_gated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts. A unit is a column of every expert, so that shards have equal work for
    any routing.

    Each shard with units has the whole router, and routes by itself. A shared expert's columns are
    divided like the others'.
    """

    kind: ClassVar[str] = "experts"

    num_experts: int
    top_k: int
    """The number of experts per token."""
    columns: int
    """The columns of each expert."""
    activation: Activation
    renormalized: bool
    """The weights of the chosen experts are normalized to sum 1."""
    bias: bool = False
    """The router and the experts have biases."""
    clamp: Clamp | None = None
    shared: SharedExpert | None = None
    scoring: Scoring = "softmax"
    has_correction: bool = False
    """A correction bias per expert affects the choice, but not the weights."""
    groups: int = 1
    chosen_groups: int = 1
    """The number of groups that experts are chosen from."""
    weight_scale: float = 1.0
    """The scale of the chosen experts' weights."""
    least_sum: float = 0.0
    """The epsilon of the sum for renormalization."""
    is_apart: bool = False
    """The shared expert and the others have separate norms before and behind them, and their
    outputs are added. The router has a third norm. Each expert has a scale of its weights."""
    has_post_norm: bool = False
    """The output is normed before it is added to the hidden state."""
    has_scale: bool = False
    """The hidden state is multiplied by a scale of the layer after the addition."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", made_of(SharedExpert, self.shared))
        object.__setattr__(self, "clamp", made_of(Clamp, self.clamp))
        check_sizes(num_experts=self.num_experts, top_k=self.top_k, expert_columns=self.columns)
        check_sizes(groups=self.groups, chosen_groups=self.chosen_groups)
        check_flags(
            expert_bias=self.bias,
            renormalized=self.renormalized,
            has_correction=self.has_correction,
            is_apart=self.is_apart,
            has_post_norm=self.has_post_norm,
            has_scale=self.has_scale,
        )
        if self.is_apart and (self.shared is None or self.shared.is_gated or self.bias):
            raise ValueError("what is normed apart is a shared expert, without a gate or biases")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring {shown(self.scoring)} is not one of {', '.join(SCORINGS)}")
        positive = {"weight_scale": self.weight_scale}
        if self.clamp is not None:
            positive |= {"clamp limit": self.clamp.limit, "clamp slope": self.clamp.slope}
        for name, value in positive.items():
            if not finite(value) > 0:
                raise ValueError(f"{name} must be above 0, not {shown(value)}")
        if not finite(self.least_sum) >= 0:
            raise ValueError(f"least_sum must not be negative, and is {shown(self.least_sum)}")
        if self.clamp is not None and self.activation != "silu":
            raise ValueError("only experts of silu are clamped")
        if self.num_experts > MAX_EXPERTS:
            raise ValueError(f"a layer has at most {MAX_EXPERTS} experts, not {self.num_experts}")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"a token cannot go through {self.top_k} of {self.num_experts} experts"
            )
        if self.groups > 1:
            self._check_groups()
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {shown(self.activation)} is not one of {', '.join(ACTIVATIONS)}"
            )

    def _check_groups(self) -> None:
        size, rest = divmod(self.num_experts, self.groups)
        if rest or size < BEST_OF_GROUP:
            raise ValueError(
                f"{self.num_experts} experts do not make {self.groups} groups of "
                f"{BEST_OF_GROUP} or more"
            )
        if self.chosen_groups > self.groups or self.top_k > size * self.chosen_groups:
            raise ValueError(
                f"a token cannot go through {self.top_k} experts of {self.chosen_groups} of "
                f"{self.groups} groups of {size}"
            )

    @property
    def routing(self) -> Routing:
        return Routing(
            top_k=self.top_k,
            renormalized=self.renormalized,
            scoring=self.scoring,
            groups=self.groups,
            chosen_groups=self.chosen_groups,
            scale=self.weight_scale,
            least_sum=self.least_sum,
        )

    @property
    def has_norm(self) -> bool:
        return True

    @property
    def held(self) -> range:
        """The places of the experts whose weights are on this shard."""
        return range(self.num_experts)

    @property
    def is_part(self) -> bool:
        """Whether other shards have some of the experts."""
        return len(self.held) < self.num_experts

    @property
    def order(self) -> Sequence[int]:
        """The model's number of the expert at each place."""
        return range(self.num_experts)

    def whole(self, held: range, order: Sequence[int]) -> SomeExperts:
        """A shard with these whole experts, and none of the others."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(Experts)}
        return SomeExperts(
            **fields, first_held=held.start, num_held=len(held), numbers=tuple(order)
        )

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"router.weight": (self.num_experts, hidden_size)}
        blocks = {f"experts.{number}.": self.columns for number in range(self.num_experts)}
        if self.shared is not None:
            blocks[SHARED] = self.shared.columns
            if self.shared.is_gated:
                shapes["shared_gate.weight"] = (1, hidden_size)
        for prefix, columns in blocks.items():
            shapes[f"{prefix}gate.weight"] = (columns, hidden_size)
            shapes[f"{prefix}up.weight"] = (columns, hidden_size)
            shapes[f"{prefix}down.weight"] = (hidden_size, columns)
            if self.bias and prefix != SHARED:
                shapes[f"{prefix}gate.bias"] = shapes[f"{prefix}up.bias"] = (columns,)
                shapes[f"{prefix}down.bias"] = (hidden_size,)
        if self.bias:
            shapes["router.bias"] = (self.num_experts,)
        if self.has_correction:
            shapes["router_correction"] = (self.num_experts,)
        shapes["mlp_norm"] = (hidden_size,)
        if self.is_apart:
            shapes |= dict.fromkeys((*_PRE_NORMS, *POST_NORMS), (hidden_size,))
            shapes["expert_scales"] = (self.num_experts,)
        if self.has_post_norm:
            shapes["mlp_post_norm"] = (hidden_size,)
        if self.has_scale:
            shapes["layer_scale"] = (1,)
        return shapes

    def weights(self, hidden_size: int) -> PartWeights:
        columns: dict[str, float] = {"": self.num_experts * hidden_size}
        routers = [("router.weight", self.num_experts * hidden_size)]
        if self.shared is not None:
            columns[SHARED] = hidden_size * self.shared.columns / self.columns
            routers += [("shared_gate.weight", hidden_size)] * self.shared.is_gated
        return PartWeights(
            unit=Weights(
                matrices=tuple(
                    (f"{prefix}{role}.weight", size)
                    for prefix, size in columns.items()
                    for role in ("gate", "up", "down")
                ),
                vector=2 * self.num_experts * self.bias,
            ),
            fixed=Weights(
                matrices=tuple(routers),
                vector=hidden_size * (1 + 4 * self.is_apart + self.has_post_norm)
                + self.has_scale
                + self.num_experts * (self.has_correction + self.is_apart)
                + self.num_experts * (hidden_size + 1) * self.bias,
            ),
        )

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """The values of one row: for each chosen expert those of a gated block, its inputs and
        outputs, and the weighted outputs in token order; and the routing. For a shared expert those
        of a gated block, and its outputs; with separate norms, further inputs and both outputs."""
        shared = 0 if self.shared is None else 3 * self.shared.columns + 2 * hidden_size
        shared += 4 * hidden_size * self.is_apart
        return shared + self.top_k * (3 * self.columns + 5 * hidden_size + 4 * self.num_experts)

    def of_units(self, units: range) -> Experts | None:
        if not units:
            return None
        shared, columns = self.shared, len(self._shared_units(units))
        if shared is not None:
            shared = dataclasses.replace(shared, columns=columns) if columns else None
        return dataclasses.replace(self, columns=len(self._columns(units)), shared=shared)

    def with_columns(self, columns: int) -> Experts:
        shared = self.shared
        if shared is not None:
            of_shared = max(1, columns * shared.columns // self.columns)
            shared = dataclasses.replace(shared, columns=of_shared)
        return dataclasses.replace(self, columns=columns, shared=shared)

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        if not units:
            return
        hidden, of_shared = range(hidden_size), self._shared_units(units)
        router = [(f"{layer}router.weight", run) for run in _runs(self.order)]
        if of_shared and self.shared is not None and self.shared.is_gated:
            router.append((f"{layer}shared_gate.weight", range(1)))
        yield MatrixSlice(name=f"{layer}router", parts=tuple(router), columns=hidden)
        blocks = {
            expert_name(layer, place): (expert_name(layer, self.order[place]), self._columns(units))
            for place in self.held
        }
        if of_shared:
            blocks[shared_name(layer)] = shared_name(layer), of_shared
        for own, (role, columns) in blocks.items():
            gate_up = ((f"{role}gate.weight", columns), (f"{role}up.weight", columns))
            down = ((f"{role}down.weight", hidden),)
            yield MatrixSlice(name=f"{own}gate_up", parts=gate_up, columns=hidden)
            yield MatrixSlice(name=f"{own}down", parts=down, columns=columns)

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        if self.has_post_norm:
            yield whole_vector(f"{layer}mlp_post_norm", hidden_size)
        if self.has_scale:
            yield whole_vector(f"{layer}layer_scale", 1)
        if self.is_apart:
            yield from (whole_vector(f"{layer}{name}", hidden_size) for name in POST_NORMS)
        if units:
            yield whole_vector(f"{layer}mlp_norm", hidden_size)
            if self.is_apart:
                yield from (whole_vector(f"{layer}{name}", hidden_size) for name in _PRE_NORMS)
                yield self._of_each(f"{layer}expert_scales")
            if self.bias:
                yield from self._biases(layer, hidden_size, units, is_first=is_first)
            if self.has_correction:
                yield self._of_each(f"{layer}router_correction")

    def _biases(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        """The experts' biases, as one vector, expert by expert."""
        names = [expert_name(layer, self.order[place]) for place in self.held]
        columns = self._columns(units)
        yield self._of_each(f"{layer}router.bias")
        yield VectorSlice(
            name=f"{layer}experts_gate_up_bias",
            parts=tuple((f"{own}{part}.bias", columns) for own in names for part in ("gate", "up")),
        )
        if self._adds_biases(is_first=is_first):
            parts = tuple((f"{own}down.bias", range(hidden_size)) for own in names)
            yield VectorSlice(name=f"{layer}experts_down_bias", parts=parts)

    def _columns(self, units: range) -> range:
        """The columns of each expert that a shard with these units has."""
        return units

    def _adds_biases(self, *, is_first: bool) -> bool:
        """The output biases of the experts on this shard, which are added once."""
        return is_first

    def _of_each(self, role: str) -> VectorSlice:
        """A scale of each of the layer's experts, by place."""
        return VectorSlice(name=role, parts=tuple((role, run) for run in _runs(self.order)))

    def _shared_units(self, units: range) -> range:
        """The shared expert's columns for these units; all for all."""
        if self.shared is None:
            return range(0)
        start, stop = (
            each * self.shared.columns // self.columns for each in (units.start, units.stop)
        )
        return range(start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeExperts(Experts):
    """The experts of a shard in expert parallelism: some with all columns, the others not at all.

    A unit is a column of the shared expert alone then. The shards of a stage have consecutive
    experts in one order, which is that of the router's rows, so that all shards have the same
    router and the same routing, and each computes its own experts.
    """

    first_held: int
    num_held: int
    numbers: tuple[int, ...] = ()
    """See `order`; empty: only sizes matter."""

    @property
    def held(self) -> range:
        return range(self.first_held, self.first_held + self.num_held)

    @property
    def order(self) -> Sequence[int]:
        return self.numbers or range(self.num_experts)

    def _columns(self, units: range) -> range:
        return range(self.columns)

    def _adds_biases(self, *, is_first: bool) -> bool:
        return True


def expert_name(layer: str, number: int) -> str:
    """The prefix of an expert's matrices, with its place in a shard or its number in a model."""
    return f"{layer}experts.{number}."


def shared_name(layer: str) -> str:
    """The prefix of a shared expert's matrices."""
    return f"{layer}{SHARED}"


def expert_number(name: str) -> int | None:
    """The number, in its layer, of a matrix's expert; None: it is not an expert's."""
    _before, is_one, after = name.partition(".experts.")
    return int(after.partition(".")[0]) if is_one else None


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """The numbers in the same order, as few ranges."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end
