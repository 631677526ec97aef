"""The shard cache on real files: found again, resumed, shared, evicted."""

import os
import shutil
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from edge.offload import (
    PIECE_BYTES,
    CachedShard,
    FolderCache,
    ShardCache,
    ShardWriter,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)
from edge.offload.cache.verified_shard import mark_intact
from tests.support.shards import (
    LIMIT,
    Content,
    check,
    content,
    describe,
    fill,
    missing,
    pieces_of,
    shards_in,
    size,
    start,
)


def test_a_shard_is_found_again_by_its_manifest(tmp_path: Path) -> None:
    a = content(1) | {"long": np.random.default_rng(5).bytes(PIECE_BYTES + 99), "empty": b""}
    cache = ShardCache(tmp_path, LIMIT)
    assert cache.get(describe(a).digest) is None
    check(fill(cache, a), a)
    check(cache.get(describe(a).digest), a)
    check(ShardCache(tmp_path, LIMIT).get(describe(a).digest, verify=True), a)
    again = cache.begin(describe(a))
    assert isinstance(again, CachedShard)
    check(again, a)
    assert cache.get(describe(content(2)).digest) is None


def test_a_new_cache_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ShardCache(tmp_path / "caches" / "shards", LIMIT)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "caches" / "shards").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_where_others_may_write_all_bytes_are_hashed_whatever_the_mark_says(
    tmp_path: Path, mode: int
) -> None:
    a, cache = content(1), ShardCache(tmp_path, LIMIT)
    digest = describe(a).digest
    check(fill(cache, a), a)
    tmp_path.chmod(mode)
    check(cache.get(digest), a)
    weights = tmp_path / digest / "weights"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    mark_intact(tmp_path / digest)
    assert cache.get(digest) is None
    assert not weights.exists()


def test_a_shard_without_bytes(tmp_path: Path) -> None:
    check(fill(ShardCache(tmp_path, LIMIT), {"empty": b""}), {"empty": b""})


@pytest.mark.parametrize("bad", [b"", b"x" * 5000, b"x" * 4999, b"x" * 5001])
def test_bytes_that_are_not_the_piece_are_refused(tmp_path: Path, bad: bytes) -> None:
    a = content(1)
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        before = writer.missing
        with pytest.raises(StoreCorruptError, match="ask for it again"):
            writer.put(before[0], bad)
        with pytest.raises(StoreCorruptError, match="does not belong"):
            writer.put("0" * 64, bad)
        assert writer.missing == before
        assert not any((tmp_path / describe(a).digest / "weights.partial").read_bytes())
        with pytest.raises(ValueError, match="6 pieces"):
            writer.finish()


def test_any_buffer_is_a_piece(tmp_path: Path) -> None:
    a = content(1, count=2)
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        first, second = writer.missing
        writer.put(first, bytearray(pieces_of(a)[first]))
        writer.put(second, memoryview(pieces_of(a)[second]).cast("h"))
        check(writer.finish(), a)


def test_equal_pieces_are_asked_for_once_and_lie_everywhere(tmp_path: Path) -> None:
    a = {"a": b"same" * 99, "b": b"other", "c": b"same" * 99}
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        assert len(writer.missing) == 2
    check(fill(ShardCache(tmp_path, LIMIT), a), a)


def test_pieces_of_other_shards_are_copied(tmp_path: Path) -> None:
    a, new = content(1), content(2, count=2)
    b = {"moved": a["t3"], **new, "too": a["t1"]}
    cache = ShardCache(tmp_path, LIMIT)
    check(fill(cache, a), a)
    assert missing(cache, b) == set(pieces_of(new))
    check(fill(cache, b), b)


def test_damaged_pieces_of_other_shards_are_not(tmp_path: Path) -> None:
    a = content(1)
    b = {"moved": a["t3"], "too": a["t0"]}
    cache = ShardCache(tmp_path, LIMIT)
    check(fill(cache, a), a)
    with (tmp_path / describe(a).digest / "weights").open("r+b") as file:
        file.write(b"damage")
    assert missing(cache, b) == set(pieces_of({"too": a["t0"]}))


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    a, b, c = content(1), content(2), content(3)
    cache = ShardCache(tmp_path, int(2.5 * size(a)))
    check(fill(cache, a), a)
    check(fill(cache, b), b)
    age(tmp_path, a, 2)
    age(tmp_path, b, 1)
    check(cache.get(describe(a).digest), a)
    check(fill(cache, c), c)
    assert cache.get(describe(b).digest) is None
    check(cache.get(describe(a).digest), a)
    assert sorted(FolderCache(tmp_path, 0).folders()) == sorted(
        [describe(a).digest, describe(c).digest]
    )


