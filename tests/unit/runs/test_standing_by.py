"""A device without a part loads what it would take over, and has it when that is needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edge
from edge.demos.bundled import MODEL
from edge.errors import CapacityError
from edge.peer.daemon import PeerDaemon
from edge.planning.standing_by import taken_over
from edge.protocol.topology import Seat
from edge.runs.delivery import Delivered, Delivery, make_ready
from edge.runs.recovery.standing_by import StandingBy
from tests.support.null_peers import null_peers
from tests.support.plans import bundled_plan

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_is_taken_over_is_what_others_get() -> None:
    before = bundled_plan("pipeline_2", devices=["a", "b"])
    assert taken_over(before, bundled_plan("pipeline_2", devices=["a", "c"])) == [("c", (1, 0))]
    assert taken_over(before, bundled_plan("solo", devices=["b"])) == []


def parked(daemon: PeerDaemon) -> list[Any]:
    return [each.program for each in daemon.resources._parked._parked]


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not seen():  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.01)


def attendant(model: edge.AsyncModel) -> StandingBy:
    (found,) = model._held.attendants
    assert isinstance(found, StandingBy)
    return found


@contextlib.asynccontextmanager
async def standing_by(folder: Path) -> AsyncIterator[tuple[edge.AsyncModel, list[PeerDaemon]]]:
    """A model on the first of two peers, which the second has ready."""
    async with null_peers(folder, 2) as daemons:
        addresses = [each.resources.addresses[0] for each in daemons]
        async with await edge.AsyncCluster.connect(addresses, insecure=True) as cluster:
            ids = {peer.address: peer.id for peer in cluster.peers}
            plan = bundled_plan("solo", devices=[ids[addresses[0]]])
            load = cluster.load(MODEL, plan=plan, dtype="int8", standby="kv", replan="off")
            async with await load as model:
                await until(lambda: bool(attendant(model)._repairs))
                yield model, daemons
            await until(lambda: not daemons[1].resources.ledger.uses)


def test_the_shard_is_in_memory_before_it_is_needed(tmp_path: Path) -> None:
    async def main() -> None:
        async with standing_by(tmp_path) as (model, (first, second)):
            (ready,) = parked(second)
            before = await model.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
            await first.aclose()
            await until(lambda: bool(model.recoveries))
            (session,) = second.resources.sessions.values()
            assert session.shard._program is ready
            after = await model.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
            assert after.token_ids == before.token_ids

    asyncio.run(main())


def test_a_look_that_fails_is_logged_and_followed_by_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edge.runs.recovery.standing_by.SETTLES_S", 0.0)
    monkeypatch.setattr("edge.runs.recovery.standing_by.LOOK_EVERY_S", 0.0)

    async def main() -> None:
        looks, is_over = 0, asyncio.Event()

        async def look(_self: StandingBy) -> None:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise ValueError("not foreseen")
            is_over.set()

        monkeypatch.setattr(StandingBy, "_look", look)
        reloading: Any = SimpleNamespace(changed=asyncio.Event())
        model: Any = SimpleNamespace(failure=None, is_recovering=False)
        found = StandingBy(reloading, model)
        await is_over.wait()
        await found.aclose()

    asyncio.run(main())
    assert "not foreseen" in caplog.text


def test_nobody_is_asked_where_all_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with standing_by(tmp_path) as (model, (first, _second)):

            async def asked(*_args: object, **_named: object) -> None:
                raise AssertionError("somebody was asked who is there")

            monkeypatch.setattr("edge.runs.recovery.reloading.describe_all", asked)
            await first.aclose()
            await until(lambda: bool(model.recoveries) or model.is_over)
            assert not model.is_over

    asyncio.run(main())


def test_where_it_cannot_be_used_all_are_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with standing_by(tmp_path) as (model, (first, second)):
            (ready,) = parked(second)
            for client in attendant(model)._clients:
                await client.aclose()
            await first.aclose()
            await until(lambda: bool(model.recoveries))
            (session,) = second.resources.sessions.values()
            assert session.shard._program is ready, "it stays for a moment, whoever comes for it"

    asyncio.run(main())


def test_who_has_no_room_for_one_part_has_another_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def has_room(delivery: Delivery, seat: Seat, *where: Any) -> Delivered:
        if seat == (0, 0):
            raise CapacityError("no room")
        return await make_ready(delivery, seat, *where)

    monkeypatch.setattr("edge.runs.recovery.standing_by.make_ready", has_room)

    async def main() -> None:
        async with null_peers(tmp_path, 3) as daemons:
            addresses = [each.resources.addresses[0] for each in daemons]
            async with await edge.AsyncCluster.connect(addresses, insecure=True) as cluster:
                ids = {peer.address: peer.id for peer in cluster.peers}
                running = [ids[address] for address in addresses[:2]]
                plan = bundled_plan("tensor_2", devices=running)
                load = cluster.load(MODEL, plan=plan, dtype="int8", standby="kv", replan="off")
                async with await load as model:
                    await until(lambda: bool(attendant(model)._repairs))
                    assert list(attendant(model)._repairs) == running[1:]

    asyncio.run(main())


def test_nothing_is_kept_for_who_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.peer.parked_programs.PARKED_S", 0.0)

    async def main() -> None:
        async with standing_by(tmp_path):
            pass

    asyncio.run(main())


def test_nothing_is_left_open_by_who_ends_as_it_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with standing_by(tmp_path) as (model, _daemons):
            found, lets_go = attendant(model), asyncio.Event()
            (client,) = found._clients
            aclose = client.aclose

            async def cut_off() -> None:
                monkeypatch.undo()
                monkeypatch.setattr("edge.peer.parked_programs.PARKED_S", 0.0)
                lets_go.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(client, "aclose", cut_off)
            found._lost()
            await lets_go.wait()
            await found.aclose()
            assert client.aclose == aclose
            assert client._ended is not None
            assert all(task.done() for task in client._tasks)

    asyncio.run(main())


def test_who_was_away_for_a_moment_stands_by_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody looks for peers that join."""
    monkeypatch.setattr("edge.runs.recovery.standing_by.SETTLES_S", 0.0)
    monkeypatch.setattr("edge.runs.recovery.standing_by.LOOK_EVERY_S", 0.01)

    async def main() -> None:
        async with standing_by(tmp_path) as (model, (_first, second)):
            found, peer = attendant(model), second.resources
            settings = replace(peer.settings, listen=peer.addresses[0])
            await second.aclose()
            await until(lambda: bool(found._away))
            assert not found._repairs
            again = PeerDaemon(settings, None, peer.id)
            await again.start()
            try:
                await until(lambda: bool(found._repairs))
                (ready,) = parked(again)
                looked = found._clients
                for _ in range(3):
                    found._reloading.changed.set()
                    await until(lambda: not found._reloading.changed.is_set())
                assert (parked(again), found._clients) == ([ready], looked)
            finally:
                await model.aclose()
                await again.aclose()

    asyncio.run(main())
