"""Blocks in memory that is nobody's: what stays, what goes, and that its memory goes with it."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from edge.host.free_memory import process_memory
from edge.offload import Pieces, PrefixMemory, PrefixPart

PAGE = mmap.PAGESIZE
PART = PrefixPart.of(["x", "y", "z"])


def block(seed: int) -> Pieces:
    """Of less than a page; one array is a view, one is of no size."""
    random = np.random.default_rng(seed)
    wide = random.integers(256, size=(2, 5, 8), dtype=np.uint8)
    return {
        "x": wide[:, 1:4],
        "y": random.random((2, 3, 2)).astype(np.float32),
        "z": np.zeros((0, 3)),
    }


def found(memory: PrefixMemory, key: str) -> Pieces | None:
    copies = {name: np.zeros_like(each) for name, each in block(0).items()}
    return copies if memory.read(memory.find(key, PART), copies) else None


def used(memory: PrefixMemory, *keys: str, cost: float = 0.0) -> None:
    memory.use([PART.record(key) for key in keys], cost)


def filled(names: str, pages: int, *, owners: dict[str, str] | None = None) -> PrefixMemory:
    memory = PrefixMemory()
    memory.limit(pages * PAGE)
    for seed, name in enumerate(names):
        assert memory.put(name, block(seed), owner=(owners or {}).get(name, ""))
    return memory


def left(memory: PrefixMemory, names: str = "abcdef") -> str:
    return "".join(name for name in names if memory.find(name, PART))


def test_a_copy_is_found_again() -> None:
    arrays = block(1)
    memory = filled("", 10)
    assert found(memory, "a") is None
    assert memory.put("a", arrays)
    for each in arrays.values():
        each[...] = 0
    copies = found(memory, "a")
    assert copies is not None
    for name, array in block(1).items():
        np.testing.assert_array_equal(copies[name], array)
    assert memory.used_bytes == PAGE


def test_without_room_nothing_is_kept() -> None:
    assert not PrefixMemory().put("a", block(1))
    memory = filled("ab", 2)
    assert not memory.put("c", {"x": np.zeros(3 * PAGE)})
    assert left(memory) == "ab"
    assert memory.most_blocks(block(1)) == 2
    assert memory.most_blocks({"x": np.zeros(3 * PAGE)}) == 0


def test_the_least_recently_used_go_first() -> None:
    memory = filled("abc", 3)
    used(memory, "a", "?", "b")
    assert memory.put("d", block(4))
    assert left(memory) == "abd"
    memory.limit(2 * PAGE)
    assert left(memory) == "ad", "of those that were used together, the first stays"
    memory.limit(PAGE)
    assert left(memory) == "d"
    memory.limit(0)
    assert memory.used_bytes == 0


def test_what_costs_more_to_compute_again_stays_longer() -> None:
    memory = filled("", 3)
    for name, cost in (("a", 9.0), ("b", 1.0), ("c", 1.0)):
        assert memory.put(name, block(1), cost=cost)
    assert memory.put("d", block(1), cost=1.0)
    assert left(memory) == "acd"
    used(memory, "c", cost=9.0)
    assert memory.put("e", block(1), cost=1.0)
    assert left(memory) == "ace"
    memory.limit_owner("", PAGE)
    assert left(memory) == "c", "it was used after a"


def test_what_a_dear_end_needs_before_it_is_as_dear() -> None:
    memory = filled("xyz", 3)
    used(memory, "x", "y", cost=9.0)
    for name in "ab":
        assert memory.put(name, block(1), cost=1.0)
    assert left(memory, "abxyz") == "bxy"
    for name in "cdefghij":
        assert memory.put(name, block(1), cost=1.0)
    assert left(memory, "xy") == "x", "the end goes first"


def test_there_are_no_more_than_so_many() -> None:
    memory = PrefixMemory(most_blocks=2)
    memory.limit(10 * PAGE)
    for name in "abc":
        assert memory.put(name, block(1))
    assert left(memory) == "bc"
    assert memory.most_blocks(block(1)) == 2


def test_each_owner_has_a_part() -> None:
    """Its own oldest go, and no one else's."""
    memory = filled("abcd", 10, owners={"a": "x", "b": "y", "c": "x"})
    memory.limit_owner("x", PAGE)
    assert left(memory) == "bcd"
    assert memory.put("e", block(5), owner="x")
    assert left(memory) == "bde"
    assert memory.most_blocks(block(1), "x") == 1
    memory.limit_owner("x", 0)
    assert left(memory) == "bd"
    assert not memory.put("f", block(6), owner="x")


def test_a_block_that_another_keeps_again_is_its_own() -> None:
    memory = filled("a", 10, owners={"a": "x"})
    assert memory.put("a", block(0), owner="y")
    assert memory.used_bytes == PAGE
    memory.limit_owner("x", 0)
    assert left(memory) == "a"


@pytest.mark.parametrize("how", ["limit", "owner", "another"])
def test_what_goes_gives_its_memory_back_at_once(how: str) -> None:
    memory = PrefixMemory()
    memory.limit(33 << 20)
    large = {"x": np.ones(8 << 20, np.uint8)}
    before_bytes = process_memory()["resident_bytes"]
    for name in "abcd":
        assert memory.put(name, large, owner="x")
    assert process_memory()["resident_bytes"] - before_bytes > 30 << 20
    if how == "limit":
        memory.limit(0)
    elif how == "owner":
        memory.limit_owner("x", 0)
    else:
        assert memory.put(
            "e", {"x": np.zeros(32 << 20, np.uint8)[:0], "y": np.ones(1), "z": np.ones(1)}
        )
        memory.limit(PAGE)
        assert left(memory) == "e"
    assert process_memory()["resident_bytes"] - before_bytes < 4 << 20
