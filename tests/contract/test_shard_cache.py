"""The shard cache on real files: interrupted, shared, damaged, full."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from offload import (
    PIECE_BYTES,
    CachedShard,
    FolderCache,
    Manifest,
    ManifestBuilder,
    ShardCache,
    ShardWriter,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)

LIMIT = 1 << 40
REPOSITORY = Path(__file__).parents[2]  # the children import this module
Content = dict[str, bytes]


def content(seed: int, count: int = 6, nbytes: int = 5000) -> Content:
    random = np.random.default_rng(seed)
    return {f"t{i}": random.bytes(nbytes) for i in range(count)}


def describe(tensors: Content) -> Manifest:
    builder = ManifestBuilder()
    for name, data in tensors.items():
        builder.add(name, data)
    return builder.build()


def size(tensors: Content) -> int:
    """Bytes of the shard's folder."""
    return describe(tensors).total_bytes + len(describe(tensors).to_json())


def pieces_of(tensors: Content) -> dict[str, bytes]:
    pieces = {}
    for entry in describe(tensors).tensors:
        data = tensors[entry.name]
        for index, piece in enumerate(entry.pieces):
            pieces[piece.digest] = data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
    return pieces


def start(cache: ShardCache, tensors: Content) -> ShardWriter:
    writer = cache.begin(describe(tensors))
    assert isinstance(writer, ShardWriter)
    return writer


def fill(cache: ShardCache, tensors: Content) -> CachedShard:
    with start(cache, tensors) as writer:
        for digest in writer.missing:
            writer.put(digest, pieces_of(tensors)[digest])
        return writer.finish()


def check(shard: CachedShard | None, tensors: Content) -> None:
    """The file is exactly the tensors at their places, and zeros between them."""
    assert shard is not None
    expected = bytearray(describe(tensors).total_bytes)
    for entry in shard.manifest.tensors:
        expected[entry.offset : entry.offset + entry.nbytes] = tensors[entry.name]
    assert shard.path.read_bytes() == bytes(expected)
    assert shard.manifest == describe(tensors)
    shard.close()


def missing(cache: ShardCache, tensors: Content) -> set[str]:
    with start(cache, tensors) as writer:
        return set(writer.missing)


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
        writer.put(second, memoryview(np.frombuffer(pieces_of(a)[second], np.int16)))
        check(writer.finish(), a)


def test_equal_pieces_are_asked_for_once_and_lie_everywhere(tmp_path: Path) -> None:
    a = {"a": b"same" * 99, "b": b"other", "c": b"same" * 99}
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        assert len(writer.missing) == 2
    check(fill(ShardCache(tmp_path, LIMIT), a), a)


def test_an_interrupted_transfer_goes_on(tmp_path: Path) -> None:
    a = content(1)
    pieces = pieces_of(a)
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        kept = writer.missing[:4]
        for digest in kept:
            writer.put(digest, pieces[digest])
    assert ShardCache(tmp_path, LIMIT).get(describe(a).digest) is None
    assert missing(ShardCache(tmp_path, LIMIT), a) == set(pieces) - set(kept)
    check(fill(ShardCache(tmp_path, LIMIT), a), a)


def test_pieces_that_were_lost_after_they_were_noted_are_asked_for_again(tmp_path: Path) -> None:
    """A power cut may keep the journal and lose data that was never synced."""
    a = content(1)
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        for digest, data in pieces_of(a).items():
            writer.put(digest, data)
        offset, lost = next(iter(writer.manifest.placements()))
    with (tmp_path / describe(a).digest / "weights.partial").open("r+b") as file:
        file.seek(offset + 17)
        file.write(b"\0\0\0\0\0\0\0\0")
    assert missing(ShardCache(tmp_path, LIMIT), a) == {lost.digest}


