"""Blocks that are found again, and those that are not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from edge.offload import Pieces, PrefixPart, PrefixStore, StoreError

PART = PrefixPart.of(["x", "y"])
HEAD_BYTES = 44
INDEX_BYTES = len("48 x\n48 y\n")
BLOCK_BYTES = HEAD_BYTES + INDEX_BYTES + 16 + 2 * (48 + 16)
SECRET = b"s" * 32
LARGE = 1 << 30


def key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def block(seed: int) -> Pieces:
    random = np.random.default_rng(seed)
    wide = random.integers(256, size=(2, 5, 8), dtype=np.uint8)
    return {"x": wide[:, 1:4], "y": random.random((2, 3, 2)).astype(np.float32)}


def has(store: PrefixStore, name: str) -> bool:
    return bool(store.find(key(name), PART, SECRET))


def found(store: PrefixStore, name: str, secret: bytes = SECRET) -> Pieces | None:
    into: Pieces = {"x": np.zeros((2, 3, 8), np.uint8), "y": np.zeros((2, 3, 2), np.float32)}
    return into if store.read([PART.record(key(name))], into, secret) else None


def path_of(folder: Path, name: str) -> Path:
    return folder / PART.record(key(name))


def same(found: Pieces | None, seed: int) -> bool:
    assert found is not None
    return all(np.array_equal(found[name], each) for name, each in block(seed).items())


def test_a_block_is_found_again_also_after_a_restart(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path / "new" / "folder", 10 * BLOCK_BYTES)
    assert found(store, "a") is None
    assert not has(store, "a")
    assert store.put(key("a"), block(1), SECRET)
    for each in (store, PrefixStore(tmp_path / "new" / "folder", 10 * BLOCK_BYTES)):
        assert has(each, "a")
        assert each.used_bytes == BLOCK_BYTES
        assert same(found(each, "a"), 1)


@pytest.mark.parametrize("size", [0, HEAD_BYTES - 1])
def test_a_block_that_was_never_written_out_is_not_one(tmp_path: Path, size: int) -> None:
    """After a cut of power a file may have its name and nothing in it."""
    path_of(tmp_path, "a").write_bytes(bytes(size))
    Path(f"{path_of(tmp_path, 'b')}.abc").write_bytes(bytes(size))
    store = PrefixStore(tmp_path, 10 * BLOCK_BYTES, owner_limit_bytes=BLOCK_BYTES)
    assert not has(store, "a")
    assert not list(tmp_path.iterdir())
    assert store.put(key("a"), block(1), SECRET)
    assert same(found(store, "a"), 1)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 3 * BLOCK_BYTES)
    for seed, name in enumerate("abc"):
        assert store.put(key(name), block(seed), SECRET)
    store.use([PART.record(key("a")), PART.record(key("?")), PART.record(key("b"))])
    assert store.put(key("d"), block(4), SECRET)
    assert [has(store, name) for name in "abcd"] == [True, True, False, True]
    assert len(list(tmp_path.iterdir())) == 3
    less = PrefixStore(tmp_path, 2 * BLOCK_BYTES)
    assert [has(less, name) for name in "abd"] == [True, False, True], "the first stays"
    store = PrefixStore(tmp_path, 3 * BLOCK_BYTES)
    store.make_room(2 * BLOCK_BYTES)
    assert [has(store, name) for name in "abd"] == [False, False, True]
    assert not PrefixStore(tmp_path / "other", BLOCK_BYTES - 1).put(key("a"), block(1), SECRET)
    store.make_room(-2 * BLOCK_BYTES)
    assert store.put(key("a"), block(1), SECRET)


def test_uses_in_one_moment_are_told_apart_after_a_restart(tmp_path: Path) -> None:
    """The clock that the system gives files stands still for milliseconds."""
    store = PrefixStore(tmp_path, 20 * BLOCK_BYTES)
    names = sorted((str(number) for number in range(20)), key=key)
    for name in names:
        assert store.put(key(name), block(1), SECRET)
    store.use([PART.record(key(name)) for name in names])
    less = PrefixStore(tmp_path, 10 * BLOCK_BYTES)
    assert [name for name in names if has(less, name)] == names[:10]


def test_what_costs_more_to_compute_again_stays_longer(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 3 * BLOCK_BYTES)
    for name, cost in (("a", 9.0), ("b", 1.0), ("c", 1.0)):
        assert store.put(key(name), block(1), SECRET, cost=cost)
    assert store.put(key("d"), block(1), SECRET, cost=1.0)
    assert [has(store, name) for name in "abcd"] == [True, False, True, True]
    store.use([PART.record(key("c"))], cost=9.0)
    assert store.put(key("e"), block(1), SECRET, cost=1.0)
    assert [has(store, name) for name in "acde"] == [True, True, False, True]


def test_the_least_recently_used_give_way_on_a_full_disk(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 10 * BLOCK_BYTES)
    for seed, name in enumerate("abc"):
        assert store.put(key(name), block(seed), SECRET)
    assert store.give_way(BLOCK_BYTES + 1)
    assert [has(store, name) for name in "abc"] == [False, False, True]
    assert store.give_way(LARGE)
    assert not store.give_way(1)
    assert store.used_bytes == 0


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 10 * BLOCK_BYTES)
    store.put(key("a"), block(1), SECRET)
    path = path_of(tmp_path, "a")
    assert path.stat().st_mode & 0o077 == 0
    content = path.read_bytes()
    assert not any(part.tobytes() in content for part in block(1).values())
    store.put(key("b"), block(1), SECRET)
    assert (
        path_of(tmp_path, "b").read_bytes()[HEAD_BYTES:] != content[HEAD_BYTES:]
    )  # equal blocks do not look equal
    assert found(store, "a", b"t" * 32) is None
    assert not path.exists()


def test_a_large_block_is_sealed_in_parts(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, LARGE)
    large: dict[str, np.ndarray] = {
        "x": np.arange(700_000, dtype=np.float32),
        "empty": np.zeros((0, 3)),
        "y": np.ones(5, np.int8),
    }
    part = PrefixPart.of(tuple(large))
    assert store.put(key("a"), large, SECRET)
    path = tmp_path / part.record(key("a"))
    begin = HEAD_BYTES + len("2800000 x\n0 empty\n5 y\n") + 16
    assert store.used_bytes == path.stat().st_size == begin + 2_800_005 + 4 * 16
    into = {name: np.zeros_like(each) for name, each in large.items()}
    assert store.read([path.name], into, SECRET)
    assert all(np.array_equal(into[name], each) for name, each in large.items())
    # Parts do not change places.
    content, sealed = path.read_bytes(), (1 << 20) + 16
    first, second = content[begin : begin + sealed], content[begin + sealed :]
    path.write_bytes(content[:begin] + second[:sealed] + first + second[sealed:])
    assert not store.read([path.name], into, SECRET)


def test_pieces_of_several_records_make_up_others(tmp_path: Path) -> None:
    """Also after a restart, when their names must be read; by a secret, each piece once."""
    pieces = {name: np.full(3, number, np.int16) for number, name in enumerate("abcd")}
    store = PrefixStore(tmp_path, LARGE)
    for names in ("ab", "cd", "bc"):
        assert store.put(key("k"), {name: pieces[name] for name in names}, SECRET)
    for each in (store, PrefixStore(tmp_path, LARGE)):
        for wanted in ("a", "c", "bcd", "dcba"):
            ids = each.find(key("k"), PrefixPart.of(wanted), SECRET)
            into = {name: np.zeros((3, 2), np.int16)[:, 0] for name in wanted}
            assert each.read(ids, into, SECRET)
            assert all(np.array_equal(into[name], pieces[name]) for name in wanted)
        assert not each.find(key("k"), PrefixPart.of("abe"), SECRET)
        assert not each.find(key("l"), PrefixPart.of("ab"), SECRET)
    wrong = PrefixStore(tmp_path, LARGE)
    assert not wrong.find(key("k"), PrefixPart.of("a"), b"t" * 32)
    assert wrong.used_bytes == 0, "it cannot be read"


def test_a_piece_of_another_size_is_not_taken(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, LARGE)
    store.put(key("a"), block(1), SECRET)
    into = {"x": np.zeros(47, np.uint8)}
    assert not store.read([PART.record(key("a"))], into, SECRET)
    assert store.used_bytes == 0


def test_files_of_an_earlier_form_go(tmp_path: Path) -> None:
    for name in (key("a"), f"{key('b')}.{'c' * 32}"):
        (tmp_path / name).write_bytes(b"edge-kv2")
    assert PrefixStore(tmp_path, LARGE).used_bytes == 0
    assert not list(tmp_path.iterdir())


def test_what_is_too_large_throws_nothing_away(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 3 * BLOCK_BYTES)
    store.put(key("a"), block(1), SECRET)
    assert not store.put(key("b"), {"x": np.zeros(4 * BLOCK_BYTES)}, SECRET)
    assert same(found(store, "a"), 1)


@pytest.mark.parametrize("damage", ["changed", "cut", "longer", "empty", "gone"])
def test_what_is_damaged_counts_as_not_there(tmp_path: Path, damage: str) -> None:
    store = PrefixStore(tmp_path, 10 * BLOCK_BYTES)
    store.put(key("a"), block(1), SECRET)
    path = path_of(tmp_path, "a")
    content = path.read_bytes()
    changed = bytes([content[60] ^ 1])
    wrong = {
        "changed": content[:60] + changed + content[61:],
        "cut": content[:-1],
        "longer": content + b"?",
        "empty": b"",
    }
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(wrong[damage])
    assert found(store, "a") is None
    assert list(tmp_path.iterdir()) == []
    assert store.put(key("a"), block(1), SECRET)
    assert same(found(store, "a"), 1)


def test_files_of_others_stay_and_drafts_go(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"0" * 1000)
    (tmp_path / ".draft-5").write_bytes(b"half")
    store = PrefixStore(tmp_path, BLOCK_BYTES)
    store.put(key("a"), block(1), SECRET)
    store.put(key("b"), block(2), SECRET)
    assert {path.name for path in tmp_path.iterdir()} == {
        "holiday.jpg",
        path_of(tmp_path, "b").name,
    }


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be kept in"):
        PrefixStore(tmp_path / "file" / "prefixes", 1)


def test_each_owner_has_a_part_of_the_room(tmp_path: Path) -> None:
    """Its own oldest go, and no one else's; also after a restart."""
    one, other = "a" * 32, "b" * 32
    part_bytes = 2 * BLOCK_BYTES
    store = PrefixStore(tmp_path, LARGE, owner_limit_bytes=part_bytes)
    owners = {"a": one, "b": other, "c": one, "d": one, "e": "", "f": "", "g": ""}
    for seed, (name, owner) in enumerate(owners.items()):
        assert store.put(key(name), block(seed), SECRET, owner)
    left = [name for name in owners if name != "a"]
    for each in (store, PrefixStore(tmp_path, LARGE, owner_limit_bytes=part_bytes)):
        assert [name for name in owners if has(each, name)] == left
        assert each.used_bytes == len(left) * BLOCK_BYTES
        assert same(found(each, "c"), 2)
        each.use([PART.record(key("c"))])
    less = PrefixStore(tmp_path, LARGE, owner_limit_bytes=BLOCK_BYTES)
    assert [name for name in owners if has(less, name)] == [n for n in left if n != "d"]
    assert not PrefixStore(tmp_path / "small", LARGE, owner_limit_bytes=BLOCK_BYTES - 1).put(
        key("a"), block(1), SECRET, one
    )


def test_a_block_that_another_keeps_again_is_its_own(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, LARGE, owner_limit_bytes=BLOCK_BYTES)
    for owner in ("a" * 32, "b" * 32, ""):
        assert store.put(key("a"), block(1), SECRET, owner)
        assert len(list(tmp_path.iterdir())) == 1
        assert store.used_bytes == BLOCK_BYTES
        assert same(found(store, "a"), 1)


def test_a_file_of_another_name_is_left_alone(tmp_path: Path) -> None:
    strange = [
        tmp_path / f"{PART.record(key('a'))}.{end}"
        for end in ("", "../x".replace("/", ""), "G", "tmp")
    ]
    for path in strange:
        path.write_bytes(b"x")
    assert PrefixStore(tmp_path, 0).used_bytes == 0
    assert all(path.exists() for path in strange)
