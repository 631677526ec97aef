"""Weights on their way to a peer: only what it lacks, resumed after a break, never damaged."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edge
from demos.relay import Fault, Relay
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.runs.shipping import PIECES_IN_FLIGHT
from edge.weights.formats import Dtype
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.plans import streaming
from tests.support.processes import Daemon

OVERHEAD_BYTES = 100_000
"""Manifests and frames, above the weights themselves."""

LARGEST_PIECE_BYTES = 2 * 704 * 256 * 4
"""A gate_up matrix of the checkpoint in float32."""

UNCONFIRMED_BYTES = PIECES_IN_FLIGHT * LARGEST_PIECE_BYTES
"""What may be under way, and lost, when a connection breaks."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """12 MB in some thirty pieces."""
    return make_checkpoint(tmp_path_factory.mktemp("larger") / "larger", "larger_llama")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """With an empty cache."""
    with Daemon(tmp_path / "daemon", "--no-announce", "--name", "far") as daemon:
        yield daemon
        assert daemon.messages == ""


@pytest.fixture(scope="module", autouse=True)
def shard_bytes(checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What the whole model takes in float32. Afterwards a device of this name has proved its
    arithmetic, for which it is connected to once more."""
    with Daemon(tmp_path_factory.mktemp("measure"), "--no-announce", "--name", "far") as daemon:
        sent = load_once(daemon.address, checkpoint)
    assert sent > 12_000_000
    return sent


def load_once(
    address: str,
    checkpoint: TinyCheckpoint,
    dtype: Dtype = "float32",
    accuracy: Accuracy = "fast",
    *,
    insecure: bool = False,
) -> int:
    """Load, compare an answer with `transformers`, close; the bytes that were sent."""
    prompt = checkpoint.prompt(5)
    with (
        edge.Cluster.connect([address], insecure=insecure) as cluster,
        cluster.load(checkpoint.path, dtype=dtype, accuracy=accuracy) as model,
    ):
        reply = model.generate(prompt, max_new_tokens=4)
        if dtype == "float32":
            assert list(reply.token_ids) == checkpoint.greedy(prompt, 4)
        (sent,) = model.sent_bytes.values()
        return sent


def test_a_second_load_sends_nothing(
    checkpoint: TinyCheckpoint, daemon: Daemon, shard_bytes: int
) -> None:
    with Relay(daemon.address) as relay:
        assert load_once(relay.address, checkpoint) == shard_bytes
        first = relay.sent_bytes
        assert shard_bytes <= first < shard_bytes + OVERHEAD_BYTES
        assert load_once(relay.address, checkpoint) == 0
        assert relay.sent_bytes - first < OVERHEAD_BYTES
        assert load_once(relay.address, checkpoint, dtype="int4") < shard_bytes / 3
        assert load_once(relay.address, checkpoint, dtype="int4") == 0


