"""What one device has of a stage: the interface of every kind of share.

The one kind today is a slice of layers (`shard.py`), with whole experts as a part of it. A new kind
is a class with these verbs, registered in `plan.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

from edge.partition.plan.facts import DeviceSpec, ModelFacts, Workload
from edge.partition.plan.reading import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that one device must hold or read."""

    weight_bytes: int
    """Weights in memory, with the window for streamed layers."""
    kv_bytes: int
    """KV cache for the whole workload."""
    state_bytes: int = 0
    """States of all requests, where layers have states."""
    streamed_bytes: int = 0
    """Read from disk for each step, on average."""
    routed_bytes: int = 0
    """The part of `streamed_bytes` that is experts. Which experts are needed is known only after
    the router ran."""
    expert_runs: float = 0.0
    """Average runs of experts' graphs in each step, where experts are read one by one."""
    expert_bytes: int = 0
    """Bytes of the largest cached expert."""
    streamed_layer_bytes: int = 0
    """Bytes of the largest streamed layer."""
    apart_bytes: int = 0
    """Bytes to add to `weight_bytes` where layers are streamed whole, with all their experts."""

    @property
    def total(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.state_bytes

    def __add__(self, other: "MemoryUse") -> "MemoryUse":
        """The use of two shares on one device."""
        return MemoryUse(
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            state_bytes=self.state_bytes + other.state_bytes,
            streamed_bytes=self.streamed_bytes + other.streamed_bytes,
            routed_bytes=self.routed_bytes + other.routed_bytes,
            expert_runs=self.expert_runs + other.expert_runs,
            expert_bytes=max(self.expert_bytes, other.expert_bytes),
            streamed_layer_bytes=max(self.streamed_layer_bytes, other.streamed_layer_bytes),
            apart_bytes=self.apart_bytes + other.apart_bytes,
        )

    def on(self, device: DeviceSpec) -> "MemoryUse":
        """The use on this device: a device with memory of its own gets layers whole, with all
        experts."""
        if device.host_memory_bytes is None:
            return self
        weight_bytes = self.weight_bytes + self.apart_bytes
        return replace(
            self, weight_bytes=weight_bytes, apart_bytes=0, expert_runs=0.0, expert_bytes=0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """A stage's place in its plan, as far as shares need to know it."""

    number: int
    layers: range
    is_first: bool
    """The stage embeds the tokens."""
    is_last: bool
    """The stage computes the logits."""


class Share(Protocol):
    """What one device has of a stage."""

    kind: ClassVar[str]
    """Name of the kind in JSON."""

    @property
    def device(self) -> str:
        """The id of the device."""

    def on(self, device: str) -> Self:
        """The same on another device."""

    def to_json(self) -> dict[str, object]:
        """Built-in types only, without the kind; `read` makes an equal share of it."""

    @classmethod
    def read(cls, reader: Reader, value: Mapping[str, object], where: str) -> Self:
        """Read a share from untrusted JSON without its kind; problems are added to the reader's."""

    @classmethod
    def problems(
        cls, names: Sequence[str], shares: Sequence[Self], place: StagePlace, model: ModelFacts
    ) -> Iterator[str]:
        """The reasons why the shares of one stage, all of this kind, are not the whole stage of the
        model. `names` are the shares' names for these sentences."""

    def memory(self, place: StagePlace, model: ModelFacts, workload: Workload) -> MemoryUse:
        """Memory use of a share without problems."""

    def in_words(self) -> str:
        """The share in a few words, for a table."""


def tiling_problems(
    what: str,
    names: Sequence[str],
    parts: Sequence[range],
    total: int,
    owner: str,
    *,
    multiple: int = 1,
) -> Iterator[str]:
    """The reasons why `parts` do not cover 0..total once, in order. Empty parts may be anywhere."""
    reached = 0
    for name, part in zip(names, parts, strict=True):
        if not part:
            continue
        if part.step != 1:
            yield f"{name} has {what} in steps of {part.step}; they must be contiguous."
        elif part.start != reached:
            yield f"{name} has {what} from {part.start}, where {reached} would be next."
        elif part.start % multiple:
            yield f"{name} has {what} from {part.start}, which is no multiple of {multiple}."
        reached = part.stop
    if reached != total:
        yield f"{owner}: the {what} end at {reached}, and the model has {total}."
