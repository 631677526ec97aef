"""Wherever keys and values go between steps, a layer finds all of its own when it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.backends.kv_swap import CacheMoves
from edge.errors import RequestError
from edge.offload import KVLayer, KVPool, KVShape, MemoryKVTier
from edge.protocol.step import Step, StepEntry, StepLimits
from tests.support.moved_caches import Action, act, actions

HEADS, ELEMENTS, CONTEXT = 2, 3, 64


class WatchedPool(KVPool):
    """Knows which layers of which slot it holds; what it drops is spoiled for good."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[(HEADS, ELEMENTS)] * num_layers, slots=4, context_tokens=CONTEXT)
        self.num_layers = num_layers

    def drop_layer(self, index: int, slot: int) -> None:
        super().drop_layer(index, slot)
        for array in self.layer(index, slot, 1):
            array[...] = np.nan

    def held_layers(self, slot: int, tokens: int) -> int:
        """Layers in which so many tokens are there."""
        return sum(
            not np.isnan(self.layer(index, slot, 1)[0][0, :, :tokens]).any()
            for index in range(self.num_layers)
        )


def rows(request: str, layer: int, first: int, last: int) -> np.ndarray:
    """Keys that say whose they are; values are the same, negative."""
    found = np.arange(HEADS * CONTEXT * ELEMENTS, dtype=np.float32).reshape(
        HEADS, CONTEXT, ELEMENTS
    )
    return found[:, first:last] + 1000 * layer + 100_000 * ord(request)


class Shard:
    """Computes as a program does: makes a layer's new rows when it has found the old ones."""

    def __init__(self, num_layers: int, cached_tokens: int, disk_bytes: int) -> None:
        self.num_layers = num_layers
        self.cached_tokens = cached_tokens
        self.pool = WatchedPool(num_layers)
        shape = KVShape(
            layers=(KVLayer(num_kv_heads=HEADS, row_bytes=ELEMENTS * 4),) * num_layers,
            context_tokens=CONTEXT,
        )
        self.tier = MemoryKVTier(disk_bytes)
        limits = StepLimits(
            context_tokens=CONTEXT,
            chunk_tokens=CONTEXT,
            requests=4,
            cached_tokens=cached_tokens,
            disk_tokens=1000,
        )
        self.moves = CacheMoves(self.pool, shape, self.tier, limits)
        self.lengths: dict[str, int] = {}

    def step(self, requests: str, tokens: int) -> None:
        step = Step(
            entries=tuple(
                StepEntry(
                    request=name,
                    position=self.lengths.get(name, 0),
                    tokens=(1,) * tokens,
                    logit_rows=0,
                )
                for name in requests
            )
        )
        self.moves.arrive(step)
        slot = self.pool.gather(list(requests))
        for layer in range(self.num_layers):
            self.moves.begin(layer)
            for offset, entry in enumerate(step.entries):
                keys, values = self.pool.layer(layer, slot + offset, 1)
                known = rows(entry.request, layer, 0, entry.position)
                assert np.array_equal(keys[0, :, : entry.position], known)
                assert np.array_equal(values[0, :, : entry.position], -known)
                new = rows(entry.request, layer, entry.position, entry.end)
                keys[0, :, entry.position : entry.end] = new
                values[0, :, entry.position : entry.end] = -new
                if entry.end > self.cached_tokens:
                    held = self.pool.held_layers(slot, entry.position)
                    most = self.cached_tokens * self.num_layers // entry.end
                    assert entry.position == 0 or held <= most, "more than memory is kept for"
            self.moves.end(layer)
        for offset, entry in enumerate(step.entries):
            self.pool.wrote(slot + offset, entry.end)
            self.lengths[entry.request] = entry.end

    def swap_out(self, name: str) -> None:
        self.moves.swap_out(name)

    def release(self, name: str) -> None:
        self.pool.release(name)
        self.moves.drop(name)
        self.lengths.pop(name, None)

    def close(self) -> None:
        self.moves.close()
        self.pool.close()


@given(
    wanted=actions(most_tokens=9, most_actions=30),
    num_layers=st.integers(1, 5),
    cached_tokens=st.integers(12, 40),
    disk_tokens=st.one_of(st.just(1000), st.integers(0, 60)),
)
@settings(deadline=None, max_examples=200)
def test_every_layer_finds_its_own(
    wanted: list[Action], num_layers: int, cached_tokens: int, disk_tokens: int
) -> None:
    shard = Shard(num_layers, cached_tokens, disk_tokens * num_layers * 2 * HEADS * ELEMENTS * 4)
    try:
        act(shard, wanted, context_tokens=CONTEXT)
    finally:
        shard.close()


def test_one_that_was_refused_may_come_back() -> None:
    shard = Shard(num_layers=2, cached_tokens=10, disk_bytes=1 << 20)
    shard.step("a", 6)
    with pytest.raises(RequestError, match="12 tokens under way; memory is kept for 10"):
        shard.step("b", 6)
    shard.swap_out("a")
    shard.step("b", 6)
    shard.swap_out("b")
    shard.step("a", 3)
    written: Any = shard.tier.written_bytes
    shard.swap_out("a")
    assert shard.tier.written_bytes - written == 3 * 2 * 2 * HEADS * ELEMENTS * 4, "only the new"
    shard.close()
