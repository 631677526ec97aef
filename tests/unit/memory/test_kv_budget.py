"""What keys and values are promised of memory, of the host's where that is another, and of disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edge.errors import CapacityError
from edge.memory.kv_budget import KvRoom
from edge.protocol.assignment import Assignment
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from tests.support.plans import solo_assignment
from tests.support.specs import plain_spec

SPEC = plain_spec(num_heads=2, num_kv_heads=2, head_size=8)
LAYER_TOKEN_BYTES = 2 * 2 * 8 * 4
LONGER = StepLimits(
    context_tokens=100, chunk_tokens=16, requests=2, cached_tokens=50, disk_tokens=1000
)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[KvRoom]:
    opened = KvRoom(memory_bytes=None, disk=(tmp_path / "kv", 1 << 30))
    yield opened
    assert opened.free_disk_bytes == 1 << 30
    opened.close()


def assignment(limits: StepLimits) -> Assignment:
    return solo_assignment(SPEC, limits, WireRules(sums=(WireRule(),), hops=()))


def test_a_layer_of_the_longest_request_passes_through_the_host(room: KvRoom) -> None:
    passing = 100 * LAYER_TOKEN_BYTES
    given = assignment(LONGER)
    with pytest.raises(CapacityError, match=r"way to the GPU, and .* are free; .* --host-memory"):
        room.share(given, given.layout, host_bytes=passing - 1)
    share = room.share(given, given.layout, host_bytes=passing)
    assert (share.host_bytes, share.host) == (passing, None)
    room.give_back(share)
    share = room.share(given, given.layout, host_bytes=passing + 777)
    assert share.host is not None
    assert share.host_bytes == passing + 777
    room.give_back(share)


def test_nothing_passes_where_every_request_fits_or_there_is_one_memory(room: KvRoom) -> None:
    short = assignment(replace(LONGER, cached_tokens=100))
    share = room.share(short, short.layout, host_bytes=0)
    assert share.host_bytes == 0
    room.give_back(share)
    long = assignment(LONGER)
    share = room.share(long, long.layout)
    assert share.host_bytes == 0
    room.give_back(share)
