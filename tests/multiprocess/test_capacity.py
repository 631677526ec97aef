"""Memory is a promise: what does not fit is refused with who lacks how much, also in a race."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edge
from edge.membership.identity import fingerprint
from edge.membership.store import MembershipStore, config_root
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import Daemon
from tests.support.processes import edge as run_edge

CONTEXT = 64


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def needed_bytes(checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What one peer reserves for the whole model in float32."""
    with (
        Daemon(tmp_path_factory.mktemp("measure"), "--no-announce") as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
        cluster.load(checkpoint.path, dtype="float32", context_tokens=CONTEXT),
    ):
        info = daemon.describe()
        (model,) = info.models
        taken_bytes = info.floor_bytes + model.bytes + model.buffer_bytes
        assert info.free_bytes == info.memory_bytes - taken_bytes
        return model.bytes


@pytest.fixture
def tight(tmp_path: Path, needed_bytes: int) -> Iterator[Daemon]:
    """A daemon with room for the model exactly once."""
    options = ("--no-announce", "--name", "tight", "--model-memory", str(needed_bytes))
    with Daemon(tmp_path / "tight", *options) as daemon:
        yield daemon
        assert daemon.messages == ""


def test_too_small_by_one_byte(
    checkpoint: TinyCheckpoint, tmp_path: Path, needed_bytes: int
) -> None:
    options = ("--no-announce", "--name", "small", "--model-memory", str(needed_bytes - 1))
    with (
        Daemon(tmp_path, *options) as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
    ):
        with pytest.raises(edge.CapacityError) as raised:
            cluster.load(checkpoint.path, dtype="float32", context_tokens=CONTEXT, stream="off")
        assert "'small'" in str(raised.value)
        assert "lacks 1 byte" in str(raised.value)
        assert "What helps: that much more memory, or a smaller dtype" in str(raised.value)
        with cluster.load(checkpoint.path, dtype="int4", context_tokens=CONTEXT) as model:
            assert model.generate([1], max_new_tokens=1).token_ids


def test_the_command_line_says_who_lacks_how_much(
    checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    sizes = {"one": "200KiB", "two": "100KiB"}
    one, two = (
        Daemon(tmp_path / name, "--no-announce", "--name", name, "--model-memory", size)
        for name, size in sizes.items()
    )
    with one, two:
        outcome = run_edge(
            "run", checkpoint.path, "-p", "x", "--dtype", "float32", "--context", CONTEXT,
            "--stream", "off", "--peer", one.address, "--peer", two.address,
        )  # fmt: skip
    sentence = outcome.sentence()
    for name in sizes:
        assert re.search(rf"'{name}' lacks [0-9.]+ KiB", sentence)


def test_exactly_enough_is_enough(tight: Daemon, checkpoint: TinyCheckpoint) -> None:
    prompt = checkpoint.prompt(4)
    with (
        edge.Cluster.connect([tight.address]) as cluster,
        cluster.load(checkpoint.path, dtype="float32", context_tokens=CONTEXT) as model,
    ):
        assert tight.describe().model_free_bytes == 0
        reply = model.generate(prompt, max_new_tokens=4)
        assert list(reply.token_ids) == checkpoint.greedy(prompt, 4)
    info = tight.describe()
    assert info.free_bytes == info.memory_bytes - info.floor_bytes


def test_a_second_coordinator_sees_what_the_first_holds(
    tight: Daemon, checkpoint: TinyCheckpoint, needed_bytes: int
) -> None:
    with edge.Cluster.connect([tight.address]) as first:
        model = first.load(checkpoint.path, dtype="float32", context_tokens=CONTEXT)
        with edge.Cluster.connect([tight.address]) as second:
            assert second.peers[0].model_free_bytes == 0
            with pytest.raises(edge.CapacityError, match="'tight'") as raised:
                second.load(checkpoint.path, dtype="float32", context_tokens=CONTEXT, stream="off")
            (holding,) = second.peers[0].models
            assert f"Now tight holds {holding.held}." in str(raised.value)
            assert f" for {checkpoint.path.name} of " in holding.held
            identity = MembershipStore(config_root()).identity()
            assert holding.held.endswith(f" ({fingerprint(identity.id)})")
            model.close()
            second.load(checkpoint.path, dtype="float32", context_tokens=CONTEXT)
            listed = json.loads(run_edge("peers", "--peer", tight.address, "--json").out)
            (shown,) = listed
            assert shown["model_free_bytes"] == 0
            assert shown["models"][0]["bytes"] == needed_bytes


def test_two_coordinators_race_for_the_same_memory(
    tight: Daemon, checkpoint: TinyCheckpoint
) -> None:
    """Both were told that it is free; the peer's own ledger lets one of them in."""
    planned = threading.Barrier(2)
    decided = threading.Barrier(2)
    outcomes: list[str] = []

    def coordinate() -> None:
        def wait_for_the_other(event: edge.Progress) -> None:
            if event.phase == "hash" and event.done == 0:
                planned.wait()

        with edge.Cluster.connect([tight.address]) as cluster:
            try:
                cluster.load(
                    checkpoint.path,
                    dtype="float32",
                    context_tokens=CONTEXT,
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
    loaded, refused = sorted(outcomes, key=lambda outcome: outcome != "loaded")
    assert loaded == "loaded"
    assert refused.startswith("peer tight: this shard needs ")
    assert "and 0 B are free" in refused
    assert "are missing" in refused
    assert f" for {checkpoint.path.name} of " in refused.partition("; held now: ")[2]
    tight.await_free()
