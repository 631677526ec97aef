"""Shards that wait to be loaded again: who gets them, and what they give way to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from edge.backends.interface import StageProgram
from edge.errors import CapacityError
from edge.memory.ledger import Baseline, Ledger, Use
from edge.peer import parked_programs
from edge.peer.resources import PeerResources
from edge.peer.settings import PeerSettings
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from tests.support.plans import solo_assignment
from tests.support.specs import plain_spec

ROOM_BYTES = 1 << 30
USE = Use(weight_bytes=600 << 20, kv_bytes=100 << 20)
ASSIGNMENT = solo_assignment(
    plain_spec(),
    StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8),
    WireRules(sums=(WireRule(),), hops=()),
)


class Program:
    """Stands for the graphs of a shard."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def with_a_parked_shard(
    folder: Path, then: Callable[[PeerResources, Program, str], Awaitable[None]]
) -> Program:
    program = Program()

    async def main() -> None:
        settings = PeerSettings(
            name="p",
            listen="127.0.0.1:0",
            threads=1,
            announce=False,
            cache_root=folder,
            cache_limit_bytes=1 << 20,
        )
        resources = PeerResources(settings, None)
        resources._ledger = Ledger(
            budget_bytes=ROOM_BYTES, baseline=Baseline(process_bytes=0, work_bytes=0)
        )
        await resources.reserve(ASSIGNMENT.key, USE)
        name = resources.park("me", ASSIGNMENT, cast(StageProgram, program))
        assert name is not None
        assert resources.ledger.free_bytes == ROOM_BYTES - USE.weight_bytes
        await then(resources, program, name)
        await resources.aclose()

    asyncio.run(main())
    return program


def test_its_owner_gets_it_for_the_same_shard_of_another_session(tmp_path: Path) -> None:
    async def then(resources: PeerResources, program: Program, _name: str) -> None:
        again = replace(ASSIGNMENT, session="another")
        other = replace(ASSIGNMENT, manifest_digest="another")
        assert resources.parked("somebody", again) is None
        assert resources.parked("me", other) is None
        found: Any = resources.parked("me", again)
        assert found is program
        assert resources.ledger.free_bytes == ROOM_BYTES
        assert resources.parked("me", again) is None

    assert with_a_parked_shard(tmp_path, then).closed == 0


def test_it_gives_way(tmp_path: Path) -> None:
    async def then(resources: PeerResources, program: Program, _name: str) -> None:
        await resources.reserve("small", Use(weight_bytes=100 << 20))
        assert program.closed == 0
        await resources.reserve("large", USE)
        assert program.closed == 1
        with pytest.raises(CapacityError):
            await resources.reserve("larger", USE)

    with_a_parked_shard(tmp_path, then)


def test_it_gives_way_also_to_who_goes_again(tmp_path: Path) -> None:
    async def then(resources: PeerResources, program: Program, _name: str) -> None:
        asking = asyncio.create_task(resources.reserve("large", USE))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert program.closed == 1
        assert resources.ledger.free_bytes == ROOM_BYTES

    with_a_parked_shard(tmp_path, then)


def test_it_does_not_wait_for_ever_once_its_owner_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked_programs, "PARKED_S", 0.0)

    async def then(resources: PeerResources, program: Program, name: str) -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        assert resources.ledger.uses, "whoever parked it is there"
        resources.let_go(name)
        async with asyncio.timeout(60):
            while resources.ledger.uses:  # noqa: ASYNC110  nobody is told
                await asyncio.sleep(0)
        assert program.closed == 1

    with_a_parked_shard(tmp_path, then)


def test_a_peer_that_ends_keeps_nothing(tmp_path: Path) -> None:
    async def then(resources: PeerResources, _program: Program, _name: str) -> None:
        resources.leaving.set()
        other = replace(ASSIGNMENT, session="another")
        await resources.reserve(other.key, Use(weight_bytes=1))
        assert not resources.park("me", other, cast(StageProgram, Program()))

    assert with_a_parked_shard(tmp_path, then).closed == 1
