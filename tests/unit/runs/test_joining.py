"""Peers that join, as a model that runs sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edge.errors import PeerLostError
from edge.protocol.peer_info import PeerInfo
from edge.runs.recovery.joining import MOVES_APART_S, Joining
from tests.support.formats import uniform_format
from tests.support.passing_time import let_pass, somebody_waits_for
from tests.support.peer_infos import peer_info
from tests.support.specs import plain_spec

OLD, NEW = peer_info("old"), peer_info("new")
FORMAT = uniform_format("int4", 32)
SPEC = plain_spec(hidden_size=64, num_heads=6, head_size=16, ffn_columns=96, vocab_size=100)


class Running:
    """What a move needs to know of a model on one peer."""

    def __init__(self) -> None:
        self.forecast = SimpleNamespace(
            proposal=SimpleNamespace(
                cluster=SimpleNamespace(devices=[OLD]),
                plan=SimpleNamespace(devices=("old",)),
                limits=SimpleNamespace(windows=0),
                is_rough=False,
            )
        )
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
    there = SimpleNamespace(plan=SimpleNamespace(devices=("old", "new")))
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

    async def measured(*_args: object) -> str:
        return "measured"

    monkeypatch.setattr("edge.runs.recovery.joining.moved_proposal", moved_proposal)
    monkeypatch.setattr("edge.runs.recovery.joining.ship_ahead", ship_ahead)
    monkeypatch.setattr(Joining, "_measured", measured)

    async def main() -> None:
        running: Any = Running()
        nobody: Any = SimpleNamespace(looks=lambda _used: _never(), are_announced=False)
        joining = Joining(nobody, running, running)
        for moves in (0, 0, 1):
            await joining._look_at([OLD, NEW])
            assert len(running.moves) == moves
            if sent == [True] and moves == 0:
                let_pass(MOVES_APART_S / 2)
        assert running.moves == ["new joined: 57–62 tok/s predicted instead of 30.0"]
        await joining.aclose()

    asyncio.run(main())


async def _never() -> AsyncIterator[None]:
    await asyncio.Event().wait()
    yield


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

    monkeypatch.setattr("edge.runs.recovery.joining.by_fastest_address", fastest)
    monkeypatch.setattr("edge.runs.recovery.joining.shared_networks", networks)

    async def main() -> None:
        running: Any = Running()
        running.peers = {"old": near}
        at: list[str] = []
        candidates: Any = SimpleNamespace(
            looks=lambda _used: _never(),
            are_announced=are_announced,
            are_at=lambda peers: at.extend(peer.address for peer in peers),
        )
        joining = Joining(candidates, running, running)
        await joining._look_at([])
        running.answers = (object(),)
        looking = asyncio.create_task(joining._look_at([both]))
        while are_announced and not somebody_waits_for(0.2):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not running.moves
        running.answers = ()
        let_pass(0.2)
        await looking
        await joining._look_at([both])
        assert (measured, at) == (([slow], [fast]) if are_announced else ([], []))
        assert running.moves == (["a faster network leads to old"] if are_announced else [])
        await joining.aclose()

    asyncio.run(main())
