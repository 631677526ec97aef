"""A peer's description of itself: its identity, resources and models."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from edge.host.free_memory import format_size
from edge.models.spec import WEIGHTS_ON_DISK, WINDOW_READS
from edge.partition import DeviceSpec
from edge.protocol.fields import Address, Printable

MAX_SESSIONS = 64
"""The most shards that a peer runs at once, for all coordinators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """One shard that a peer runs, with its current sizes in bytes."""

    name: Printable
    dtype: Printable
    stage: int
    rank: int
    sums: Printable
    """How it sums with the other shards of its stage: over links, or in another way."""
    bytes: int
    """Weights and KV cache."""
    buffer_bytes: int
    streamed_bytes: int
    """Read from disk for each step."""
    host_bytes: int
    """Weights in the memory of the device's host."""
    kv_bytes: int
    """The part of `bytes` for keys and values."""
    kv_host_bytes: int
    """Keys and values in the memory of the device's host."""
    kv_disk_bytes: int
    """Keys and values on disk."""
    user: Printable
    """The device that loaded it: its name and the beginning of its id."""
    slower: float | None = None
    """Recent compute time of a token over its prediction; None: not known."""

    @property
    def held(self) -> str:
        """Its memory, model and user, in words."""
        return f"{format_size(self.bytes + self.buffer_bytes)} for {self.name} of {self.user}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDescription:
    """A peer's description of itself. ValueError for values that plans cannot use."""

    id: str
    epoch: int
    """Number of this start of its daemon; it grows with each start."""
    name: Printable
    software: Printable
    addresses: tuple[Address, ...]
    """Every address that it listens on."""
    backend: Printable
    processor: Printable
    """Name of the processor or GPU."""
    threads: int
    memory_bytes: int
    """The memory budget of its process."""
    floor_bytes: int
    """Memory of its process without a model."""
    free_bytes: int
    """Memory of the budget that is not reserved."""
    free_now_bytes: int
    """The part of `free_bytes` that is free on its machine now; all of it where a user gave the
    budget."""
    model_free_bytes: int
    """Memory for weights and KV cache of another model: `free_bytes`, or less where they have a
    limit of their own."""
    host: Printable
    """The machine that it is on; peers of one host share its memory."""
    memory_pool: Printable | None = None
    """The memory that its budget is a part of; peers of one pool share it. None: a user gave the
    budget, or it is a GPU's."""
    pool_free_bytes: int = 0
    """Bytes of that memory which are free for models now."""
    identity: Printable
    """Changes when the device must be measured again."""
    arithmetic: Printable
    """Equal for devices whose results have the same bits."""
    host_memory_bytes: int | None = None
    """Free host memory for models; None: the device computes in host memory."""
    kv_memory_bytes: int | None
    """Free memory for keys and values; None: no limit but the plan's."""
    kv_disk_bytes: int
    """Free disk space for keys and values."""
    kv_prefix_bytes: int
    """Disk space of prefix caches; requests replace them when they need it."""
    kv_beginnings_bytes: int
    """Otherwise free memory, of the device or its host, that prefix caches use; they give way to
    any other need."""
    models: tuple[HostedModel, ...]
    """The shards that it runs."""
    lacks: tuple[Printable, ...] = ()
    """Needs of some models for which its back end has no kernels; see `ModelSpec.needs`."""
    is_busy: bool = False
    """It computes, loads or is measured now."""
    is_leaving: bool = False
    """Its user has stopped it: it ends soon, and loads no further model."""
    clock_s: float | None = field(default=None, compare=False)
    """Its clock at the time of the description, in seconds since 1970."""

    def __post_init__(self) -> None:
        self.device()

    @property
    def model_free_now_bytes(self) -> int:
        """Memory for weights and KV cache of another model that is free now."""
        return min(self.model_free_bytes, self.free_now_bytes)

    def lacking(self, needs: Collection[str]) -> tuple[str, ...]:
        """Those of `needs` for which it has no kernels."""
        return tuple(each for each in self.lacks if each in needs)

    def device(self, *, buffer_bytes: int = 0, unused_bytes: int = 0) -> DeviceSpec:
        """The device for plans: its memory for weights and KV cache, without the `buffer_bytes` of
        steps, of which decoding leaves `unused_bytes` unused."""
        is_limited = (
            self.model_free_bytes < self.free_now_bytes
        )  # weights and KV cache have a limit
        return DeviceSpec(
            id=self.id,
            name=self.name,
            memory_bytes=max(0, min(self.model_free_bytes, self.free_now_bytes - buffer_bytes)),
            threads=self.threads,
            host=self.host,
            host_memory_bytes=self.host_memory_bytes,
            unused_buffer_bytes=0 if is_limited else unused_bytes,
            streams=WEIGHTS_ON_DISK not in self.lacks,
            reads_windows=WINDOW_READS not in self.lacks,
        )
