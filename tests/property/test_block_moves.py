"""Wherever a GPU's keys and values go between steps, a layer's blocks hold its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.backends.kv_swap import CacheMoves
from edge.errors import RequestError
from edge.offload import MemoryKVTier
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.weights.layout import shard_layout
from tests.support.moved_caches import Action, act, actions
from tests.support.plans import make_plan
from tests.support.specs import plain_spec
from tests.support.triton_face import array, only_interpreted

CONTEXT = 96
NUM_KV_HEADS, HEAD_SIZE = 2, 4


def rows(request: str, layer: int, tokens: np.ndarray) -> np.ndarray:
    """Keys [tokens, heads, head_size] that say whose they are; values are the same, negative."""
    name = 1000.0 * (ord(request) - ord("a") + 1) + 100 * layer
    found = np.full((tokens.size, NUM_KV_HEADS, HEAD_SIZE), name, np.float32)
    return found + tokens[:, None, None].astype(np.float32)


class Shard:
    """Computes as a program does: finds a layer's old rows by its table, and adds new ones."""

    def __init__(self, num_layers: int, cached_tokens: int, disk_bytes: int) -> None:
        only_interpreted()
        import torch

        from edge.backends.triton.device import Device
        from edge.backends.triton.paged_kv_cache import BlockCache

        spec = plain_spec(
            num_layers=num_layers, num_kv_heads=NUM_KV_HEADS, num_heads=2, head_size=HEAD_SIZE
        )
        layout = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)
        limits = StepLimits(
            context_tokens=CONTEXT,
            chunk_tokens=CONTEXT,
            requests=4,
            cached_tokens=cached_tokens,
            disk_tokens=1000,
        )
        self.num_layers = num_layers
        self.cache = BlockCache(layout, limits, Device(), bits=None, dtype=torch.float32)
        self.tier = MemoryKVTier(disk_bytes)
        self.moves = CacheMoves(self.cache, self.cache.shape, self.tier, limits)
        self.lengths: dict[str, int] = {}

    def step(self, requests: str, tokens: int) -> None:
        entries = tuple(
            StepEntry(
                request=name,
                position=self.lengths.get(name, 0),
                tokens=(1,) * tokens,
                logit_rows=0,
            )
            for name in requests
        )
        step = Step(entries=entries)
        self.moves.arrive(step)
        self.cache.place(step)
        for layer in range(self.num_layers):
            if self.cache.is_spread:
                self.moves.begin(layer)
                self.cache.begin_layer(layer)
            for row, entry in enumerate(entries):
                self._compute(layer, row, entry)
            if self.cache.is_spread:
                self.moves.end(layer)
        for entry in entries:
            self.cache.wrote(self.cache.open(entry.request), entry.end)
            self.lengths[entry.request] = entry.end

    def _compute(self, layer: int, row: int, entry: StepEntry) -> None:
        kv = self.cache.layers[layer]
        assert kv.block_table is not None
        table = array(kv.block_table)[row]

        def at(tokens: np.ndarray) -> Any:
            size = kv.block_tokens
            return table[tokens // size], slice(None), tokens % size

        old, new = np.arange(entry.position), np.arange(entry.position, entry.end)
        for stored, sign in ((array(kv.keys), 1), (array(kv.values), -1)):
            assert np.array_equal(stored[at(old)], sign * rows(entry.request, layer, old))
            stored[at(new)] = sign * rows(entry.request, layer, new)

    def swap_out(self, name: str) -> None:
        self.moves.swap_out(name)

    def release(self, name: str) -> None:
        self.cache.release(name)
        self.moves.drop(name)
        self.lengths.pop(name, None)


@given(
    wanted=actions(most_tokens=40, most_actions=20),
    num_layers=st.integers(1, 5),
    cached_tokens=st.integers(12, 60),
    disk_tokens=st.one_of(st.just(1000), st.integers(0, 90)),
)
@settings(deadline=None, max_examples=100)
def test_every_layer_finds_its_own(
    wanted: list[Action], num_layers: int, cached_tokens: int, disk_tokens: int
) -> None:
    token_bytes = num_layers * 2 * NUM_KV_HEADS * HEAD_SIZE * 4
    shard = Shard(num_layers, cached_tokens, disk_tokens * token_bytes)
    try:
        act(shard, wanted, context_tokens=CONTEXT)
    finally:
        shard.moves.close()


def test_nobody_else_comes_while_one_has_all_memory() -> None:
    shard = Shard(num_layers=2, cached_tokens=20, disk_bytes=1 << 20)
    shard.step("a", 30)
    with pytest.raises(RequestError, match="31 tokens under way; memory is kept for 20"):
        shard.step("b", 1)
    with pytest.raises(KeyError, match="a request that is longer than memory uses all"):
        shard.cache.open("b")
    shard.swap_out("a")
    shard.step("b", 1)
    shard.step("b", 3)
    shard.swap_out("b")
    shard.step("a", 2)
    shard.release("a")
    shard.step("b", 1)
    shard.moves.close()
