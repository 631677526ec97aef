"""Graphs with state over peers of this process: order, losses, inputs that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.api.graph import AsyncGraph
from edge.errors import CapacityError, NetworkError, RequestError
from edge.graphs.onnx_checks import open_onnx
from edge.partition import GraphPlan, GraphStage
from edge.progress import ignore_progress
from edge.protocol.peer_info import describe_peer
from edge.runs.graphs import sequences
from edge.runs.graphs.cut_graph import load_cut_graph
from edge.runs.graphs.graph_options import MOST_SEQUENCES, GraphOptions
from edge.runs.graphs.remote_part import DeviceGoneError, RemotePart
from tests.support.null_peers import null_peers
from tests.support.small_graphs import agree, computed, stateful, written

STATE = {"new_state_0": "state_0", "new_state_1": "state_1"}
WIDTH = 8
BOTH = GraphPlan(
    stages=(
        GraphStage(device="null-0", atoms=range(4)),
        GraphStage(device="null-1", atoms=range(4, 11)),
    )
)


def inputs_of(seed: int, row: int = 0) -> dict[str, Any]:
    x = np.random.default_rng(seed).normal(0, 1, (2, WIDTH)).astype(np.float32)
    return {"x": x, "row": np.array(row)}


def expected_of(given: list[dict[str, Any]], first: float = 0.0) -> list[Any]:
    """The results of the uncut graph, run after run; None for inputs that fail."""
    state = {name: np.full((2, WIDTH), first, np.float32) for name in STATE.values()}
    found: list[Any] = []
    for each in given:
        if each["row"] > 2:
            found.append(None)
            continue
        results = computed(stateful(), {**each, **state})
        state = {name: results[output] for output, name in STATE.items()}
        found.append({"y": results["y"]})
    return found


def check(found: list[Any], given: list[dict[str, Any]], first: float = 0.0) -> None:
    expected = expected_of(given, first)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert isinstance(one, RequestError)
        else:
            assert one.keys() == other.keys()
            agree(one, other)


@contextlib.asynccontextmanager
async def loaded(folder: Path, **options: Any) -> AsyncIterator[AsyncGraph]:
    path = written(stateful(), folder)
    async with null_peers(folder / "peers", 2) as daemons, asyncio.timeout(100):
        peers = [await describe_peer(each.resources.addresses[0], None) for each in daemons]
        asked = GraphOptions(**{"plan": BOTH, "state": STATE, **options})
        async with AsyncGraph(
            await load_cut_graph(open_onnx(path), peers, inputs_of(0), asked, ignore_progress)
        ) as graph:
            yield graph


async def listed(graph: AsyncGraph, given: list[dict[str, Any]], **options: Any) -> list[Any]:
    return [each async for each in graph.stream(given, on_error="give", **options)]


def test_sequences_keep_their_own_state(tmp_path: Path) -> None:
    """`run` goes on, `reset` begins anew, streams do not mix; a failed input leaves no trace."""
    given = [inputs_of(n, row=7 if n in (3, 21, 22) else 0) for n in range(40)]
    other = [inputs_of(100 + n) for n in range(9)]

    async def main() -> None:
        async with loaded(tmp_path) as graph:
            assert graph.plan == BOTH
            assert [each.name for each in graph.inputs] == ["x", "row"]
            assert [each.name for each in graph.outputs] == ["y"]
            assert graph.state == STATE
            check([await graph.run(each) for each in other], other)
            first = {name: np.ones((2, WIDTH), np.float32) for name in STATE.values()}
            streams = listed(graph, given), listed(graph, other, initial=first)
            many, few, one = await asyncio.gather(*streams, graph.run(other[0]))
            check(many, given)
            check(few, other, 1.0)
            agree(one, expected_of([*other, other[0]])[-1])
            await graph.reset(first)
            check([await graph.run(each) for each in other], other, 1.0)
            with pytest.raises(RequestError, match="is no state of the graph"):
                await graph.reset({"x": first["state_0"]})
            with pytest.raises(RequestError, match="must be float32"):
                await graph.reset({"state_0": np.ones(3)})
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(MOST_SEQUENCES - 1):
                    stream = graph.stream(given)
                    stack.push_async_callback(stream.aclose)
                    await anext(stream)
                await graph.reset()
                with pytest.raises(CapacityError, match="sequences at once"):
                    await anext(graph.stream(given))

    asyncio.run(main())


def test_a_sequence_survives_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that forgets, and one that is lost, while inputs are under way."""
    given = [inputs_of(n) for n in range(60)]
    runs: list[int] = []
    true_run = RemotePart.run
    monkeypatch.setattr(sequences, "COPY_EVERY", 5)

    async def run(remote: RemotePart, arrays: Any, kept: Any = None, fed: Any = None) -> Any:
        if kept is not None and kept.take and remote.peer.name == "null-1":
            runs.append(1)
            if len(runs) == 13:  # as if its process had ended
                remote._dropped.append(kept.slot)
            if len(runs) == 37:
                raise DeviceGoneError(remote.peer.id, NetworkError("gone"))
        return await true_run(remote, arrays, kept, fed)

    monkeypatch.setattr(RemotePart, "run", run)

    async def main() -> None:
        async with loaded(tmp_path) as graph:
            kept = next(iter(given))["x"].copy()
            found = await listed(graph, given)
            assert graph.plan.devices == ("null-0",)
            check(found, given)
            assert np.array_equal(kept, given[0]["x"])

    asyncio.run(main())