def test_a_torn_journal_costs_no_more_than_its_torn_line(tmp_path: Path) -> None:
    a = content(1)
    first, second, third, *_ = pieces = pieces_of(a)
    journal = tmp_path / describe(a).digest / "journal"
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        writer.put(first, pieces[first])
        writer.put(second, pieces[second])
    journal.write_bytes(journal.read_bytes()[:-30])
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        assert set(writer.missing) == set(pieces) - {first}
        writer.put(third, pieces[third])
    assert missing(ShardCache(tmp_path, LIMIT), a) == set(pieces) - {first, third}
    journal.write_bytes(b"\xff\xfe nonsense\n\n" + b"0" * 64 + b"\n" + journal.read_bytes())
    assert missing(ShardCache(tmp_path, LIMIT), a) == set(pieces) - {first, third}


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
    with fill(cache, a), start(cache, b):
        with pytest.raises(StoreFullError, match="raise the limit") as full:
            cache.begin(describe(c))
        assert full.value.bytes_missing == size(c)
        with fill(ShardCache(tmp_path, 1 << 30), c):
            pass  # room enough for all three with another limit
        assert shards_in(tmp_path) == 3
    check(cache.get(describe(a).digest), a)
    check(fill(cache, content(4)), content(4))
    assert shards_in(tmp_path) == 2


def shards_in(root: Path) -> int:
    return len(FolderCache(root, 0).folders())


def test_nothing_is_evicted_for_a_shard_that_cannot_fit(tmp_path: Path) -> None:
    a, big = content(1), content(2, count=60)
    cache = ShardCache(tmp_path, 2 * size(a))
    check(fill(cache, a), a)
    with pytest.raises(StoreFullError, match="do not fit") as full:
        cache.begin(describe(big))
    assert full.value.bytes_missing == size(big) - 2 * size(a)
    check(cache.get(describe(a).digest), a)


def test_shards_that_have_wanted_pieces_go_last(tmp_path: Path) -> None:
    a, b = content(1), content(2)
    c = {"new": bytes(5000), **{name: a[name] for name in ("t0", "t1", "t2")}}
    cache = ShardCache(tmp_path, int(2.5 * size(a)))
    check(fill(cache, a), a)
    check(fill(cache, b), b)
    age(tmp_path, a, 5)
    assert missing(cache, c) == set(pieces_of({"new": bytes(5000)}))
    assert cache.get(describe(b).digest) is None


@pytest.mark.parametrize("size", [0, 100, 40_000])
def test_a_file_of_another_size_is_thrown_away(tmp_path: Path, size: int) -> None:
    a = content(1)
    cache = ShardCache(tmp_path, LIMIT)
    check(fill(cache, a), a)
    os.truncate(tmp_path / describe(a).digest / "weights", size)
    assert cache.get(describe(a).digest) is None
    assert shards_in(tmp_path) == 0
    check(fill(cache, a), a)


@pytest.mark.parametrize("text", [b"", b"{}", describe(content(9)).to_json().encode(), None])
def test_a_shard_with_another_manifest_is_thrown_away(tmp_path: Path, text: bytes | None) -> None:
    a = content(1)
    cache = ShardCache(tmp_path, LIMIT)
    check(fill(cache, a), a)
    path = tmp_path / describe(a).digest / "manifest.json"
    path.unlink() if text is None else path.write_bytes(text)
    assert missing(cache, a) == set(pieces_of(a))


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    a = content(1)
    cache = ShardCache(tmp_path, LIMIT)
    check(fill(cache, a), a)
    with (tmp_path / describe(a).digest / "weights").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([a["t5"][-1] ^ 1]))
    assert cache.get(describe(a).digest, verify=True) is None
    assert shards_in(tmp_path) == 0