def test_another_accuracy_sends_and_writes_nothing(
    checkpoint: TinyCheckpoint, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to the peer nor to the caches of both: the stored weights are the same."""
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))

    def files() -> dict[Path, tuple[int, int]]:
        # What the peer proved is kept by format and accuracy.
        everything = [path for path in tmp_path.rglob("*") if path.name != ".lock"]
        everything = [path for path in everything if not path.name.endswith("-proven.json")]
        found = {path: path.stat() for path in everything if path.is_file()}
        return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}

    assert load_once(daemon.address, checkpoint, "int8", "fast") > 0
    before = files()
    assert load_once(daemon.address, checkpoint, "int8", "high") == 0
    assert files() == before


def test_a_transfer_cut_in_the_middle_goes_on_where_it_was(
    checkpoint: TinyCheckpoint, daemon: Daemon, shard_bytes: int
) -> None:
    """Twice; what was confirmed is never sent again."""
    cuts = [Fault(cut_after=9_000_000), Fault(cut_after=500_000)]
    with Relay(daemon.address, Fault(), Fault(), *cuts) as relay:  # two connections to describe it
        assert load_once(relay.address, checkpoint) <= shard_bytes
        assert [passage.to_target_bytes for passage in relay.passages[2:4]] == [9_000_000, 500_000]
        assert len(relay.passages) == 5
        rest = relay.passages[-1].to_target_bytes
        assert rest < shard_bytes - 9_000_000 + UNCONFIRMED_BYTES + OVERHEAD_BYTES
    daemon.await_free()


def test_a_connection_that_breaks_again_and_again_is_a_lost_peer(
    checkpoint: TinyCheckpoint, daemon: Daemon
) -> None:
    cuts = [Fault(cut_after=5000) for _ in range(20)]
    with Relay(daemon.address, Fault(), Fault(), *cuts) as relay:
        with pytest.raises(edge.PeerLostError) as raised:
            load_once(relay.address, checkpoint)
        assert raised.value.peer == "far"
    daemon.await_free()


def test_a_daemon_killed_while_it_receives_keeps_what_it_has(
    checkpoint: TinyCheckpoint, tmp_path: Path, shard_bytes: int
) -> None:
    """Killed after a quarter; started anew on its cache, it asks for the others only."""
    cache = tmp_path / "cache"
    with Daemon(cache, "--no-announce", "--name", "far") as first:

        def kill_after_a_quarter(event: edge.Progress) -> None:
            if event.phase == "send" and event.done >= 3_000_000:
                first.kill()

        with edge.Cluster.connect([first.address]) as cluster:
            with pytest.raises(edge.PeerLostError) as raised:
                cluster.load(checkpoint.path, dtype="float32", progress=kill_after_a_quarter)
            assert raised.value.peer == "far"
    with Daemon(cache, "--no-announce") as second:
        sent = load_once(second.address, checkpoint)
        assert 0 < sent <= shard_bytes - 3_000_000
        assert load_once(second.address, checkpoint) == 0


DAMAGE = Fault(corrupt_at=1_000_000)
"""A byte that TCP's checksum missed, in the middle of a piece."""


def test_a_damaged_record_ends_the_connection_and_the_next_one_goes_on(
    checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    with (
        Daemon(tmp_path, "--no-announce") as fresh,
        Relay(fresh.address, Fault(), Fault(), DAMAGE) as relay,
    ):
        load_once(relay.address, checkpoint)
        assert not relay.faults


def test_a_damaged_piece_is_refused_and_the_next_load_mends_it(
    checkpoint: TinyCheckpoint, shard_bytes: int, tmp_path: Path
) -> None:
    """Without encryption nothing else notices it."""
    with (
        Daemon(tmp_path, "--no-announce", "--name", "far", "--insecure") as daemon,
        Relay(daemon.address, Fault(), Fault(), DAMAGE) as relay,
    ):
        with pytest.raises(edge.CheckpointError) as raised:
            load_once(relay.address, checkpoint, insecure=True)
        assert str(raised.value).startswith("peer far: ")
        assert "load the model again" in str(raised.value)
        assert 0 < load_once(relay.address, checkpoint, insecure=True) < shard_bytes


def test_files_that_changed_in_place_are_described_anew(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal names, sizes and times, other bytes (as `rsync --times` may leave): not for ever."""
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    with Relay(daemon.address, Fault(), Fault(), Fault(cut_after=0)) as relay:
        relay.faults.extend(Fault(cut_after=0) for _ in range(10))
        with pytest.raises(edge.PeerLostError):
            load_once(relay.address, checkpoint)  # described, not sent
    weights = checkpoint.path / "model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-3] ^= 0x01  # a low bit of the last weight
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(edge.CheckpointError):
        load_once(daemon.address, checkpoint)
    load_once(daemon.address, TinyCheckpoint(checkpoint.path))


@pytest.mark.linux_ways
def test_a_file_that_changes_under_its_model_is_sent_again(
    checkpoint: TinyCheckpoint, daemon: Daemon
) -> None:
    """Written again, changed, cut: only the same bytes are computed with, and answers go on."""
    prompt = checkpoint.prompt(5)
    with edge.Cluster.connect([daemon.address]) as cluster:
        with cluster.load(checkpoint.path, dtype="float32", context_tokens=64) as model:
            plan = model.plan
        for harm, streamed in ((None, 0), (b"x", 0), (b"x", 4), (b"", 4)):
            with cluster.load(
                checkpoint.path,
                dtype="float32",
                plan=streaming(plan, streamed),
                context_tokens=64,
            ) as model:
                (path,) = daemon.shards.glob("*/weights")
                content = path.read_bytes()
                assert model.generate(prompt, max_new_tokens=3).token_ids
                with path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    if harm == b"":
                        file.truncate()
                    else:
                        file.write(harm or content[-1:])
                reply = model.generate(prompt, max_new_tokens=5, ignore_eos=True)
                assert list(reply.token_ids) == checkpoint.greedy(prompt, 5)
                reasons = [recovery.reason for recovery in reply.recoveries]
                assert len(reasons) == (harm is not None)
                assert all(re.match(r"peer far: .* was written to", each) for each in reasons)
                (path,) = daemon.shards.glob("*/weights")
                assert path.read_bytes() == content


def test_a_cache_smaller_than_the_shard(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    with Daemon(tmp_path, "--no-announce", "--name", "far", "--cache-limit", "5MiB") as daemon:
        with pytest.raises(edge.CapacityError) as raised:
            load_once(daemon.address, checkpoint)
        message = str(raised.value)
        assert message.startswith("peer far: ")
        assert "do not fit into the cache" in message
        assert "raise the limit" in message
        daemon.await_free()
        assert load_once(daemon.address, checkpoint, dtype="int4") > 0
        assert daemon.messages == ""


def test_a_cache_folder_that_is_removed_or_fails_while_the_daemon_runs(
    checkpoint: TinyCheckpoint, daemon: Daemon, shard_bytes: int
) -> None:
    """Removed, it is made again; in the way of it something else, the error says what to do."""
    assert load_once(daemon.address, checkpoint) == shard_bytes
    shutil.rmtree(daemon.shards)
    shutil.rmtree(daemon.cache / "packed")
    assert load_once(daemon.address, checkpoint) == shard_bytes, "it was sent again"
    shutil.rmtree(daemon.shards)
    daemon.shards.write_text("in the way")
    with pytest.raises(edge.PeerError) as raised:
        load_once(daemon.address, checkpoint)
    assert str(raised.value).startswith(f"peer far: {daemon.shards} cannot be used: ")
    assert "repair its permissions" in str(raised.value)
    daemon.await_free()


def test_eviction_spares_what_is_loaded(
    checkpoint: TinyCheckpoint, shard_bytes: int, tmp_path: Path
) -> None:
    """Room for one shard: a second is refused while the first is in use, and evicts it after."""
    limit = str(int(1.2 * shard_bytes))
    other = make_checkpoint(tmp_path / "other", "larger_llama", stored_type="float16")
    with Daemon(tmp_path / "daemon", "--no-announce", "--cache-limit", limit) as daemon:
        with edge.Cluster.connect([daemon.address]) as cluster:
            model = cluster.load(checkpoint.path, dtype="float32")
            with pytest.raises(edge.CapacityError, match="do not fit into the cache"):
                load_once(daemon.address, other)
            prompt = checkpoint.prompt(3)
            reply = model.generate(prompt, max_new_tokens=3)
            assert list(reply.token_ids) == checkpoint.greedy(prompt, 3)
        assert load_once(daemon.address, other) > 0
        assert load_once(daemon.address, checkpoint) > 0, "the other one evicted it"
        assert daemon.messages == ""


def test_two_coordinators_load_the_same_shard_at_once(
    checkpoint: TinyCheckpoint, daemon: Daemon, shard_bytes: int
) -> None:
    """Each helps the other; both are right, and nothing is stored twice."""
    together = threading.Barrier(2)
    sent: list[int] = []
    errors: list[BaseException] = []

    def coordinate() -> None:
        try:
            together.wait()
            sent.append(load_once(daemon.address, checkpoint))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=coordinate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(0 <= each <= shard_bytes for each in sent)
    folders = [path for path in daemon.shards.iterdir() if path.is_dir()]
    assert len(folders) == 1
    assert sorted(path.name for path in folders[0].iterdir() if path.name[0] != ".") == [
        "intact",
        "manifest.json",
        "weights",
    ]


def test_a_slow_link_is_only_slow(
    tiny_checkpoint: Callable[..., TinyCheckpoint], daemon: Daemon
) -> None:
    with Relay(daemon.address, *(Fault(delay_s=0.02) for _ in range(10))) as relay:
        assert load_once(relay.address, tiny_checkpoint("llama")) > 0
