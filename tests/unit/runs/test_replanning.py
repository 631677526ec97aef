"""Peers that join and devices that become busy, as a model that runs sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from edge.errors import PeerLostError
from edge.partition import ClusterSpec, DeviceSpec
from edge.protocol.peer_info import PeerInfo
from edge.runs.recovery.replanning import MOVES_APART_S, Replanning
from tests.support.formats import uniform_format
from tests.support.known_rates import PROFILE
from tests.support.passing_time import let_pass, somebody_waits_for
from tests.support.peer_infos import peer_info
from tests.support.specs import plain_spec

OLD, NEW = peer_info("old"), peer_info("new")
CLUSTER = ClusterSpec(
    devices=(DeviceSpec(id="old", name="old", memory_bytes=1, threads=1, rates=PROFILE.rates),)
)
FORMAT = uniform_format("int4", 32)
SPEC = plain_spec(hidden_size=64, num_heads=6, head_size=16, ffn_columns=96, vocab_size=100)


@dataclass(frozen=True)
class Choice:
    """What is predicted of a plan."""

    plan: None
    predicted: object = None


@dataclass(frozen=True)
class Planned:
    """What a move needs to know of a proposal: stages on devices."""

    stages: dict[str, range]
    cluster: ClusterSpec = field(default=CLUSTER)
    choice: Choice = field(default_factory=lambda: Choice(plan=None))
    is_rough: bool = False
    limits: Any = field(default_factory=lambda: SimpleNamespace(windows=0))

    @property
    def plan(self) -> Any:
        stages = [
            SimpleNamespace(layers=layers, shards=(SimpleNamespace(device=id),))
            for id, layers in self.stages.items()
        ]
        return SimpleNamespace(devices=tuple(self.stages), stages=stages, model="m")


class Running:
    """What a move needs to know of a model on one peer."""

    def __init__(self) -> None:
        self.forecast = SimpleNamespace(proposal=Planned({"old": range(8)}))
        self.forecast.replace = partial(setattr, self.forecast, "proposal")
        self.plan = self.forecast.proposal.plan
        self.peers = {"old": OLD}
        self.options = SimpleNamespace(weight_format=lambda _checkpoint: FORMAT, kv_dtype="float32")
        self.answers = ()
        self.failure = None
        self.is_recovering = False
        self.moves: list[str] = []

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(spec=SPEC)

    def delivery(self, *_what: object) -> None:
        return None

    def move(self, reason: str, _load: object) -> None:
        self.moves.append(reason)


def test_who_is_lost_on_the_way_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Planned({"old": range(4), "new": range(4, 8)})
    after = SimpleNamespace(tokens_per_s=59.61, tokens_per_s_range=(57.2, 62.4))
    before = SimpleNamespace(tokens_per_s=30.0, tokens_per_s_range=(30.0, 30.0))
    move = SimpleNamespace(
        when="now", to=SimpleNamespace(predicted=after), before=before, pause_s=1.0
    )
    sent: list[bool] = []

    async def moved_proposal(*_args: object, **_named: object) -> Any:
        return move, there

    async def ship_ahead(*_args: object) -> int:
        sent.append(True)
        if len(sent) == 1:
            raise PeerLostError("new", "it closed the connection")
        return 0

    async def measured(*_args: object) -> ClusterSpec:
        new = replace(CLUSTER.devices[0], id="new", name="new")
        return replace(CLUSTER, devices=(*CLUSTER.devices, new))

    monkeypatch.setattr("edge.runs.recovery.replanning.moved_proposal", moved_proposal)
    monkeypatch.setattr("edge.runs.recovery.replanning.ship_ahead", ship_ahead)
    monkeypatch.setattr(Replanning, "_measured", measured)

    async def main() -> None:
        running: Any = Running()
        nobody: Any = SimpleNamespace(looks=lambda _used: _never(), are_announced=False)
        replanning = Replanning(nobody, running, running)
        for moves in (0, 0, 1):
            await replanning._look_at([OLD, NEW])
            assert len(running.moves) == moves
            if sent == [True] and moves == 0:
                let_pass(MOVES_APART_S / 2)
        assert running.moves == ["new joined: 57–62 tok/s predicted instead of 30.0"]
        await replanning.aclose()

    asyncio.run(main())


async def _never() -> AsyncIterator[None]:
    await asyncio.Event().wait()
    yield


def test_a_look_that_fails_is_logged_and_followed_by_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def twice() -> AsyncIterator[tuple[PeerInfo, ...]]:
        yield (OLD,)
        yield (NEW,)

    async def main() -> None:
        looked: list[str] = []
        is_over = asyncio.Event()

        async def look_at(_self: Replanning, there: list[PeerInfo]) -> None:
            looked.extend(peer.name for peer in there)
            if len(looked) == 1:
                raise ValueError("not foreseen")
            is_over.set()

        monkeypatch.setattr(Replanning, "_look_at", look_at)
        running: Any = Running()
        candidates: Any = SimpleNamespace(looks=lambda _used: twice(), are_announced=False)
        replanning = Replanning(candidates, running, running)
        await is_over.wait()
        assert looked == ["old", "new"]
        await replanning.aclose()

    asyncio.run(main())
    assert "not foreseen" in caplog.text


@pytest.mark.parametrize("are_announced", [True, False])
def test_a_faster_network_that_appears_is_taken_when_no_answer_is_under_way(
    are_announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured once. An address that a user gave stays."""
    slow, fast = "10.9.1.2:5", "10.9.2.2:5"
    near = peer_info("old", address=slow)
    both = replace(near, addresses=(slow, fast), address=fast, reached_at=fast)
    measured: list[str] = []

    async def fastest(peers: list[PeerInfo]) -> list[PeerInfo]:
        measured.extend(peer.reached_at for peer in peers)
        return [replace(peer, address=fast, reached_at=fast) for peer in peers]

    def networks(peers: list[PeerInfo]) -> frozenset[tuple[str, str]]:
        return frozenset((peer.id, address) for peer in peers for address in peer.addresses)

    monkeypatch.setattr("edge.runs.recovery.faster_network.by_fastest_address", fastest)
    monkeypatch.setattr("edge.runs.recovery.faster_network.shared_networks", networks)

    async def main() -> None:
        running: Any = Running()
        running.peers = {"old": near}
        at: list[str] = []
        candidates: Any = SimpleNamespace(
            looks=lambda _used: _never(),
            are_announced=are_announced,
            are_at=lambda peers: at.extend(peer.address for peer in peers),
        )
        replanning = Replanning(candidates, running, running)
        await replanning._look_at([])
        running.answers = (object(),)
        looking = asyncio.create_task(replanning._look_at([both]))
        while are_announced and not somebody_waits_for(0.2):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not running.moves
        running.answers = ()
        let_pass(0.2)
        await looking
        await replanning._look_at([both])
        assert (measured, at) == (([slow], [fast]) if are_announced else ([], []))
        assert running.moves == (["a faster network leads to old"] if are_announced else [])
        await replanning.aclose()

    asyncio.run(main())


