"""What every tier for keys and values promises, in memory and on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.offload import (
    DiskKVTier,
    KVLayer,
    KVShape,
    KVTier,
    KVTiers,
    MemoryKVTier,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)
from tests.support.small_disk import fill, small_disk

SHAPE = KVShape(layers=(KVLayer(num_kv_heads=2, row_bytes=20),) * 3, context_tokens=40)
LARGE = 1 << 30

Make = Callable[[int], KVTier]


@pytest.fixture(params=["memory", "disk", "both"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[KVTier] = []

    def start(limit_bytes: int) -> KVTier:
        if request.param == "memory":
            made.append(MemoryKVTier(limit_bytes))
        elif request.param == "both":
            made.append(KVTiers(MemoryKVTier(700), DiskKVTier(tmp_path, limit_bytes)))
        else:
            made.append(DiskKVTier(tmp_path, limit_bytes))
        return made[-1]

    yield start
    for tier in made:
        tier.close()
    assert list(tmp_path.iterdir()) == []


def rows(seed: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values as they lie in a pool: rows of a longer context."""
    random = np.random.default_rng(seed)
    keys = random.random((2, 50, 5), np.float32)[:, 3 : 3 + tokens]
    values = random.random((2, 50, 5), np.float32)[:, 7 : 7 + tokens]
    return keys, values


def read(tier: KVTier, request: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    place = tier.place(request, SHAPE)
    tokens = place.tokens(layer)
    pool = np.full((2, 2, 40, 5), -1.0, np.float32)
    place.read(layer, pool[0, :, :tokens], pool[1, :, :tokens])
    assert (pool[:, :, tokens:] == -1.0).all()
    return pool[0, :, :tokens], pool[1, :, :tokens]


@given(
    appends=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 9)), max_size=20
    )
)
@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_what_was_appended_is_read(make: Make, appends: list[tuple[str, int, int]]) -> None:
    tier = make(LARGE)
    expected: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
    for seed, (request, layer, tokens) in enumerate(appends):
        known = expected.get((request, layer), rows(0, 0))
        tokens = min(tokens, 40 - known[0].shape[1])
        keys, values = rows(seed, tokens)
        tier.place(request, SHAPE).append(layer, keys, values)
        expected[request, layer] = (
            np.concatenate([known[0], keys], axis=1),
            np.concatenate([known[1], values], axis=1),
        )
    for (request, layer), pair in expected.items():
        for found, wanted in zip(read(tier, request, layer), pair, strict=True):
            assert np.array_equal(found, wanted)
    tokens = sum(keys.shape[1] for keys, _values in expected.values())
    assert tier.used_bytes == tokens * SHAPE.token_bytes // SHAPE.num_layers
    tier.close()
    assert tier.used_bytes == 0


def test_who_is_dropped_begins_anew(make: Make) -> None:
    tier = make(LARGE)
    tier.place("a", SHAPE).append(0, *rows(1, 5))
    tier.drop("a")
    tier.drop("unknown")
    assert tier.used_bytes == 0
    assert tier.place("a", SHAPE).tokens(0) == 0


def test_a_full_tier_keeps_what_it_has(make: Make) -> None:
    tier = make(100 * 10)
    place = tier.place("a", SHAPE)
    place.append(1, *rows(1, 10))
    with pytest.raises(StoreFullError, match="exceed the limit of 1,000 bytes by 600"):
        place.append(1, *rows(2, 10))
    assert place.tokens(1) == 10
    assert np.array_equal(read(tier, "a", 1)[0], rows(1, 10)[0])
    tier.drop("a")
    tier.place("b", SHAPE).append(0, *rows(2, 12))


def test_room_that_was_reserved_is_found(make: Make) -> None:
    tier = make(SHAPE.token_bytes * 12)
    place, other = tier.place("a", SHAPE), tier.place("b", SHAPE)
    place.append(1, *rows(1, 4))
    place.reserve(9)
    place.reserve(7)
    assert (tier.used_bytes, tier.written_bytes) == (
        9 * SHAPE.token_bytes,
        4 * SHAPE.token_bytes // SHAPE.num_layers,
    )
    with pytest.raises(StoreFullError, match="do not fit"):
        other.append(0, *rows(2, 10))
    with pytest.raises(StoreFullError, match="do not fit"):
        place.reserve(13)
    assert tier.used_bytes == 9 * SHAPE.token_bytes
    for layer in range(SHAPE.num_layers):
        place.append(layer, *rows(layer, 9 - place.tokens(layer)))
    assert tier.used_bytes == tier.written_bytes == 9 * SHAPE.token_bytes
    assert all(map(np.array_equal, read(tier, "a", 2), rows(2, 9)))
    place.append(2, *rows(5, 1))
    tier.drop("a")
    assert tier.used_bytes == 0


def test_reading_less_than_there_is(make: Make) -> None:
    tier = make(LARGE)
    place = tier.place("a", SHAPE)
    place.append(0, *rows(1, 10))
    keys, values = rows(2, 9)
    with pytest.raises(ValueError, match="10 tokens are kept, not 9 and 9"):
        place.read(0, keys, values)


def nameless_files() -> list[Path]:
    """Open files of this process that have no name any more."""
    links = list(Path("/proc/self/fd").iterdir())
    return [link for link in links if link.exists() and "deleted" in str(link.readlink())]


