"""The shard cache when processes are killed, files are damaged and disks are full."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edge.offload import CachedShard, ShardCache, StoreCorruptError
from tests.support.shards import (
    LIMIT,
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

REPOSITORY = Path(__file__).parents[2]  # the children import from it


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


def test_a_file_that_was_written_to_is_hashed_before_it_is_used(tmp_path: Path) -> None:
    """The same bytes are kept; others are asked for again, and no more than once."""
    a = content(1)
    cache = ShardCache(tmp_path, LIMIT)
    check(fill(cache, a), a)
    path = tmp_path / describe(a).digest / "weights"
    whole = path.read_bytes()
    path.write_bytes(whole)
    for _ in range(2):
        found = cache.begin(describe(a))
        assert isinstance(found, CachedShard)
        check(found, a)
    status = path.stat()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert missing(cache, a) == set(pieces_of(a))
    check(fill(cache, a), a)


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    a = content(1)
    cache = ShardCache(tmp_path, LIMIT)
    check(fill(cache, a), a)
    with (tmp_path / describe(a).digest / "weights").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([a["t5"][-1] ^ 1]))
    assert cache.get(describe(a).digest, verify=True) is None
    assert shards_in(tmp_path) == 0


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


def test_a_writer_whose_folder_was_removed_says_so(tmp_path: Path) -> None:
    a = content(1)
    cache = ShardCache(tmp_path, LIMIT)
    for is_begun_again in (False, True):
        with start(cache, a) as writer:
            for digest, data in pieces_of(a).items():
                writer.put(digest, data)
            shutil.rmtree(tmp_path / describe(a).digest)
            if is_begun_again:  # the new half file must not take the name of the whole one
                start(cache, a).close()
            with pytest.raises(StoreCorruptError, match="begin the shard again"):
                writer.finish()
        assert cache.get(describe(a).digest) is None


CHILD = """
import os, signal, sys
from pathlib import Path
from edge.offload import CachedShard, ShardCache
from edge.offload.files import durable
from tests.support.shards import content, describe, pieces_of

root, order, stop_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tensors = content(1, count=24)
pieces = pieces_of(tensors)
cache = ShardCache(root, 1 << 40)
writer = cache.begin(describe(tensors))
if isinstance(writer, CachedShard):
    writer.close()
    sys.exit(0)
real, written = durable.write_at, 0

def dying_write(descriptor, data, offset):
    global written
    if written == stop_at:
        real(descriptor, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    written += 1
    return real(descriptor, data, offset)

durable.write_at = dying_write
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
from edge.offload import ShardCache, StoreFullError
from tests.support.shards import check, content, describe, fill, pieces_of

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
    assert "on the disk" in str(error) or "disk is full" in str(error), error
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
