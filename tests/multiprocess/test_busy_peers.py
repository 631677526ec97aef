"""A device that something else keeps busy during an answer: the model moves away from it, and the
answer goes on with the same tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.backends.null.made_up import replies
from edge.demos.bundled import MODEL
from edge.peer.daemon import PeerDaemon
from edge.planning import cluster_profile, slowdowns
from edge.planning.choosing import facts_of
from edge.protocol.measurements import PeerProfile
from edge.runs.recovery import replanning
from edge.weights.checkpoint import Checkpoint
from tests.support.known_rates import PROFILE
from tests.support.null_peers import null_peers
from tests.support.slow_cases import shown_in_parts

LAYER_S = 3e-3
"""Seconds that a layer takes on each of the peers."""

MEMORY_BYTES = 2_700_000
"""Memory of each peer for weights, keys and values."""

PROMPT = [5, 6, 7, 8]
NEW_TOKENS = 200
OPTIONS = edge.LoadOptions(
    dtype="int8", plan="pipeline", workload=edge.Workload(prompt_tokens=4, output_tokens=NEW_TOKENS)
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates by which a layer takes LAYER_S. Windows are short."""
    with Checkpoint.open(MODEL) as checkpoint:
        layer_bytes = (
            facts_of(checkpoint, OPTIONS, OPTIONS.limits(checkpoint.spec)).kinds[0].weight_bytes
        )
    per_byte = (LAYER_S / layer_bytes,) * 2
    rates = replace(
        PROFILE.rates,
        seconds_per_byte=per_byte,
        shared_seconds_per_byte=per_byte,
        slice_seconds_per_byte=per_byte,
    )

    async def alone(*_: Any) -> PeerProfile:
        return replace(PROFILE, rates=rates)

    monkeypatch.setattr(cluster_profile._Rates, "_alone", alone)
    monkeypatch.setattr(slowdowns, "WINDOW_S", 0.4)
    monkeypatch.setattr(slowdowns, "WINDOW_STEPS", 4)
    monkeypatch.setattr(replanning, "WINDOW_S", 0.4)


class Busy:
    """Peers whose layers take time; more time on those that something else keeps busy."""

    def __init__(self, daemons: list[PeerDaemon]) -> None:
        self.factors = {daemon.resources.settings.name: 1.0 for daemon in daemons}
        for daemon in daemons:
            self._slow(daemon.resources.settings.name, daemon.resources.backend())

    def _slow(self, name: str, backend: Any) -> None:
        load = backend.load

        def slowly(spec: Any, layout: Any, *args: Any, **named: Any) -> Any:
            program = load(spec, layout, *args, **named)
            forward = program.forward

            def computed(*given: Any) -> Any:
                time.sleep(self.factors[name] * LAYER_S * len(layout.layers))
                return forward(*given)

            program.forward = computed
            return program

        backend.load = slowly


def layers_by_name(model: edge.AsyncModel) -> dict[str, int]:
    found = dict.fromkeys((peer.name for peer in model.peers.values()), 0)
    for stage in model.plan.stages:
        for shard in stage.shards:
            found[model.peers[shard.device].name] += len(stage.layers)
    return found


@shown_in_parts("unit/planning/test_slowdowns.py", "unit/runs/test_replanning.py")
@pytest.mark.parametrize("replan", ["auto", "off"])
def test_an_answer_moves_away_from_a_busy_device(
    replan: Any, measured: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))

    async def main() -> None:
        async with null_peers(
            tmp_path,
            3,
            model_memory_bytes=MEMORY_BYTES,
        ) as daemons:
            busy = Busy(daemons)
            cluster = await edge.AsyncCluster.connect(
                [daemon.resources.addresses[0] for daemon in daemons], insecure=True
            )
            async with (
                cluster,
                await cluster.load(MODEL, replace(OPTIONS, replan=replan)) as model,
            ):
                before = layers_by_name(model)
                slowed = max(before, key=lambda name: before[name])
                stream = model.stream(PROMPT, max_new_tokens=NEW_TOKENS)
                tokens = []
                async for piece in stream:
                    tokens.append(piece.token_id)
                    if len(tokens) == 20:
                        busy.factors[slowed] = 6.0
                with Checkpoint.open(MODEL) as checkpoint:
                    assert tokens == replies(checkpoint.spec, PROMPT, len(tokens))
                if replan == "off":
                    assert model.recoveries == ()
                    assert layers_by_name(model) == before
                    return
                (move,) = model.recoveries
                assert f"{slowed} is busy (" in move.reason  # others may be, too, on a busy machine
                assert "x slower): null-" in move.reason
                assert "takes layers" in move.reason
                assert "tok/s predicted instead of" in move.reason
                assert layers_by_name(model)[slowed] < before[slowed]
                assert move.requests == 1

    asyncio.run(main())
