"""What a pool of KV caches promises: contents follow their request, wherever it lies."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge.offload import KVPool


def make_pool(slots: int = 4) -> KVPool:
    return KVPool(layers=[(3, 8)] * 2, slots=slots, context_tokens=50)


def write(pool: KVPool, request: str, length: int, value: float) -> None:
    slot = pool.open(request)
    for layer in range(2):
        keys, values = pool.layer(layer, slot, 1)
        keys[0, :, :length] = value + layer
        values[0, :, :length] = -value - layer
    pool.wrote(slot, length)


def holds(pool: KVPool, request: str, length: int, value: float) -> bool:
    slot = pool.open(request)
    return all(
        bool((pool.layer(layer, slot, 1)[0][0, :, :length] == value + layer).all())
        and bool((pool.layer(layer, slot, 1)[1][0, :, :length] == -value - layer).all())
        for layer in range(2)
    )


def test_a_released_slot_is_filled_by_the_last_request() -> None:
    pool = make_pool()
    for index, name in enumerate("abc"):
        write(pool, name, 10 * (index + 1), index + 1.0)
    pool.release("a")
    assert pool.num_requests == 2
    assert holds(pool, "b", 20, 2.0)
    assert holds(pool, "c", 30, 3.0)


def test_gathering_brings_requests_side_by_side_in_order() -> None:
    pool = make_pool()
    for index, name in enumerate("abcd"):
        write(pool, name, 5 + index, index + 1.0)
    first = pool.gather(["d", "a"])
    keys, _values = pool.layer(1, first, 2)
    assert (keys[0, :, :8] == 5.0).all()
    assert (keys[1, :, :5] == 2.0).all()
    assert holds(pool, "b", 6, 2.0)
    assert holds(pool, "c", 7, 3.0)


def test_states_follow_their_request_and_begin_with_zeros() -> None:
    pool = KVPool(layers=[(1, 8)], slots=4, context_tokens=50, states=[(2, 3), (5,)])

    def state_of(request: str) -> set[float]:
        return {float(x) for state in pool.states(pool.open(request), 1) for x in state.flat}

    assert not pool.can_cut
    for value, name in enumerate("abcd", 1):
        slot = pool.open(name)
        assert state_of(name) == {0.0}
        for state in pool.states(slot, 1):
            state[...] = value
        pool.wrote(slot, value)
    first = pool.gather(["d", "a"])
    assert [set(state.flat) for state in pool.states(first, 2)] == [{4.0, 1.0}] * 2
    pool.release("a")
    assert [state_of(name) for name in "bcd"] == [{2.0}, {3.0}, {4.0}]
    pool.gather(["d"], spare=True)
    for state in pool.states(3, 1):
        state[...] = np.nan
    assert state_of("e") == {0.0}, "also in a slot that nobody's row was computed in"
    pool.clear()
    assert state_of("f") == {0.0}
    pool.close()


@pytest.mark.linux_ways
def test_states_of_any_size_lie_apart_and_their_memory_is_given_back() -> None:
    """Those of whole huge pages among others."""
    shapes = [(3, 100), (32, 128, 128), (3, 50), (2, 512, 1024)]
    pool = KVPool(layers=[(1, 8)], slots=3, context_tokens=50, states=shapes, places=2)
    before = psutil.Process().memory_info().rss
    for value, name in enumerate("abc", 1):
        for index, state in enumerate(pool.states(pool.open(name), 1)):
            assert state.shape == (1, *shapes[index])
            state[...] = 10 * value + index
    pool.save_states(pool.open("b"), 1)
    pool.drop_states(pool.open("b"))
    pool.release("a")
    held = [{float(s.min()), float(s.max())} for s in pool.states(pool.open("c"), 1)]
    assert held == [{30.0}, {31.0}, {32.0}, {33.0}]
    pool.load_states(pool.open("b"), 1)
    held = [{float(s.min()), float(s.max())} for s in pool.states(pool.open("b"), 1)]
    assert held == [{20.0}, {21.0}, {22.0}, {23.0}]
    pool.clear()
    assert psutil.Process().memory_info().rss - before < 2 << 20, "18 MiB were written"
    pool.close()


@pytest.mark.linux_ways
def test_a_slot_without_states_stays_without_until_it_is_given_some() -> None:
    pool = KVPool(
        layers=[(1, 8)], slots=4, context_tokens=50, states=[(2, 3), (4096,)],
        most_states=2, places=2,
    )  # fmt: skip

    def state_of(request: str) -> set[float]:
        return {float(x) for state in pool.states(pool.open(request), 1) for x in state.flat}

    def begin(request: str, value: float) -> None:
        slot = pool.open(request)
        for state in pool.states(slot, 1):
            state[...] = value

    begin("a", 1.0)
    begin("b", 2.0)
    with pytest.raises(KeyError, match="all 2 places for states are taken"):
        pool.open("c")
    pool.save_states(pool.open("a"), 1)
    pool.drop_states(pool.open("a"))
    begin("c", 3.0)
    with pytest.raises(KeyError, match="all 2 places for states are taken"):
        pool.load_states(pool.open("a"), 1)
    assert pool.gather(["c", "a"]) in (0, 1)
    assert (state_of("b"), state_of("c")) == ({2.0}, {3.0})
    assert not pool.states(pool.open("a"), 1)[1].any(), "its page was given back"
    pool.release("b")
    assert state_of("c") == {3.0}
    pool.load_states(pool.open("a"), 1)
    assert (state_of("a"), state_of("c")) == ({1.0}, {3.0})
    pool.clear()
    assert state_of("d") == {0.0}
    pool.close()


def test_neighbours_are_gathered_where_they_lie() -> None:
    pool = make_pool()
    for name in "abcd":
        write(pool, name, 5, 1.0)
    assert pool.gather(["b", "c"]) == 1


def test_a_full_pool_says_so() -> None:
    pool = make_pool(slots=1)
    pool.open("a")
    with pytest.raises(KeyError, match="1 KV slots"):
        pool.open("b")
    pool.release("a")
    assert pool.open("b") == 0


@pytest.mark.linux_ways
def test_a_released_slot_gives_its_memory_back() -> None:
    pool = KVPool(layers=[(1, 16)] * 1, slots=1, context_tokens=1 << 20)
    before = resident_bytes()
    write_all = pool.layer(0, pool.open("a"), 1)[0]
    write_all[:] = 1.0
    assert resident_bytes() - before > 48 << 20
    del write_all
    pool.release("a")
    assert resident_bytes() - before < 16 << 20


@pytest.mark.linux_ways
def test_a_pool_that_is_cleared_gives_the_memory_of_states_back() -> None:
    pool = KVPool(layers=[], slots=1, context_tokens=1, states=[(1 << 24,)])
    before = resident_bytes()
    pool.open("a")
    assert resident_bytes() - before > 48 << 20
    pool.clear()
    assert resident_bytes() - before < 16 << 20


@pytest.mark.linux_ways
def test_what_a_long_request_had_is_given_back_where_a_short_one_moves_in() -> None:
    pool = KVPool(layers=[(2, 16)] * 2, slots=2, context_tokens=1 << 18)
    before = resident_bytes()
    write(pool, "long", 1 << 17, 1.0)
    write(pool, "short", 3, 5.0)
    assert resident_bytes() - before > 48 << 20
    pool.release("long")
    assert resident_bytes() - before < 16 << 20
    assert holds(pool, "short", 3, 5.0)


@pytest.mark.linux_ways
def test_changing_places_takes_no_memory() -> None:
    """A long request and a short one: what the long one leaves is given back, head by head."""
    pool = KVPool(layers=[(2, 16)] * 2, slots=2, context_tokens=1 << 18)
    write(pool, "short", 3, 5.0)
    write(pool, "long", 1 << 17, 1.0)
    before = resident_bytes()
    assert pool.gather(["long", "short"]) == 0
    assert resident_bytes() - before < 16 << 20, "of 64 MiB that the long one has"
    assert holds(pool, "long", 1 << 17, 1.0)
    assert holds(pool, "short", 3, 5.0)
    pool.gather(["short", "long"])
    assert resident_bytes() - before < 16 << 20
    assert holds(pool, "long", 1 << 17, 1.0)
    assert holds(pool, "short", 3, 5.0)


def test_a_shard_without_heads_has_a_pool_without_memory() -> None:
    pool = KVPool(layers=[(0, 8)] * 2, slots=3, context_tokens=50)
    assert pool.open("a") == 0
    pool.release("a")


def test_contents_survive_any_order_of_calls() -> None:
    """A table of requests, checked against the pool through random opens, gathers, releases."""
    pool, chance = make_pool(slots=6), random.Random(7)
    live: dict[str, tuple[int, float]] = {}
    for step in range(400):
        action = chance.choice(("open", "release", "gather"))
        if action == "open" and len(live) < 6:
            live[f"r{step}"] = (chance.randint(1, 50), float(step))
            write(pool, f"r{step}", *live[f"r{step}"])
        elif action == "release" and live:
            gone = chance.choice(sorted(live))
            pool.release(gone)
            del live[gone]
        elif live:
            chosen = chance.sample(sorted(live), chance.randint(1, len(live)))
            first = pool.gather(chosen)
            assert [pool.open(name) for name in chosen] == list(range(first, first + len(chosen)))
        assert all(holds(pool, name, *live[name]) for name in live)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statistics:  # noqa: PTH123 - a kernel file
        return int(statistics.read().split()[1]) * 4096


def test_arrays_are_float32_unless_told() -> None:
    keys, values = make_pool().layer(0, 0, 2)
    assert keys.dtype == values.dtype == np.float32
    assert keys.shape == (2, 3, 50, 8)


@pytest.mark.linux_ways
def test_a_token_takes_no_huge_page_for_each_head() -> None:
    """Whatever the system does unasked: what is promised of memory counts tokens."""
    pool = KVPool(layers=[(2, 64)] * 1, slots=4, context_tokens=1 << 14)
    address = pool.layer(0, 0, 1)[0].ctypes.data
    is_ours, flags = False, ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_ours = int(match[1], 16) <= address < int(match[2], 16)
        elif is_ours and line.startswith("VmFlags:"):
            flags = line
    assert " nh" in flags
