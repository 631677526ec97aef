"""Peers on Triton of one host, interpreted: they sum by torch.distributed, and lose each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import edge
from tests.multiprocess.conftest import LONG_CONTEXT, with_long_context
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.processes import Daemon
from tests.support.slow_cases import shown_in_parts


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Daemon]]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def start(index: int) -> Daemon:
        options = ("--no-announce", "--backend", "triton", "--name", f"gpu-{index}")
        return Daemon(tmp_path / str(index), *options)

    with ThreadPoolExecutor(2) as pool:
        daemons = list(pool.map(start, range(2)))
    yield daemons
    for daemon in daemons:
        daemon.close()


@shown_in_parts(
    "contract/test_collective.py", "e2e/test_triton_peers.py", "multiprocess/test_lost_peers.py"
)
def test_two_gpus_of_one_host_answer_as_transformers_and_lose_each_other(
    pair: list[Daemon], tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    small = tiny_checkpoint("llama", layers=2, heads=(4, 2))
    checkpoint = TinyCheckpoint(with_long_context(small.path, tmp_path))
    prompt = checkpoint.prompt(4)
    names = [daemon.name for daemon in pair]
    plan = make_plan(checkpoint.spec, "tensor_2", model=checkpoint.path.name, devices=names)
    with edge.Cluster.connect([daemon.address for daemon in pair]) as cluster:
        model = cluster.load(
            checkpoint.path, dtype="float32", plan=plan, context_tokens=LONG_CONTEXT
        )
        assert [d.describe().models[0].sums for d in pair] == ["gloo", "gloo"]
        assert list(tmp_path.glob("edge-sums-*")) == []
        stream = model.stream(prompt, max_new_tokens=LONG_CONTEXT - 4, ignore_eos=True)
        found = [next(stream).token_id for _ in range(4)]
        pair[1].kill()
        while not model.recoveries:
            found.append(next(stream).token_id)
        found += [next(stream).token_id for _ in range(4)]
        assert found == checkpoint.greedy(prompt, len(found))
        (recovery,) = model.recoveries
        assert recovery.reason.startswith(f"peer {pair[1].name}: ")
        assert [model.peers[device].name for device in model.plan.devices] == [pair[0].name]
        model.close()
        pair[0].await_free()
    assert pair[0].messages == ""