def age(root: Path, tensors: Content, hours: int) -> None:
    """Last used that long ago."""
    lock = root / describe(tensors).digest / ".lock"
    then = lock.stat().st_mtime - 3600 * hours
    os.utime(lock, (then, then))


def test_a_loaded_shard_is_never_evicted(tmp_path: Path) -> None:
    a, b, c = content(1), content(2), content(3)
    cache = ShardCache(tmp_path, 2 * size(a))
    with fill(cache, a), start(cache, b) as writer:
        writer.put(*next(iter(pieces_of(b).items())))
        with pytest.raises(StoreFullError, match="raise the limit") as full:
            cache.begin(describe(c))
        assert full.value.bytes_missing == size(c)
        with fill(ShardCache(tmp_path, 1 << 30), c):
            pass  # room enough for all three with another limit
        assert shards_in(tmp_path) == 3
    check(cache.get(describe(a).digest), a)
    check(fill(cache, content(4)), content(4))
    assert shards_in(tmp_path) == 2


def test_nothing_is_evicted_for_a_shard_that_cannot_fit(tmp_path: Path) -> None:
    a, big = content(1), content(2, count=60)
    cache = ShardCache(tmp_path, 2 * size(a))
    check(fill(cache, a), a)
    with pytest.raises(StoreFullError, match="do not fit") as full:
        cache.begin(describe(big))
    assert full.value.bytes_missing == size(big) - 2 * size(a)
    check(cache.get(describe(a).digest), a)


def test_nothing_is_evicted_for_a_shard_of_which_nothing_comes(tmp_path: Path) -> None:
    """And nobody else's room is taken for it, nor anything left of it."""
    a, b, c = content(1), content(2), content(3)
    cache = ShardCache(tmp_path, 2 * size(a))
    check(fill(cache, a), a)
    check(fill(cache, b), b)
    with start(cache, c) as writer:
        assert shards_in(tmp_path) == 3
        check(cache.get(describe(a).digest), a)
        check(cache.get(describe(b).digest), b)
        age(tmp_path, a, 1)
        check(fill(cache, content(4)), content(4))  # in the place of another
        check(cache.get(describe(b).digest), b)
        assert cache.get(describe(a).digest) is None
        age(tmp_path, b, 1)
        writer.put(*next(iter(pieces_of(c).items())))
        assert cache.get(describe(b).digest) is None
    with start(cache, content(5)):
        pass
    assert not (tmp_path / describe(content(5)).digest).exists()
    assert (tmp_path / describe(c).digest).exists()  # a piece of it came


def test_room_is_made_for_every_place_of_a_piece_before_it_is_written(tmp_path: Path) -> None:
    a = {f"t{number}": bytes(PIECE_BYTES) for number in range(20)}
    cache = ShardCache(tmp_path, size(a))
    with start(cache, a) as writer, start(cache, content(1)) as other:
        other.put(*next(iter(pieces_of(content(1)).items())))
        with pytest.raises(StoreFullError, match="raise the limit"):
            writer.put(*next(iter(pieces_of(a).items())))
        partial = tmp_path / describe(a).digest / "weights.partial"
        assert partial.stat().st_blocks == 0


def test_shards_that_have_wanted_pieces_go_last(tmp_path: Path) -> None:
    a, b = content(1), content(2)
    c = {"new": bytes(5000), **{name: a[name] for name in ("t0", "t1", "t2")}}
    cache = ShardCache(tmp_path, int(2.5 * size(a)))
    check(fill(cache, a), a)
    check(fill(cache, b), b)
    age(tmp_path, a, 5)
    assert missing(cache, c) == set(pieces_of({"new": bytes(5000)}))
    assert cache.get(describe(b).digest) is None


