"""Peers that join while a model runs: it moves to them where that pays, and answers go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.planning import cluster_profile
from edge.protocol.heartbeat import ALIVE_EVERY_S
from edge.protocol.measurements import PeerProfile
from edge.protocol.peer_info import PeerInfo
from edge.runs.recovery import candidates
from tests.multiprocess.conftest import LONG_CONTEXT
from tests.support.checkpoints import TinyCheckpoint
from tests.support.known_rates import PROFILE
from tests.support.passing_time import let_pass, somebody_waits_for
from tests.support.processes import Daemon

SLOW = replace(
    PROFILE,
    rates=replace(PROFILE.rates, run_s=2e-3, sample_s=2e-3, step_s=2e-2),
)
"""A hundred times slower at what answers of a tiny model mostly wait for."""


@pytest.fixture
def measured(rates: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Who was measured. The one called old is found to be slow."""
    names: list[str] = []

    async def alone(_self: object, peer: PeerInfo) -> PeerProfile:
        names.append(peer.name)
        return SLOW if peer.name == "old" else PROFILE

    monkeypatch.setattr(cluster_profile._Rates, "_alone", alone)
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    # Nobody looks before a test has time pass.
    monkeypatch.setattr(candidates, "LOOK_EVERY_S", 1e5)
    return names


class Pair:
    """A daemon that is slow, and a fast one that goes, and comes back on the same port."""

    def __init__(self, folder: Path) -> None:
        # So many threads tell the two apart, else each would be as fast as the other.
        self._starts = {
            name: partial(Daemon, folder / name, "--no-announce", "--name", name, "--threads", n)
            for name, n in (("old", "1"), ("new", "2"))
        }
        with ThreadPoolExecutor(2) as pool:
            self.old, self.new = pool.map(lambda start: start(), self._starts.values())

    async def comes_back(self) -> None:
        self.new.close()
        start = partial(self._starts["new"], listen=self.new.address)
        self.new = await asyncio.to_thread(start)

    def close(self) -> None:
        self.old.close()
        self.new.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with contextlib.closing(Pair(tmp_path)) as both:
        yield both
        for daemon in (both.old, both.new):
            assert daemon.messages == ""


def names(model: edge.AsyncModel) -> list[str]:
    return [model.peers[id].name for id in model.plan.devices]


class Looks:
    """Has time pass whenever nothing happens until the next look at who joins: what is under way
    then, a look, a measurement or a move, would at once be late."""

    def __init__(self, model: edge.AsyncModel) -> None:
        self._model = model
        self._next_s = 0.0

    def pass_time(self) -> None:
        every_s = candidates.LOOK_EVERY_S
        if self._model.is_recovering or not somebody_waits_for(every_s):
            return
        if time.monotonic() >= self._next_s:  # signs of life come between, which are on real time
            self._next_s = time.monotonic() + 2 * ALIVE_EVERY_S
            let_pass(every_s)


async def until(condition: Callable[[], object], looks: Looks | None = None) -> None:
    async with asyncio.timeout(1e9):  # the clock is moved; a test that hangs is ended from outside
        while not condition():
            if looks is not None:
                looks.pass_time()
            await asyncio.sleep(0.01)


def test_a_model_moves_to_who_joins_and_an_answer_to_who_comes_back(
    pair: Pair, measured: list[str], endless_checkpoint: TinyCheckpoint
) -> None:
    prompt = endless_checkpoint.prompt(5)

    async def main() -> None:
        cluster = await edge.AsyncCluster.connect([pair.old.address, pair.new.address])
        pair.new.kill()
        load = partial(
            cluster.load, endless_checkpoint.path, dtype="float32", context_tokens=LONG_CONTEXT
        )
        async with cluster, await load() as model:
            assert names(model) == ["old"]
            await pair.comes_back()
            await until(lambda: model.recoveries, Looks(model))
            (first,) = model.recoveries
            assert first.reason.startswith("new joined: ")
            assert "could not be used" not in first.reason
            assert (names(model), first.requests) == (["new"], 0)
            assert measured == ["old", "new"]

            pair.new.kill()
            await until(lambda: len(model.recoveries) == 2)
            assert names(model) == ["old"]
            await pair.comes_back()
            stream = model.stream(prompt, max_new_tokens=LONG_CONTEXT - 10)
            tokens = [(await anext(stream)).token_id]
            looks = Looks(model)
            while len(model.recoveries) == 2:  # lost twice, it has to be there for a while
                looks.pass_time()
                tokens.append((await anext(stream)).token_id)
            tokens += [(await anext(stream)).token_id for _ in range(50)]
            await stream.aclose()
            assert names(model) == ["new"]
            assert model.recoveries[2].reason.startswith("new joined: ")
            assert model.recoveries[2].requests == 1
            assert measured == ["old", "new"], "what is known is not measured again"
            again = await model.generate(prompt, max_new_tokens=len(tokens))
            assert list(again.token_ids) == tokens
            assert tokens[:20] == endless_checkpoint.greedy(prompt, 20)

    asyncio.run(main())


def test_a_model_that_was_planned_by_a_first_look_moves_once_all_is_measured(
    pair: Pair, measured: list[str], endless_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In a quiet moment; the first look was wrong about who is slow."""

    async def alone(rates: Any, peer: PeerInfo) -> PeerProfile:
        is_brief = rates._inquiry.on_rough is not None
        measured.append(f"{peer.name}, {'a look' if is_brief else 'measured'}")
        return SLOW if (peer.name == "old") != is_brief else PROFILE

    monkeypatch.setattr(cluster_profile._Rates, "_alone", alone)
    prompt = endless_checkpoint.prompt(5)

    async def main() -> None:
        cluster = await edge.AsyncCluster.connect([pair.old.address, pair.new.address])
        load = partial(
            cluster.load, endless_checkpoint.path, dtype="float32", context_tokens=LONG_CONTEXT
        )
        async with cluster, await load() as model:
            assert (names(model), model.proposal.is_rough) == (["old"], True)
            before = await model.generate(prompt, max_new_tokens=10)
            await until(lambda: model.recoveries, Looks(model))
            (move,) = model.recoveries
            assert move.reason.startswith("the devices were measured: ")
            assert (names(model), model.proposal.is_rough) == (["new"], False)
            after = await model.generate(prompt, max_new_tokens=10)
            assert after.token_ids == before.token_ids
        assert measured == [
            *("old, a look", "new, a look"),
            *("old, measured", "new, measured"),
        ]

    asyncio.run(main())
