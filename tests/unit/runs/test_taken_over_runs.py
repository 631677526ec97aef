"""A run that another coordinator goes on with: what the earlier one had is freed, and it is
refused. Real peers of this process that compute nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from edge.errors import RequestError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.peer import connection
from edge.peer.daemon import PeerDaemon
from edge.peer.leases import MOST_RUNS, Leases
from edge.protocol.client import PeerClient
from edge.protocol.heartbeat import Hearing
from edge.protocol.lease import Lease
from edge.protocol.peer_frames import TakeOver
from edge.protocol.peer_info import describe_peer, take_over
from edge.protocol.session_frames import Measure, Observed
from edge.protocol.step import StepLimits
from edge.protocol.step_frames import Finish
from edge.runs.run import PlanRun
from edge.transport import Channel
from tests.support.null_peers import load, null_peers, request
from tests.support.scripted_peers import Owner, Results

LIMITS = StepLimits(context_tokens=64, chunk_tokens=16, requests=8, cached_tokens=64)
PATIENCE_S = 120.0
"""Only a test that hangs takes as long."""
REPLACED = r"another coordinator has taken over this run \(term 2\)"


def sessions(keys: Iterable[str]) -> set[str]:
    """Of shards."""
    return {key.partition("/")[0] for key in keys}


async def freed(daemons: Sequence[PeerDaemon], *, but: PlanRun | None = None) -> None:
    """Nothing of anybody is held, or only what this model holds: memory, shards, leases."""
    left = set() if but is None else {but.session}
    async with asyncio.timeout(PATIENCE_S):
        for daemon in daemons:
            peer = daemon.resources
            while sessions(peer.sessions) != left or sessions(peer.ledger.uses) != left:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert peer.shards.held == len(left)
            assert sessions(peer.leases._open) == left
            if not left:
                assert peer.describe().free_bytes == peer.ledger.room_bytes


async def hung_up(daemons: Sequence[PeerDaemon]) -> None:
    """What was offered goes with the connection."""
    async with asyncio.timeout(PATIENCE_S):
        for daemon in daemons:
            while daemon.resources.offers.held or daemon.resources.manifest_entries.held:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def nothing_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that wait until nothing is held."""
    monkeypatch.setattr("edge.peer.parked_programs.PARKED_S", 0.0)


async def answer(model: PlanRun) -> list[int]:
    sink = Results()
    model.submit(request([5, 6, 7], sink, new_tokens=6, parameters=SamplingParameters()))
    async with asyncio.timeout(PATIENCE_S):
        await sink.ended.wait()
    return sink.tokens