def test_who_copies_holds_no_more_shards_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = content(1)
    olds = [same | {"own": bytes([number]) * 5000} for number in range(3)]
    cache = ShardCache(tmp_path, 5 * size(olds[0]))
    for old in olds:
        check(fill(cache, old), old)
    for number, old in enumerate(olds):
        age(tmp_path, old, 9 - number)
    copy_from, held = ShardWriter.copy_from, []

    def copy_while_another_begins(
        writer: ShardWriter, source: CachedShard, *, keep: list[str]
    ) -> None:
        monkeypatch.setattr(ShardWriter, "copy_from", copy_from)
        held.append(source.manifest)
        big = content(2, count=3 * len(same))
        check(fill(ShardCache(tmp_path, 5 * size(olds[0])), big), big)
        copy_from(writer, source, keep=keep)

    monkeypatch.setattr(ShardWriter, "copy_from", copy_while_another_begins)
    new = same | {"own": b"n" * 5000}
    check(fill(cache, new), new)
    assert held == [describe(olds[-1])]
    assert cache.get(describe(olds[0]).digest) is None


@pytest.mark.parametrize("digest", ["", "../x", "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_only_digests_name_folders(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ValueError, match="not the digest"):
        ShardCache(tmp_path, LIMIT).get(digest)


def test_a_root_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        ShardCache(tmp_path / "file", LIMIT)


def test_a_root_that_is_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache" / "shards", LIMIT)
    a = content(1)
    check(fill(cache, a), a)
    shutil.rmtree(tmp_path / "cache")
    assert cache.get(describe(a).digest) is None
    check(fill(cache, a), a)


def test_a_root_that_fails_later_is_named_with_a_remedy(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "shards", LIMIT)
    shutil.rmtree(tmp_path / "shards")
    (tmp_path / "shards").write_text("in the way")
    with pytest.raises(StoreError, match=r"shards cannot be used: .*; repair its permissions or"):
        start(cache, content(1))


def test_two_writers_of_one_shard_share_what_arrives(tmp_path: Path) -> None:
    a = content(1)
    pieces = pieces_of(a)
    cache = ShardCache(tmp_path, LIMIT)
    with start(cache, a) as one, start(ShardCache(tmp_path, LIMIT), a) as two:
        digests = one.missing
        one.put(digests[0], pieces[digests[0]])
        two.put(digests[1], pieces[digests[1]])
        assert one.missing == two.missing == digests[2:]
        for digest in digests[2:]:
            two.put(digest, pieces[digest])
        shard = two.finish()
        one.put(digests[3], pieces[digests[3]])
        check(one.finish(), a)
        check(shard, a)
    check(cache.get(describe(a).digest, verify=True), a)


def test_many_threads_put_into_one_writer(tmp_path: Path) -> None:
    a = content(1, count=64)
    pieces = list(pieces_of(a).items())
    with start(ShardCache(tmp_path, LIMIT), a) as writer:

        def put_all(first: int) -> None:
            for digest, data in pieces[first:] + pieces[:first]:
                writer.put(digest, data)

        threads = [threading.Thread(target=put_all, args=(16 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(writer.finish(), a)


def test_each_owner_keeps_so_much(tmp_path: Path) -> None:
    """Its own oldest go; those of others, and those in use, stay."""
    cache = ShardCache(tmp_path, LIMIT)
    contents = [content(number) for number in range(5)]
    limit = 2 * size(contents[0]) + size(contents[0]) // 2

    def begin(number: int, owner: str) -> CachedShard:
        writer = cache.begin(describe(contents[number]), owner=owner, owner_limit_bytes=limit)
        assert isinstance(writer, ShardWriter)
        with writer:
            for digest, piece in pieces_of(contents[number]).items():
                writer.put(digest, piece)
            return writer.finish()

    begin(0, "b").close()
    begin(1, "a").close()
    used = begin(2, "a")
    begin(3, "a").close()
    found = [cache.get(describe(each).digest) for each in contents]
    assert [each is not None for each in found] == [True, False, True, True, False]
    for each in found:
        if each is not None and each is not found[3]:
            each.close()
    # What is there already counts as whose it was first.
    again = cache.begin(describe(contents[0]), owner="a", owner_limit_bytes=1)
    assert isinstance(again, CachedShard)
    with pytest.raises(StoreFullError, match="more than one device may keep"):
        cache.begin(describe(contents[4]), owner="a", owner_limit_bytes=limit)
    for each in (used, again, found[3]):
        assert each is not None
        each.close()