@pytest.mark.parametrize("digest", ["", "../x", "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_only_digests_name_folders(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ValueError, match="not the digest"):
        ShardCache(tmp_path, LIMIT).get(digest)


def test_a_root_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        ShardCache(tmp_path / "file", LIMIT)


def test_what_dead_processes_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".trash-1").mkdir()
    (tmp_path / ".trash-1" / "weights").write_bytes(b"x")
    a = content(1)
    digest = describe(content(2)).digest
    (tmp_path / digest).mkdir()  # died before the folder had anything in it
    (tmp_path / digest / "weights.partial").write_bytes(bytes(30_000))
    cache = ShardCache(tmp_path, size(a))
    check(fill(cache, a), a)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [describe(a).digest]


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


def test_a_writer_whose_folder_was_removed_says_so(tmp_path: Path) -> None:
    a = content(1)
    with start(ShardCache(tmp_path, LIMIT), a) as writer:
        for digest, data in pieces_of(a).items():
            writer.put(digest, data)
        shutil.rmtree(tmp_path / describe(a).digest)
        with pytest.raises(StoreCorruptError, match="begin the shard again"):
            writer.finish()


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


CHILD = """
import os, signal, sys
from pathlib import Path
from offload import CachedShard, ShardCache
from tests.contract.test_shard_cache import content, describe, pieces_of

root, order, stop_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tensors = content(1, count=24)
pieces = pieces_of(tensors)
cache = ShardCache(root, 1 << 40)
writer = cache.begin(describe(tensors))
if isinstance(writer, CachedShard):
    writer.close()
    sys.exit(0)
real, written = os.pwrite, 0

def dying_pwrite(descriptor, data, offset):
    global written
    if written == stop_at:
        real(descriptor, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    written += 1
    return real(descriptor, data, offset)

os.pwrite = dying_pwrite
for digest in writer.missing[::order]:
    writer.put(digest, pieces[digest])
writer.finish().close()
"""


def child(root: Path, order: int, stop_at: int) -> "subprocess.Popen[bytes]":
    arguments = [str(root), str(order), str(stop_at)]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], cwd=REPOSITORY)


def test_a_process_killed_within_a_piece_keeps_the_pieces_before_it(tmp_path: Path) -> None:
    tensors = content(1, count=24)
    cache = ShardCache(tmp_path, LIMIT)
    for kept, order in ((5, 1), (12, -1)):
        with child(tmp_path, order, 5 if kept == 5 else 7) as process:
            assert process.wait() == -signal.SIGKILL
        assert cache.get(describe(tensors).digest) is None
        assert len(missing(cache, tensors)) == 24 - kept
    check(fill(cache, tensors), tensors)
    check(cache.get(describe(tensors).digest, verify=True), tensors)


def test_two_processes_write_one_shard_at_once(tmp_path: Path) -> None:
    with child(tmp_path, 1, -1) as one, child(tmp_path, -1, -1) as two:
        assert one.wait() == two.wait() == 0
    tensors = content(1, count=24)
    check(ShardCache(tmp_path, LIMIT).get(describe(tensors).digest, verify=True), tensors)


FULL_DISK = """
import sys
from pathlib import Path
from offload import ShardCache, StoreFullError
from tests.contract.test_shard_cache import check, content, describe, fill, pieces_of

root = Path(sys.argv[1])
tensors = content(1, count=40, nbytes=50_000)
pieces = pieces_of(tensors)
cache = ShardCache(root, 1 << 40)
try:
    cache.begin(describe(content(1, count=60, nbytes=500_000)))
except StoreFullError as error:
    assert "disk" in str(error) and error.bytes_missing > 20_000_000, error
else:
    raise SystemExit("a shard larger than the disk was begun")
writer = cache.begin(describe(tensors))
(root / "other").write_bytes(bytes(3_000_000))  # another program takes the room meanwhile
put = 0
try:
    for digest in writer.missing:
        writer.put(digest, pieces[digest])
        put += 1
except StoreFullError as error:
    assert "disk is full" in str(error), error
assert 0 < put < 40, put
writer.close()
(root / "other").unlink()
writer = cache.begin(describe(tensors))
assert 40 - put - 1 <= len(writer.missing) <= 40 - put, (put, len(writer.missing))
for digest in writer.missing:
    writer.put(digest, pieces[digest])
check(writer.finish(), tensors)
"""


def test_a_full_disk_keeps_what_has_arrived(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -c "$3" "$1"'
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("a small disk needs user namespaces, which this system forbids")
    subprocess.run(
        [*unshare, "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL_DISK],
        check=True,
        cwd=REPOSITORY,
    )