def test_a_file_that_was_damaged_is_noticed(tmp_path: Path) -> None:
    before = set(nameless_files())
    tier = DiskKVTier(tmp_path, LARGE)
    tier.place("a", SHAPE).append(2, *rows(1, 10))
    (file,) = set(nameless_files()) - before
    with file.open("r+b", buffering=0) as opened:
        opened.seek(-200, os.SEEK_END)
        opened.write(b"?")
    with pytest.raises(StoreCorruptError, match="other keys and values than were written"):
        read(tier, "a", 2)
    with file.open("r+b", buffering=0) as opened:
        opened.truncate(100)
    with pytest.raises(StoreCorruptError, match="is truncated"):
        read(tier, "a", 2)
    tier.close()


def test_nothing_of_what_is_kept_can_be_read_on_the_disk(tmp_path: Path) -> None:
    """Not the same where the same is kept, either: in its place, or in another request's."""
    before = set(nameless_files())
    tier = DiskKVTier(tmp_path, LARGE)
    shape = KVShape(layers=(KVLayer(num_kv_heads=2, row_bytes=20_000),), context_tokens=40)
    secret = np.full((2, 15, 20_000), 7, np.uint8)
    for request in "ab":
        for _ in range(2):
            tier.place(request, shape).append(0, secret, secret)
    kept = [file.read_bytes() for file in set(nameless_files()) - before]
    found = {content[at : at + 64] for content in kept for at in range(0, len(content), 20_000)}
    assert len(kept) == 2
    assert len(found) > 2 * 4 * 25, "each piece is another one"
    assert not any(bytes([7]) * 8 in content for content in kept)
    keys = np.empty((2, 30, 20_000), np.uint8)
    values = np.empty_like(keys)
    for request in "ab":
        tier.place(request, shape).read(0, keys, values)
        assert np.all(keys == 7)
        assert np.all(values == 7)
    tier.close()


def test_of_two_tiers_the_first_is_filled_first(tmp_path: Path) -> None:
    """A request of which not all fits moves on as a whole; if it cannot, it stays."""
    memory, disk = MemoryKVTier(1000), DiskKVTier(tmp_path, 1500)
    tier = KVTiers(memory, disk)
    tier.place("a", SHAPE).append(0, *rows(1, 5))
    tier.place("b", SHAPE).append(0, *rows(2, 5))
    assert (memory.used_bytes, disk.used_bytes) == (800, 0)
    tier.place("b", SHAPE).append(1, *rows(3, 10))
    assert (memory.used_bytes, disk.used_bytes) == (400, 1200)
    assert all(map(np.array_equal, read(tier, "b", 0), rows(2, 5)))
    assert tier.written_bytes == 1600, "a move is not written by anybody"
    with pytest.raises(StoreFullError):
        tier.place("a", SHAPE).append(1, *rows(4, 10))
    assert (memory.used_bytes, disk.used_bytes) == (400, 1200)
    assert all(map(np.array_equal, read(tier, "a", 0), rows(1, 5)))
    tier.drop("b")
    tier.place("a", SHAPE).append(1, *rows(4, 10))
    assert (memory.used_bytes, disk.used_bytes) == (0, 1200)
    tier.close()


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """No file may grow past what the system allows this process: the write fails as on a disk."""
    import resource
    import signal

    tier = DiskKVTier(tmp_path, LARGE)
    place = tier.place("a", SHAPE)
    place.append(0, *rows(1, 4))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(
            StoreFullError, match="is full: no room for 320 bytes of keys and values"
        ):
            place.append(2, *rows(1, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (place.tokens(0), place.tokens(2)) == (4, 0)
    assert tier.used_bytes == 4 * SHAPE.token_bytes // SHAPE.num_layers
    place.append(2, *rows(1, 4))
    tier.close()


@pytest.mark.linux_ways
def test_a_disk_without_the_room_that_is_to_be_reserved(tmp_path: Path) -> None:
    """What is reserved is there when somebody else has filled the disk."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        tier = DiskKVTier(disk, LARGE)
        place, late = tier.place("a", SHAPE), tier.place("b", SHAPE)
        place.append(0, *rows(1, 4))
        place.reserve(20)
        filler = fill(disk)
        for layer in range(SHAPE.num_layers):
            place.append(layer, *rows(layer, 20 - place.tokens(layer)))
        with pytest.raises(StoreFullError, match=f"{disk} is full: no room for 4,800 bytes of"):
            late.reserve(20)
        assert tier.used_bytes == 20 * SHAPE.token_bytes
        filler.unlink()
        late.reserve(20)
        assert all(map(np.array_equal, read(tier, "a", 1), rows(1, 20)))
        tier.close()


def test_a_full_disk_on_which_room_is_made(tmp_path: Path) -> None:
    """As before, but whoever is asked to make room does."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    asked: list[int] = []

    def make_room(num_bytes: int) -> bool:
        asked.append(num_bytes)
        if len(asked) == 2:
            return False
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        return True

    tier = DiskKVTier(tmp_path, LARGE, on_full=make_room)
    place = tier.place("a", SHAPE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        place.append(1, *rows(1, 4))
        place.append(2, *rows(2, 4))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
        with pytest.raises(StoreFullError):
            place.append(0, *rows(3, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert asked == [4 * SHAPE.token_bytes // SHAPE.num_layers] * 2
    assert all(map(np.array_equal, read(tier, "a", 2), rows(2, 4)))
    assert [place.tokens(layer) for layer in range(3)] == [0, 4, 4]
    assert tier.used_bytes == 8 * SHAPE.token_bytes // SHAPE.num_layers
    tier.close()
    assert tier.used_bytes == 0


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot be kept in .*file/kv"):
        DiskKVTier(tmp_path / "file" / "kv", LARGE)