SLOW = SimpleNamespace(tokens_per_s=10.0, tokens_per_s_range=(10.0, 10.0))
QUICK = SimpleNamespace(tokens_per_s=30.0, tokens_per_s_range=(30.0, 30.0))


@pytest.mark.parametrize(
    ("when", "moves"),
    [
        (
            "now",
            ["old is busy (4.1 x slower): new takes layers 2-7; 30.0 tok/s predicted instead of "
             "10.0"],
        ),
        ("stay", []),
    ],
)  # fmt: skip
def test_a_device_that_is_busy_gives_layers_away_where_that_pays(
    when: str, moves: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no other plan pays, it is asked for one once, and predictions count on the slow device."""
    after = Planned({"old": range(2), "new": range(2, 8)})
    asked: list[float] = []

    async def moved_proposal(*_args: object, before: Planned, **_named: object) -> Any:
        asked.extend(device.slowed for device in before.cluster.devices)
        to = None if when == "stay" else SimpleNamespace(predicted=QUICK)
        move = SimpleNamespace(when=when, to=to, before=SLOW, pause_s=1.0)
        return move, None if when == "stay" else after

    async def ship_ahead(*_args: object) -> int:
        return 0

    monkeypatch.setattr("edge.runs.recovery.replanning.moved_proposal", moved_proposal)
    monkeypatch.setattr("edge.runs.recovery.replanning.ship_ahead", ship_ahead)

    async def main() -> None:
        running: Any = Running()
        both = (*CLUSTER.devices, replace(CLUSTER.devices[0], id="new", name="new"))
        running.forecast.proposal = replace(
            running.forecast.proposal, cluster=ClusterSpec(devices=both)
        )
        nobody: Any = SimpleNamespace(looks=lambda _used: _never(), are_announced=False)
        replanning = Replanning(nobody, running, running)
        pace: Any = SimpleNamespace(factors={"old": 4.1})
        replanning._pace._slowdowns = pace
        await replanning._look_at([NEW])
        assert (asked, running.moves) == ([4.1, 1.0], moves)
        if when == "stay":
            proposal = running.forecast.proposal
            assert [device.slowed for device in proposal.cluster.devices] == [4.1, 1.0]
            assert proposal.choice.predicted is SLOW
            await replanning._look_at([NEW])
            assert len(asked) == 2
            pace.factors = {}
            await replanning._look_at([NEW])
            assert asked[2:] == [1.0, 1.0]
        await replanning.aclose()

    asyncio.run(main())
