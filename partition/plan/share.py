"""What one device has of a stage: the interface that every kind of share has.

Slices of layers are one kind (`shard.py`), and whole experts a part of it, as they go with the
attention of their layers. A further one, for the nodes of a graph say, is a class with these verbs,
named in `plan.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

from edge.partition.plan.facts import DeviceSpec, ModelFacts, Workload
from edge.partition.plan.reading import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What one device must hold."""

    weight_bytes: int
    """Held all the time, the window of streamed layers included."""
    kv_bytes: int
    """KV cache for the whole workload."""
    state_bytes: int = 0
    """States of all its requests, where layers have some."""
    streamed_bytes: int = 0
    """Read from disk for each step, on average."""
    routed_bytes: int = 0
    """Part of these for experts: which ones is known only when they are needed."""
    expert_runs: float = 0.0
    """Graphs of experts in each step, on average, where those come in one by one."""
    expert_bytes: int = 0
    """The largest of these experts, in memory."""
    streamed_layer_bytes: int = 0
    """The largest of the layers that are read."""
    apart_bytes: int = 0
    """What `weight_bytes` would be more if experts were brought in with all others of a layer."""

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
        """As it is on this device: into memory of its own layers are copied as wholes."""
        if device.host_memory_bytes is None:
            return self
        weight_bytes = self.weight_bytes + self.apart_bytes
        return replace(
            self, weight_bytes=weight_bytes, apart_bytes=0, expert_runs=0.0, expert_bytes=0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """A stage's place in its plan, as its shares need to know it."""

    number: int
    layers: range
    is_first: bool
    """It embeds the tokens."""
    is_last: bool
    """It computes the logits."""


class Share(Protocol):
    """What one device has of a stage."""

    kind: ClassVar[str]
    """In JSON."""

    @property
    def device(self) -> str:
        """The id of the device."""

    def on(self, device: str) -> Self:
        """The same on another device."""

    def to_json(self) -> dict[str, object]:
        """Built-in types only, without the kind; `read` of it is an equal share."""

    @classmethod
    def read(cls, reader: Reader, value: Mapping[str, object], where: str) -> Self:
        """From untrusted JSON, the kind taken out; problems go to the reader."""

    @classmethod
    def problems(
        cls, names: Sequence[str], shares: Sequence[Self], place: StagePlace, model: ModelFacts
    ) -> Iterator[str]:
        """What keeps the shares of one stage, all of this kind, from being the whole stage of the
        model. `names` says in a sentence which share is meant."""

    def memory(self, place: StagePlace, model: ModelFacts, workload: Workload) -> MemoryUse:
        """Memory use of a share without problems."""

    def in_words(self) -> str:
        """What it has, briefly, for a table."""


def tiling_problems(
    what: str,
    names: Sequence[str],
    parts: Sequence[range],
    total: int,
    owner: str,
    *,
    multiple: int = 1,
) -> Iterator[str]:
    """What keeps `parts` from covering 0..total once, in order. Empty parts may lie anywhere."""
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
