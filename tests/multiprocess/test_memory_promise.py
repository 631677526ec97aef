"""A budget is a promise of the whole process: kept while it works, also when it changes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import edge
from edge.demos.shapes import checkpoint
from edge.protocol.client import PeerClient
from edge.protocol.measurements import Profile
from edge.protocol.peer_frames import SetMemory
from edge.protocol.topology import Place, Seat
from edge.runs.run import PlanRun
from edge.scheduling.state import SchedulingState
from tests.multiprocess.conftest import LONG_CONTEXT, with_long_context
from tests.support.checkpoints import TinyCheckpoint
from tests.support.formats import uniform_format
from tests.support.processes import Daemon, own_credentials
from tests.support.processes import edge as run_edge
from tests.support.replies import EndlessReplies, streams_at_once
from tests.support.small_disk import fill, small_disk
from tests.support.specs import plain_spec

MIB = 1 << 20
CONTEXT = 256

pytestmark = pytest.mark.usefixtures("begun_anew")


def peak_bytes(daemon: Daemon) -> int:
    """The most its process ever had in memory."""
    return status_bytes(daemon, "VmHWM")


def status_bytes(daemon: Daemon, name: str) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def open_files(daemon: Daemon) -> list[str]:
    """The paths of what its process reads or writes."""
    return [str(each.readlink()) for each in Path(f"/proc/{daemon.process.pid}/fd").iterdir()]


@pytest.fixture(scope="module")
def minimum_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The least that a daemon promises here, with a little more for what differs by run."""
    with Daemon(tmp_path_factory.mktemp("floor"), "--no-announce") as daemon:
        info = daemon.describe()
        assert 0 < info.floor_bytes < info.memory_bytes
        assert info.free_bytes == info.memory_bytes - info.floor_bytes
        return info.floor_bytes + 12 * MIB


def test_a_daemon_stays_under_its_budget(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path, minimum_bytes: int
) -> None:
    """It measures itself, is sent weights, loads, answers several at once, and evaluates."""
    budget_bytes = minimum_bytes + 32 * MIB
    model_files = tiny_checkpoint("llama")
    options = ("--no-announce", "--memory", str(budget_bytes))
    with Daemon(tmp_path, *options) as daemon:
        with edge.Cluster.connect([daemon.address]) as cluster:
            assert cluster.peers[0].memory_bytes == budget_bytes
            cluster.memory_rates()
            proposal = cluster.propose(model_files.path, dtype="float32", context_tokens=64)
            assert proposal.overhead[cluster.peers[0].id].promised_bytes == budget_bytes
            for _ in range(2):
                with cluster.load(
                    model_files.path, dtype="float32", context_tokens=64, concurrency=8
                ) as model:
                    prompts = [model_files.prompt(length) for length in range(3, 11)]
                    streams = [model.stream(prompt, max_new_tokens=20) for prompt in prompts]
                    for stream, prompt in zip(streams, prompts, strict=True):
                        tokens = [token.token_id for token in stream]
                        assert tokens == model_files.greedy(prompt, 20)
                    model.logits(model_files.prompt(60))
        assert peak_bytes(daemon) <= budget_bytes
        assert daemon.messages == ""


@pytest.mark.linux_ways
def test_what_a_measurement_has_freed_is_given_back(tmp_path: Path) -> None:
    """For each of the threads that measure in turn, malloc kept 35 MiB outside the promise."""
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_size": 64}
    model = plain_spec(num_layers=2, hidden_size=512, ffn_columns=1024, **heads)
    question = Profile(model=model, weight_format=uniform_format("int4", 32))

    async def measure(daemon: Daemon) -> list[int]:
        client = await PeerClient.connect(daemon.address, own_credentials())
        held = [status_bytes(daemon, "RssAnon")]
        for _ in range(6):  # by more than one thread, then
            await client.call(question)
            held.append(status_bytes(daemon, "RssAnon"))
        await client.aclose()
        return held

    with Daemon(tmp_path, "--no-announce", "--backend", "null", "--memory", "300MiB") as daemon:
        first, *later = asyncio.run(measure(daemon))
    assert max(later) - first < 16 * MIB


def test_a_budget_below_the_minimum_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        Daemon(tmp_path, "--no-announce", "--memory", "20MiB")
    message = str(raised.value)
    assert "ended with 1" in message
    assert "edge: a budget of 20.0 MiB is below the minimum of" in message
    assert "the process itself takes" in message


def test_a_shard_that_leaves_no_room_for_steps_is_refused(
    endless_checkpoint: TinyCheckpoint, tmp_path: Path, minimum_bytes: int
) -> None:
    """Weights and KV cache would fit; what a step computes with would not."""
    options = ("--no-announce", "--name", "small", "--memory", str(minimum_bytes))
    with (
        Daemon(tmp_path, *options) as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
        pytest.raises(edge.CapacityError, match="'small'"),
    ):
        cluster.load(endless_checkpoint.path, dtype="float32", context_tokens=20_000, stream="off")


