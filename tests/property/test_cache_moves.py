"""Wherever keys and values go between steps, a layer finds all of its own when it computes."""

from __future__ import annotations

from collections.abc import Sequence
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

    def __init__(
        self, num_layers: int, states: Sequence[tuple[int, ...]], most_states: int
    ) -> None:
        super().__init__(
            layers=[(HEADS, ELEMENTS)] * num_layers,
            slots=4,
            context_tokens=CONTEXT,
            states=states,
            most_states=most_states,
            places=2,
        )
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


def state(request: str, tokens: int, size: int) -> np.ndarray:
    """What a request has of so many tokens: nothing but zeros of none."""
    return np.arange(1, size + 1, dtype=np.float32) * tokens * ord(request)


class Shard:
    """Computes as a program does: makes a layer's new rows when it has found the old ones."""

    def __init__(
        self,
        num_layers: int,
        cached_tokens: int,
        disk_bytes: int,
        states: Sequence[tuple[int, ...]] = (),
        most_states: int = 4,
    ) -> None:
        self.num_layers = num_layers
        self.cached_tokens = cached_tokens
        self.pool = WatchedPool(num_layers, states, most_states)
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
            saved_states=2,
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
            for array in self.pool.states(slot + offset, 1):
                known = state(entry.request, entry.position, array.size)
                assert np.array_equal(array.reshape(-1), known)
                array[...] = state(entry.request, entry.end, array.size).reshape(array.shape)
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
    states=st.sampled_from([(), ((2, 3), (5,))]),
)
@settings(deadline=None, max_examples=300)
def test_every_layer_finds_its_own(
    wanted: list[Action],
    num_layers: int,
    cached_tokens: int,
    disk_tokens: int,
    states: tuple[tuple[int, ...], ...],
) -> None:
    disk_bytes = disk_tokens * num_layers * 2 * HEADS * ELEMENTS * 4
    shard = Shard(num_layers, cached_tokens, disk_bytes, states)
    try:
        act(shard, wanted, context_tokens=CONTEXT)
    finally:
        shard.close()


def test_what_has_a_state_is_not_cut() -> None:
    """It can go on; others begin with what was saved when it had no more, and in no other way."""
    shard = Shard(num_layers=2, cached_tokens=100, disk_bytes=1 << 20, states=[(2, 3), (5,)])
    pool, moves = shard.pool, shard.moves

    def arrive(request: str, position: int) -> None:
        entry = StepEntry(request=request, position=position, tokens=(1,), logit_rows=0)
        moves.arrive(Step(entries=(entry,)))

    shard.step("a", 6)
    assert moves.take("b", "a", 6, moves=False) == 0
    moves.save_state("a", 6, 0)
    moves.save_state("a", 4, 1)  # it has 6
    moves.save_state("nobody", 6, 1)
    assert moves.take("b", "a", 4, moves=False) == 0
    assert moves.take("b", "a", 6, moves=False) == 6
    for one, other in zip(pool.states(0, 1), pool.states(1, 1), strict=True):
        assert np.array_equal(one, other)
        assert one.any()
    for position in (5, 7):
        with pytest.raises(RequestError, match=f"at token {position}, but its state is at"):
            arrive("a", position)
    with pytest.raises(RequestError, match="at token 3, but its state is at 0"):
        arrive("c", 3)
    shard.swap_out("a")
    with pytest.raises(RequestError, match="at token 2, but its state is at 6"):
        arrive("a", 2)
    shard.step("a", 1)
    moves.save_state("a", 7, 1)
    shard.step("a", 2)
    moves.keep("a", 7)
    assert moves.take("c", "a", 7, moves=True) == 7
    shard.lengths["c"] = 7
    known = state("a", 7, 6).reshape(2, 3)
    assert np.array_equal(pool.states(pool.open("c"), 1)[0][0], known)
    assert moves.take("d", "c", 6, moves=False) == 6, "what was saved went along"
    moves.save_state("d", 6, 1)
    assert moves.take("e", "c", 7, moves=False) == 0, "another one's is there"
    moves.keep("b", 5)
    assert "b" not in pool, "of its first 5 tokens there is nothing"
    shard.close()


def test_who_others_have_nothing_of_begins_anew() -> None:
    """A shard may have found a beginning that others could not take: all compute it."""
    shard = Shard(num_layers=1, cached_tokens=100, disk_bytes=1 << 20, states=[(5,)])
    shard.step("a", 6)
    shard.moves.save_state("a", 6, 0)
    assert shard.moves.take("b", "a", 6, moves=False) == 6
    shard.step("b", 3)
    assert shard.pool.length(shard.pool.open("b")) == 3
    shard.close()


def test_what_is_kept_has_the_state_that_was_saved_and_no_other() -> None:
    """Two requests may have states at once, and there are two more."""
    shard = Shard(num_layers=1, cached_tokens=100, disk_bytes=1 << 20, states=[(5,)], most_states=2)
    pool, moves = shard.pool, shard.moves
    for number, name in enumerate("ab"):
        shard.step(name, 4)
        moves.save_state(name, 4, number)
        shard.step(name, 1)
    with pytest.raises(RequestError, match="too many requests at once: all 2 places for states"):
        shard.step("c", 1)
    moves.keep("a", 4)
    shard.step("c", 2)
    with pytest.raises(RequestError, match="too many requests at once"):
        moves.take("d", "a", 4, moves=True)
    shard.release("b")
    shard.swap_out("c")
    assert moves.take("d", "a", 4, moves=False) == moves.take("e", "a", 4, moves=True) == 4
    for name in "de":
        (found,) = pool.states(pool.open(name), 1)
        assert np.array_equal(found[0], state("a", 4, 5))
    shard.release("d")
    shard.step("c", 1)
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