@pytest.mark.parametrize("first", ["describes", "loads"])
def test_a_later_term_ends_the_earlier(first: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons:
            older, newer = Lease(run="r", term=1), Lease(run="r", term=2)
            owners = [Owner() for _ in range(3)]
            old = await load(daemons, "tensor_2", LIMITS, owners[0], tmp_path, older)
            beside = await load(daemons, "tensor_2", LIMITS, owners[1], tmp_path)  # another run
            expected = await answer(beside)
            sink = Results()
            old.submit(request([1], sink, new_tokens=60, parameters=SamplingParameters()))
            if first == "describes":
                for daemon in daemons:
                    peer = await describe_peer(daemon.resources.addresses[0], None)
                    await take_over(peer, newer)
                    assert old.session not in sessions(daemon.resources.ledger.uses)
            new = await load(daemons, "tensor_2", LIMITS, owners[2], tmp_path, newer)
            async with asyncio.timeout(PATIENCE_S):
                await old.failed.wait()
            with pytest.raises(RequestError, match=REPLACED):
                raise old.failure or AssertionError
            with pytest.raises(RequestError, match=REPLACED):
                await load(daemons, "tensor_2", LIMITS, Owner(), tmp_path, older)
            assert await answer(new) == await answer(beside) == expected
            await old.aclose()
            await beside.aclose()
            await freed(daemons, but=new)
            await new.aclose()
            await freed(daemons)
            await hung_up(daemons)

    asyncio.run(main())


@pytest.mark.usefixtures("nothing_parked")
def test_a_replaced_coordinator_is_refused_whatever_it_asks(tmp_path: Path) -> None:
    async def main() -> None:
        async with null_peers(tmp_path, 1) as daemons:
            lease = Lease(run="r", term=1)
            old = await load(daemons, "solo", LIMITS, Owner(), tmp_path, lease)
            (client,) = old._connections.peers
            told: list[object] = []
            client._on_event = lambda _client, event: told.append(event)  # it does not listen
            peer = await describe_peer(client.address, None)
            await take_over(peer, Lease(run="r", term=2))
            for call in (Measure(session=old.session), Observed(session=old.session, run=0)):
                with pytest.raises(RequestError, match=REPLACED):
                    await client.call(call)
            await client.post(Finish(session=old.session, request="x"))
            with pytest.raises(RequestError, match=REPLACED):
                await client.call(TakeOver(lease=lease))
            assert len(told) == 2, "at once, and again for the post"
            await freed(daemons)
            await old.aclose()

    asyncio.run(main())


def test_what_is_being_freed_is_waited_for(tmp_path: Path) -> None:
    """Whose coordinator has just gone: another plan is made from what peers say is free."""
    may_end = threading.Event()

    async def main() -> None:
        async with null_peers(tmp_path, 1) as (daemon,):
            peer, lease = daemon.resources, Lease(run="r", term=1)
            old = await load([daemon], "solo", LIMITS, Owner(), tmp_path, lease)
            (hosted,) = peer.sessions.values()
            hosted.shard._thread.post(lambda: (may_end.wait(), None)[1])
            try:
                await old.abort()
                async with asyncio.timeout(PATIENCE_S):
                    while not hosted._is_closed:  # noqa: ASYNC110  nobody is told
                        await asyncio.sleep(0.001)
                taking = asyncio.create_task(peer.leases.take_over(None, Lease(run="r", term=2)))
                for _ in range(50):
                    await asyncio.sleep(0)
                assert not taking.done()
            finally:
                may_end.set()
            await taking
            assert not peer.ledger.uses

    asyncio.run(main())


@pytest.mark.usefixtures("nothing_parked")
@pytest.mark.parametrize("moment", ["idle", "in a step"])
def test_a_coordinator_that_falls_silent_frees_everything(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped, or whose device was cut off: its connections stay open."""
    heard: list[Hearing] = []

    def hearing(channel: Channel, *, silent_after_s: float) -> Hearing:
        heard.append(Hearing(channel, silent_after_s=silent_after_s))
        return heard[-1]

    monkeypatch.setattr(connection, "Hearing", hearing)

    async def main() -> None:
        async with null_peers(tmp_path, 2) as daemons:
            owner = Owner()
            model = await load(daemons, "pipeline_2", LIMITS, owner, tmp_path)
            sink = Results()
            if moment == "in a step":
                model.submit(request([1], sink, new_tokens=60, parameters=SamplingParameters()))
                await sink.begun.wait()
                model._pump_task.cancel()  # type: ignore[union-attr]
            for client in model._connections.peers:
                silence(client)
            for each in heard:  # not before: however slow this machine is, it was heard until now
                each.silent_after_s = 0.5
            await freed(daemons)
            await hung_up(daemons)
            await model.aclose()

    asyncio.run(main())


def test_who_was_cut_off_has_freed_what_it_held_itself(tmp_path: Path) -> None:
    """Over another connection, while the one that brings nothing is open still: a plan is made from
    what peers say is free."""

    async def main() -> None:
        async with null_peers(tmp_path, 1) as daemons:
            lease, owner = Lease(run="r"), Owner()
            model = await load(daemons, "solo", LIMITS, owner, tmp_path, lease)
            beside = await load(daemons, "solo", LIMITS, Owner(), tmp_path, lease)
            peer = await describe_peer(daemons[0].resources.addresses[0], None)
            await take_over(peer, lease)
            assert {model.session, beside.session} == sessions(daemons[0].resources.sessions)
            (client,) = model._connections.peers
            silence(client)
            async with asyncio.timeout(PATIENCE_S):
                while not model.failed.is_set():
                    await take_over(peer, lease)
            with pytest.raises(RequestError, match="was cut off and has reconnected"):
                raise model.failure or AssertionError
            resources = daemons[0].resources
            assert sessions(resources.sessions) == {beside.session}
            room = resources.ledger.room_bytes
            held = resources.ledger.uses[next(iter(resources.sessions))].total
            assert resources.describe().free_bytes == room - held, "what is parked gives way"
            await model.aclose()
            await beside.aclose()

    asyncio.run(main())


def silence(client: PeerClient) -> None:
    """It shows no life any more."""
    (showing,) = (task for task in client._tasks if "show_life" in repr(task.get_coro()))
    showing.cancel()


def test_terms_are_of_one_owner_and_forgotten_last() -> None:
    async def main() -> None:
        leases, ended = Leases(), []

        async def end(error: RequestError) -> None:
            ended.append(str(error))

        await leases.take("a", Lease(run="r", term=3), "s", end, silent_s=lambda: 0.0)
        await leases.take("a", Lease(run="r", term=3), "beside it", end, silent_s=lambda: 0.0)
        await leases.take("b", Lease(run="r", term=1), "t", end, silent_s=lambda: 0.0)
        for number in range(2 * MOST_RUNS):
            await leases.take_over("a", Lease(run=f"other {number}"))
        with pytest.raises(RequestError, match="term 3"):
            leases.check("a", Lease(run="r", term=2))
        assert ended == []
        await leases.take_over("a", Lease(run="r", term=4))
        assert len(ended) == 2
        leases.check("b", Lease(run="r", term=1))
        assert len(leases._terms["a"]) == MOST_RUNS

    asyncio.run(main())


def test_who_goes_while_it_waits_for_room_has_taken_nothing() -> None:
    async def main() -> None:
        leases, ends = Leases(), asyncio.Event()

        async def end(_error: RequestError) -> None:
            ends.set()
            await asyncio.Event().wait()

        await leases.take("a", Lease(run="r", term=1), "old", end, silent_s=lambda: 0.0)
        lease = Lease(run="r", term=2)
        taking = asyncio.create_task(leases.take("a", lease, "new", end, silent_s=lambda: 0.0))
        await ends.wait()
        taking.cancel()
        await asyncio.wait([taking])
        assert not leases._open

    asyncio.run(main())


def test_a_session_that_was_cut_off_makes_room_for_the_one_that_replaces_it() -> None:
    """Nobody waits until its connection has been silent for long enough to be closed."""

    async def main() -> None:
        leases, ended = Leases(), []
        silent_s = dict.fromkeys(("cut off", "heard", "another's", "another run's"), 2.6)
        silent_s["heard"] = 0.4

        async def taken(session: str, owner: str = "a", run: str = "r") -> None:
            async def end(_error: RequestError) -> None:
                ended.append(session)

            lease = Lease(run=run)
            await leases.take(owner, lease, session, end, silent_s=lambda: silent_s[session])

        await taken("heard")
        await taken("another's", owner="b")
        await taken("another run's", run="q")
        await taken("cut off")
        silent_s["new"] = 0.0
        ended.clear()
        await taken("new")
        assert ended == ["cut off"]
        await taken("heard")
        assert ended == ["cut off"], "it was over"
        silent_s["heard"] = 2.6
        await leases.take_over("a", Lease(run="r"))
        assert ended == ["cut off", "heard"]

    asyncio.run(main())
