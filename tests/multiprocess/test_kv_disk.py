"""More keys and values than memory is kept for: requests take turns, and their tokens stay."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import edge
from edge.memory.step_memory import state_bytes
from edge.partition import Plan, Shard, Stage
from edge.planning.load_options import STATES_AT_ONCE
from edge.weights.formats import Dtype, KvDtype
from edge.weights.layout import whole_layout
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import Daemon
from tests.support.processes import edge as run_edge
from tests.support.replies import replies_at_once
from tests.support.slow_cases import shown_in_parts
from tests.support.small_disk import fill, small_disk
from tests.support.specs import shape

CONTEXT = 512
DISK_TOKENS = 20 * CONTEXT


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


def token_bytes(checkpoint: TinyCheckpoint) -> int:
    """Of one token's keys and values in the whole model, in float32."""
    spec = checkpoint.spec
    row_bytes: int = -(-shape(spec).head_size // 8) * 8 * 4
    num_kv_heads: int = shape(spec).num_kv_heads
    return spec.num_layers * num_kv_heads * 2 * row_bytes


def written_bytes(model: edge.Model) -> list[int]:
    return [times.kv_written_bytes for times in model.measure()]


def on_devices(checkpoint: TinyCheckpoint, parts: int) -> Plan:
    """By hand, as what was measured may be uneven: one stage, in equal parts."""
    spec = checkpoint.spec

    def shard(index: int) -> Shard:
        heads, ffn_columns, vocab = (
            range(total * index // parts, total * (index + 1) // parts)
            for total in (shape(spec).num_heads, shape(spec).ffn_columns, spec.vocab_size)
        )
        device = f"local-{index + 1}"
        return Shard(device=device, heads=heads, ffn_columns=ffn_columns, vocab=vocab)

    stage = Stage(layers=range(spec.num_layers), shards=tuple(map(shard, range(parts))))
    return Plan(model=checkpoint.path.name, version=0, stages=(stage,))


def test_eight_requests_over_memory_for_two(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    prompts = [checkpoint.prompt(40 + 7 * index) for index in range(8)]
    count = 72
    longest = 40 + 49 + count
    half = token_bytes(checkpoint) // 2
    with (
        edge.Cluster.local(
            peers=2, threads=1, kv_memory=2 * longest * half, kv_disk=f"{tmp_path}:{10 << 20}"
        ) as cluster,
        cluster.load(
            checkpoint.path,
            dtype="float32",
            plan=on_devices(checkpoint, 2),
            context_tokens=longest,
            concurrency=2,
        ) as model,
    ):
        replies = replies_at_once(model, prompts, [count] * 8)
        moved = written_bytes(model)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert isinstance(reply, list)
        checkpoint.check_greedy(prompt, reply, count)
    assert all(each > 4 * 40 * half for each in moved), "at least four of them left memory"


@pytest.mark.parametrize(
    ("peers", "memory_tokens"),
    [(1, 230), (2, 230)],
    ids=["reads ahead", "tensor"],
)
def test_a_request_longer_than_memory(
    checkpoint: TinyCheckpoint, tmp_path: Path, peers: int, memory_tokens: int
) -> None:
    """Beside one that fits, and that takes turns with it."""
    prompt, other = checkpoint.prompt(430), checkpoint.prompt(20)
    size = token_bytes(checkpoint) // peers
    with (
        edge.Cluster.local(
            peers=peers,
            threads=1,
            kv_memory=memory_tokens * size,
            kv_disk=f"{tmp_path}:{DISK_TOKENS * size}",
        ) as cluster,
        cluster.load(
            checkpoint.path,
            dtype="float32",
            plan=on_devices(checkpoint, peers),
            context_tokens=CONTEXT - 12,
        ) as model,
    ):
        replies = replies_at_once(model, [prompt, other], [70, 70])
        moved = written_bytes(model)
    for each, reply in zip((prompt, other), replies, strict=True):
        assert isinstance(reply, list)
        checkpoint.check_greedy(each, reply, 70)
    assert all(moved)


def test_a_full_disk_ends_only_the_request_that_needs_it(
    checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """One that is longer than memory, beside one that is not: on a real file system."""
    long, short = checkpoint.prompt(430), checkpoint.prompt(20)
    expected = [checkpoint.greedy(prompt, 70) for prompt in (long, short)]
    size = token_bytes(checkpoint)
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        filler = fill(disk)
        with (
            Daemon(
                tmp_path / "cache",
                *("--name", "k", "--kv-memory", str(400 * size)),
                *("--kv-disk", f"{disk}:{DISK_TOKENS * size}"),
            ) as daemon,
            edge.Cluster.connect([daemon.address]) as cluster,
            cluster.load(checkpoint.path, dtype="float32", context_tokens=CONTEXT - 12) as model,
        ):
            for _ in range(2):
                failed, reply = replies_at_once(model, [long, short], [70, 70])
                assert isinstance(failed, edge.CapacityError)
                assert re.match(
                    rf"peer k: the disk under {disk} is full: no room for [\d,]+ bytes of keys",
                    str(failed),
                )
                assert reply == expected[1]
            filler.unlink()
            assert replies_at_once(model, [long, short], [70, 70]) == expected


def test_what_is_refused(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    size = token_bytes(checkpoint)
    assert "write /some/folder:20GiB" in run_edge("peer", "--kv-disk", "20GiB").sentence()
    sentence = run_edge("peer", "--memory", "1GiB", "--kv-memory", "2GiB").sentence()
    assert "--kv-memory 2.0 GiB is more than --memory 1.0 GiB" in sentence
    (tmp_path / "file").write_bytes(b"")
    sentence = run_edge("peer", "--kv-disk", f"{tmp_path}/file/kv:1GiB").sentence()
    assert "keys and values cannot be kept in" in sentence
    memory, disk = ("--kv-memory", str(100 * size)), ("--kv-disk", f"{tmp_path}/kv:{300 * size}")
    with (
        Daemon(tmp_path / "cache", *memory, *disk, "--name", "k") as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
    ):
        taken = run_edge("peer", *disk).sentence()
        assert "another peer keeps keys and values in" in taken
        with pytest.raises(
            edge.CapacityError,
            match="memory for keys and values of 100 tokens and disk for 300, so 300 is the",
        ):
            cluster.load(checkpoint.path, dtype="float32", context_tokens=301)
        with cluster.load(checkpoint.path, dtype="float32", context_tokens=300):
            shown = json.loads(run_edge("peers", "--peer", daemon.address, "--json").out)
            (model,) = shown[0]["models"]
            assert (model["kv_bytes"], model["kv_disk_bytes"]) == (100 * size, 0)
            assert (shown[0]["kv_memory_bytes"], shown[0]["kv_disk_bytes"]) == (0, 0)
            assert "KV" in run_edge("peers", "--peer", daemon.address).out


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "streamed"),
    [
        ("int4", "int8", 3),
        pytest.param(
            *("int8", "int4", 0),
            marks=shown_in_parts("multiprocess/test_kv_disk.py", "contract/test_stage_program.py"),
        ),
    ],
)
@pytest.mark.linux_ways
def test_codes_and_streamed_layers_move_as_well(
    checkpoint: TinyCheckpoint, tmp_path: Path, kv_dtype: KvDtype, dtype: Dtype, streamed: int
) -> None:
    """The tokens are those of a peer with memory for all: one by one, so in the same steps."""
    prompts = [checkpoint.prompt(length) for length in (330, 180)]

    def on(device: str) -> Plan:
        plan = on_devices(checkpoint, 1)
        (stage,) = plan.stages
        (shard,) = stage.slices
        shard = replace(shard, device=device, streamed_layers=streamed)
        return replace(plan, stages=(replace(stage, shards=(shard,)),))

    size = token_bytes(checkpoint) // (4 if kv_dtype == "int8" else 8)
    beside = (STATES_AT_ONCE + 2) * state_bytes(whole_layout(checkpoint.spec), kv_dtype)
    with edge.Cluster.local(
        peers=2,
        threads=1,
        kv_memory=[1 << 30, 200 * size + beside],
        kv_disk=[f"{tmp_path}/a:1GiB", f"{tmp_path}/b:1GiB"],
    ) as cluster:
        replies, moved = [], []
        for device in ("local-1", "local-2"):
            with cluster.load(
                checkpoint.path,
                dtype=dtype,
                plan=on(device),
                kv_dtype=kv_dtype,
                context_tokens=CONTEXT - 100,
                concurrency=4,
            ) as model:
                replies.append([replies_at_once(model, [prompt], [70]) for prompt in prompts])
                moved += written_bytes(model)
    assert replies[0] == replies[1]
    assert moved[0] == 0 < moved[1]


def test_scales_are_measured_within_the_memory_that_is_kept(
    checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """Also where that is less than would be measured otherwise: no layer may be away then."""
    prompt = checkpoint.prompt(180)
    size = token_bytes(checkpoint) // 4
    replies = []
    for name, memory_bytes in (("a", 1 << 30), ("b", 110 * size)):
        with (
            edge.Cluster.local(
                peers=1, threads=1, kv_memory=memory_bytes, kv_disk=f"{tmp_path}/{name}:1GiB"
            ) as cluster,
            cluster.load(
                checkpoint.path, dtype="float32", kv_dtype="int8", context_tokens=CONTEXT - 100
            ) as model,
        ):
            replies += replies_at_once(model, [prompt], [20])
    assert replies[0] == replies[1]


def test_two_coordinators_race_for_the_same_room(
    checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """Both were told that it is free. Who is refused leaves nothing behind."""
    planned, decided = threading.Barrier(2), threading.Barrier(2)
    outcomes: list[str] = []
    size = token_bytes(checkpoint)
    with Daemon(tmp_path / "cache", "--kv-memory", str(100 * size)) as daemon:

        def wait_for_the_other(event: edge.Progress) -> None:
            if event.phase == "hash" and event.done == 0:
                planned.wait()

        def coordinate() -> None:
            with edge.Cluster.connect([daemon.address]) as cluster:
                try:
                    cluster.load(
                        checkpoint.path,
                        dtype="float32",
                        context_tokens=100,
                        progress=wait_for_the_other,
                    )
                    outcomes.append("loaded")
                except edge.CapacityError as error:
                    outcomes.append(str(error))
                decided.wait()

        threads = [threading.Thread(target=coordinate) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes, key=len)[0] == "loaded"
        assert "give the peer more --kv-memory" in sorted(outcomes, key=len)[1]
        daemon.await_free()
