"""Who a peer is, what it has and what it runs, as it says itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from edge.host.free_memory import format_size
from edge.partition import DeviceSpec
from edge.protocol.fields import Address, Printable

MAX_SESSIONS = 64
"""Shards that a peer runs at once, of all its coordinators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """One shard that a peer runs. Sizes are what it takes now."""

    name: Printable
    dtype: Printable
    stage: int
    rank: int
    sums: Printable
    """How it sums with the others of its stage: over links, or what else."""
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
    """The same on disk."""
    user: Printable
    """The device that loaded it: its name and the beginning of its id."""
    slower: float | None = None
    """Times the prediction that what it computed for a token took of late; None: not known."""

    @property
    def held(self) -> str:
        """Who holds how much memory by it, in words."""
        return f"{format_size(self.bytes + self.buffer_bytes)} for {self.name} of {self.user}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDescription:
    """A peer as it describes itself. ValueError for what cannot be planned with."""

    id: str
    epoch: int
    """Number of this start of its daemon: greater each time."""
    name: Printable
    software: Printable
    addresses: tuple[Address, ...]
    """Every address it listens on."""
    backend: Printable
    processor: Printable
    """What computes, for people."""
    threads: int
    memory_bytes: int
    """What it promised to stay under."""
    floor_bytes: int
    """The part of that which its process takes of itself."""
    free_bytes: int
    """The part of that which is not reserved yet."""
    model_free_bytes: int
    """What the weights and the KV cache of another model may take; the same, where no limit of
    their own is set."""
    host: Printable
    """The machine it is on: peers of one host share its memory."""
    identity: Printable
    """Changes when the device must be measured anew."""
    host_memory_bytes: int | None = None
    """What models may still take of its host's memory, which is not its own; None: it is."""
    kv_memory_bytes: int | None
    """What keys and values may still take of its memory; None: whatever a plan reserves."""
    kv_disk_bytes: int
    """What they may still take of its disk."""
    kv_prefix_bytes: int
    """What beginnings of earlier prompts take there; it makes room for requests."""
    kv_beginnings_bytes: int
    """What beginnings of earlier prompts take of its memory, or its host's, that is free: they make
    room for whatever needs it."""
    models: tuple[HostedModel, ...]
    """What it runs."""
    lacks: tuple[Printable, ...] = ()
    """What some models need and its back end has no kernels for; see `ModelSpec.needs`."""
    is_busy: bool = False
    """It computes, loads or is measured at this moment."""
    is_leaving: bool = False
    """Its user has stopped it: it goes soon, and takes no model any more."""
    clock_s: float | None = field(default=None, compare=False)
    """What its clock showed when it said this, in seconds since 1970."""

    def __post_init__(self) -> None:
        self.device()

    def lacking(self, needs: Collection[str]) -> tuple[str, ...]:
        """What of these it has no kernels for."""
        return tuple(each for each in self.lacks if each in needs)

    def device(self, *, buffer_bytes: int = 0, unused_bytes: int = 0) -> DeviceSpec:
        """As plans see it: memory for weights and KV, without the buffers of their steps, of which
        decoding leaves some unused."""
        is_limited = self.model_free_bytes < self.free_bytes  # what weights and KV may take
        return DeviceSpec(
            id=self.id,
            name=self.name,
            memory_bytes=max(0, min(self.model_free_bytes, self.free_bytes - buffer_bytes)),
            threads=self.threads,
            host=self.host,
            host_memory_bytes=self.host_memory_bytes,
            unused_buffer_bytes=0 if is_limited else unused_bytes,
        )
