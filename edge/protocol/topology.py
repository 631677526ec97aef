"""The seats of a plan, their places, and the links between them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.protocol.fields import Address, Printable

_MAX_ADDRESSES = 64

Seat = tuple[int, int]
"""(stage, rank): a place in the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one shard of a plan runs, for its neighbours."""

    name: Printable
    """Name of the device, for messages."""
    addresses: Annotated[tuple[Address, ...], Meta(max_length=_MAX_ADDRESSES)]
    """Addresses in the order in which they are tried."""
    device: str | None = None
    """Id of the device whose certificate it shows; None: it has none."""

    def __post_init__(self) -> None:
        if not 0 < len(self.addresses) <= _MAX_ADDRESSES:
            raise ValueError(f"a place needs 1 to {_MAX_ADDRESSES} addresses")


def neighbours(plan_sizes: tuple[int, ...], seat: Seat) -> frozenset[Seat]:
    """The seats that `seat` has a link to; symmetric.

    Ranks of a stage are a full mesh. Rank j of a stage receives from rank j mod n of the stage
    before, whose n shards all hold the same hidden state. The sampler sends its tokens to every
    seat.
    """
    stage, rank = seat
    sampler = sampler_seat(plan_sizes)
    if seat == sampler:
        every = {(s, r) for s, size in enumerate(plan_sizes) for r in range(size)}
        return frozenset(every - {seat})
    found = {(stage, other) for other in range(plan_sizes[stage]) if other != rank}
    if stage > 0:
        found.add((stage - 1, rank % plan_sizes[stage - 1]))
    if stage + 1 < len(plan_sizes):
        size = plan_sizes[stage]
        found.update((stage + 1, j) for j in range(plan_sizes[stage + 1]) if j % size == rank)
    return frozenset(found | {sampler})


def sampler_seat(plan_sizes: tuple[int, ...]) -> Seat:
    """The seat that chooses tokens: rank 0 of the last stage."""
    return (len(plan_sizes) - 1, 0)