@pytest.mark.linux_ways
def test_less_memory_in_the_middle_of_replies_changes_no_token(tmp_path: Path) -> None:
    """Layers go to the disk, come back, and go again, though they were not opened for it."""
    prompts = [list(range(1, 8)), list(range(1, 40))]
    path = with_long_context(checkpoint("tiny", tmp_path), tmp_path)
    with (
        Daemon(tmp_path, "--no-announce") as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
        cluster.load(
            path, dtype="float32", context_tokens=LONG_CONTEXT, concurrency=len(prompts)
        ) as model,
    ):
        (peer,) = cluster.peers
        whole = daemon.describe()
        less_bytes = whole.memory_bytes - whole.free_bytes - MIB
        counts = [LONG_CONTEXT - len(prompt) for prompt in prompts]
        with EndlessReplies(streams_at_once(model, prompts, counts)) as replies:
            replies.await_more()
            less = cluster.set_memory(peer, less_bytes)
            assert less.memory_bytes == less_bytes
            assert less.models[0].streamed_bytes > 0
            replies.await_more()
            with pytest.raises(edge.RequestError, match=r"below the minimum of .* it stays at"):
                cluster.set_memory(peer, "60MiB")
            more = cluster.set_memory(peer, whole.memory_bytes)
            assert more.models[0].streamed_bytes == 0
            replies.await_more()
            again = json.loads(run_edge("memory", daemon.address, less_bytes, "--json").out)
            assert again["models"] == [dataclasses.asdict(each) for each in less.models]
            replies.await_more()
        cluster.set_memory(peer, whole.memory_bytes)
        for prompt, tokens in zip(prompts, replies.tokens, strict=True):
            rows = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
            # Not the tokens of another run: what is rounded otherwise in another batch may decide
            # between two that are all but equal.
            lead = rows.max(axis=1) - rows[np.arange(len(tokens)), tokens]
            assert lead.max() < 1e-5
        assert daemon.messages == ""


@pytest.mark.linux_ways
def test_less_memory_while_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is there, and not linked yet: its KV cache is still to be measured, for which its
    graphs are made again."""
    budgets: list[int] = []
    start = PlanRun.start

    async def interrupted(
        model: PlanRun, where: Mapping[Seat, Place], state: SchedulingState
    ) -> None:
        for client in model._connections.peers if budgets else ():
            await client.call(SetMemory(bytes=budgets[0]))
        await start(model, where, state)

    monkeypatch.setattr(PlanRun, "start", interrupted)
    found = []
    with (
        Daemon(tmp_path, "--no-announce", "--memory", "400MiB") as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
    ):
        for _ in range(2):
            with cluster.load(
                checkpoint("tiny", tmp_path), dtype="float32", context_tokens=64, kv_dtype="int8"
            ) as model:
                reply = model.generate([5, 9, 2], max_new_tokens=5, ignore_eos=True)
                found.append(reply.token_ids)
                assert bool(budgets) == any("/packed/" in each for each in open_files(daemon))
                taken = daemon.describe()
                budgets.append(taken.memory_bytes - taken.free_bytes - MIB)
    assert found[0] == found[1]


@pytest.mark.linux_ways
def test_less_memory_that_the_disk_has_no_room_for_changes_nothing(tmp_path: Path) -> None:
    """Neither the promise, nor what is counted as taken, nor the model."""
    with (
        small_disk(tmp_path / "disk", 64 * MIB) as disk,
        Daemon(disk, "--no-announce", "--memory", "400MiB") as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
        cluster.load(
            checkpoint("tiny", tmp_path), dtype="float32", context_tokens=CONTEXT
        ) as model,
    ):
        before = daemon.describe()
        less_bytes = before.memory_bytes - before.free_bytes - MIB
        expected = model.generate([5, 9, 2], max_new_tokens=5).token_ids
        filler = fill(disk)
        with pytest.raises(edge.CapacityError, match="more must be free on the disk"):
            cluster.set_memory(cluster.peers[0], less_bytes)
        after = daemon.describe()
        assert (after.memory_bytes, after.free_bytes) == (before.memory_bytes, before.free_bytes)
        assert after.models == before.models
        assert model.generate([5, 9, 2], max_new_tokens=5).token_ids == expected
        filler.unlink()
        less = cluster.set_memory(cluster.peers[0], less_bytes)
        assert less.models[0].streamed_bytes > 0
        assert model.generate([5, 9, 2], max_new_tokens=5).token_ids == expected


def test_only_a_peer_that_is_there_can_be_told(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--no-announce") as daemon:
        assert "not a size" in run_edge("memory", daemon.address, "much").sentence()
        told = run_edge("memory", daemon.address, "300MiB")
        assert "stays under 300.0 MiB from now on" in told.out
        assert daemon.describe().memory_bytes == 300 * MIB
