"""Peers that come and go: who counts again, and when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from edge.errors import NetworkError
from edge.membership.presence import Presences
from edge.protocol.discovery import Look
from edge.protocol.peer_info import PeerInfo, each_once
from edge.runs.recovery import candidates as candidates_module
from edge.runs.recovery.candidates import (
    FIRST_WAIT_S,
    MOST_WAIT_S,
    Candidates,
    Used,
    waits_s,
)
from tests.support.passing_time import let_pass
from tests.support.peer_infos import peer_info

A, B = peer_info("a", address="10.0.0.1:5"), peer_info("b", address="10.0.0.2:5")


def test_who_was_lost_twice_has_to_be_there_for_a_while() -> None:
    answers: list[list[PeerInfo]] = [
        [B],
        [],
        [],
        [replace(B, epoch=2)],
        [replace(B, epoch=3)],
        [replace(B, epoch=3)],
    ]

    async def watch(used: Used, presences: Presences, _every_s: float) -> AsyncGenerator[Look]:
        for found in answers:
            yield Look(peers=each_once(found, presences, used())[0], silent=frozenset())

    async def main() -> list[list[int]]:
        candidates = Candidates([A, B], watch=watch)
        seen = []
        async with contextlib.aclosing(candidates.looks(lambda: [A])) as looks:
            async for there in looks:
                seen.append([peer.epoch for peer in there])
                if len(seen) == 5:
                    let_pass(FIRST_WAIT_S)
        assert [peer.epoch for peer in candidates.peers] == [1, 3]
        return seen

    assert asyncio.run(main()) == [[1], [], [], [2], [], [3]]


def test_who_has_the_keys_of_one_in_use_is_no_candidate() -> None:
    copy = replace(A, name="copy", address="10.0.0.9:5", addresses=("10.0.0.9:5",), epoch=9)

    async def watch(used: Used, presences: Presences, _every_s: float) -> AsyncGenerator[Look]:
        for _ in range(3):
            yield Look(peers=each_once([copy], presences, used())[0], silent=frozenset())

    async def main() -> None:
        candidates = Candidates([A, B], watch=watch)
        in_use = [A]
        async with contextlib.aclosing(candidates.looks(lambda: in_use)) as looks:
            assert await anext(looks) == ()
            assert candidates.peers[0].address == A.address
            in_use.clear()
            candidates.lost(["a"])
            (found,) = await anext(looks)
            assert found.address == copy.address

    asyncio.run(main())


def test_a_look_that_fails_is_logged_and_followed_by_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(candidates_module, "LOOK_EVERY_S", 0.0)
    watched: list[int] = []

    async def watch(used: Used, presences: Presences, _every_s: float) -> AsyncGenerator[Look]:
        watched.append(1)
        yield Look(peers=each_once([B], presences, used())[0], silent=frozenset())
        if len(watched) == 1:
            raise ValueError("not foreseen")
        raise NetworkError("this device cannot look")

    async def main() -> None:
        async with contextlib.aclosing(Candidates([A, B], watch=watch).looks(list)) as looks:
            assert [peer.id for peer in await anext(looks)] == ["b"]
            assert [peer.id for peer in await anext(looks)] == ["b"]
            with pytest.raises(NetworkError, match="cannot look"):
                await anext(looks)

    asyncio.run(main())
    assert "not foreseen" in caplog.text


def test_the_wait_grows_with_each_loss_up_to_a_limit() -> None:
    assert [waits_s(losses) for losses in range(5)] == [0.0, 0.0, 30.0, 90.0, 270.0]
    assert waits_s(10) == MOST_WAIT_S
