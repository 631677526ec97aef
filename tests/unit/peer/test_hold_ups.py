"""One member, whatever it sends or leaves unread, keeps others waiting for a moment only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from edge import transport
from edge.errors import CapacityError
from edge.membership.roles import USE
from edge.memory.ledger import Baseline, Ledger
from edge.partition import Plan
from edge.peer.connection import Connection
from edge.peer.resources import MAX_LINKS, PeerResources
from edge.peer.settings import PeerSettings
from edge.protocol.assignment import Assignment
from edge.protocol.frame_codec import Call, to_frame
from edge.protocol.heartbeat import Hearing
from edge.protocol.kept_files import Keep
from edge.protocol.measurements import MemoryRate, Profile
from edge.protocol.peer_frames import SetMemory
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import MEMBER, Frame, Member, MemoryChannel, TransportError, WireRule
from edge.transport.channel import MEMORY_QUEUE_FRAMES
from edge.transport.frame import encode
from edge.transport.tcp_channel import TcpChannel
from tests.support.plans import solo_assignment
from tests.support.specs import plain_spec

MALLORY, ALICE = (
    Member(id=id * 32, name=name, roles=frozenset({USE}), edition=0)
    for id, name in (("a", "mallory"), ("b", "alice"))
)


def resources_in(folder: Path) -> PeerResources:
    settings = PeerSettings(
        name="p",
        listen="127.0.0.1:0",
        threads=1,
        announce=False,
        cache_root=folder,
        cache_limit_bytes=1 << 20,
        backend="null",
    )
    resources = PeerResources(settings, None)
    resources._ledger = Ledger(
        budget_bytes=1 << 30, baseline=Baseline(process_bytes=0, work_bytes=0)
    )
    return resources


@contextlib.asynccontextmanager
async def connected(
    resources: PeerResources, member: Member, *, silent_after_s: float = 1e9
) -> AsyncIterator[tuple[MemoryChannel, Connection]]:
    ours, theirs = MemoryChannel.pair("coordinator", "peer", first_hello={MEMBER: member})
    connection = Connection(resources, theirs, silent_after_s=silent_after_s)
    serving = asyncio.create_task(connection.run())
    try:
        yield ours, connection
    finally:
        await ours.aclose()
        await serving


CALLS: tuple[Call[object], ...] = (MemoryRate(), SetMemory(bytes=1 << 29))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.kind)
def test_many_connections_of_a_member_are_one_in_turn(
    call: Call[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has asked before, on however many connections."""
    answered: list[str] = []

    async def main() -> None:
        resources = resources_in(tmp_path)
        turns = resources.measurement if isinstance(call, MemoryRate) else resources.loading
        turn = turns.turn

        @contextlib.asynccontextmanager
        async def seen(owner: object) -> AsyncIterator[None]:
            async with turn(owner):
                answered.append(str(owner)[0])
                yield

        monkeypatch.setattr(turns, "turn", seen)
        async with contextlib.AsyncExitStack() as stack:
            asked = []
            async with turn("another"):
                for member in (*[MALLORY] * 12, ALICE):
                    ours, _ = await stack.enter_async_context(connected(resources, member))
                    await ours.send(to_frame(call.kind, call, call=1))
                    asked.append(ours)
                    for _ in range(50):
                        await asyncio.sleep(0)
            async with asyncio.timeout(60):
                while "b" not in answered:  # noqa: ASYNC110 - threads do the work
                    await asyncio.sleep(0.001)
            assert answered.index("b") <= 1
        await resources.aclose()

    asyncio.run(main())


def test_who_reads_no_answers_is_hung_up_on(tmp_path: Path) -> None:
    """The room of what it has asked, and of what it is told, is others', too."""

    async def main() -> None:
        resources = resources_in(tmp_path)
        async with connected(resources, MALLORY, silent_after_s=0.01) as (ours, connection):
            connection._hearing = Hearing(connection._channel, silent_after_s=1e9)

            async def ask_on() -> None:
                while True:
                    await ours.send(to_frame(Keep.kind, Keep(), call=1))

            with pytest.raises(TransportError):
                await ask_on()
            assert resources.large_answers.held == 0
            assert len(ours._incoming.frames) <= MEMORY_QUEUE_FRAMES
        assert resources.frames.held == resources.small_frames.held == 0
        await resources.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("what", ["header", "payload"])
def test_a_large_frame_that_comes_too_slowly_is_not_waited_for(what: str, tmp_path: Path) -> None:
    """A byte now and then is a sign of life, but no way to keep the room that others wait for."""
    large = Frame(Profile.kind, {"call": 1, "x": "x" * 200_000})
    if what == "payload":
        large = Frame(Keep.kind, {"call": 1}, bytes(900_000))
    wire = b"".join(bytes(each) for each in encode(large))

    async def main() -> None:
        resources = resources_in(tmp_path)
        over = asyncio.Event()

        async def serve(channel: transport.Channel) -> None:
            connection = Connection(resources, channel, silent_after_s=0.05)
            connection._hearing = Hearing(channel, silent_after_s=1e9)
            await connection.run()
            over.set()

        async def refuse(link: transport.Link, _hello: object) -> None:
            link.close()

        listener = await transport.listen(
            "127.0.0.1:0", hello={}, credentials=None, on_channel=serve, on_link=refuse
        )
        try:
            channel = await transport.connect(listener.addresses[0], hello={}, credentials=None)
            assert isinstance(channel, TcpChannel)
            begun, rest = wire[:100_000], wire[100_000:]
            await channel._connection.send_all([begun])
            held = 0
            with contextlib.suppress(TransportError):
                for position in range(3000):
                    await channel._connection.send_all([rest[position : position + 1]])
                    held = max(held, resources.frames.held)
                    await asyncio.sleep(0.001)
                    if over.is_set():
                        break
                else:
                    pytest.fail("it is waited for")
            assert held > 0
            await over.wait()  # who sends may learn of it first
            await channel.aclose()
        finally:
            await listener.aclose()
        assert resources.frames.held == 0
        await resources.aclose()

    asyncio.run(main())


def test_the_links_of_a_members_plans_have_a_limit(tmp_path: Path) -> None:
    """It may be at their other ends itself: each is a descriptor here, and memory of records."""

    async def main() -> None:
        resources = resources_in(tmp_path)
        async with connected(resources, MALLORY) as (_, connection):
            most = last_of_pipeline(MAX_LINKS + 1)
            with pytest.raises(CapacityError, match=f"may have {MAX_LINKS} links between shards"):
                connection._sessions._take_shard(last_of_pipeline(MAX_LINKS + 2))
            connection._sessions._take_shard(most)
            with pytest.raises(CapacityError):
                connection._sessions._take_shard(last_of_pipeline(2))
            async with connected(resources, ALICE) as (_, other):
                other._sessions._take_shard(last_of_pipeline(2))
                other._sessions._give_back_shard(last_of_pipeline(2))
            assert resources.shards.held == 1
            connection._sessions._give_back_shard(most)
            assert resources.links.held == resources.shards.held == 0
        await resources.aclose()

    asyncio.run(main())


def last_of_pipeline(stages: int) -> Assignment:
    """Which is linked with all others."""
    limits = StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8)
    spec = plain_spec(num_layers=4 * stages)
    rule = (WireRule(),)
    two = solo_assignment(spec, limits, WireRules(sums=rule * 2, hops=rule), layout="pipeline_2")
    first, last = two.plan.stages
    plan = Plan(
        model=two.plan.model,
        version=two.plan.version,
        stages=(*(replace(first, layers=range(n, n + 1)) for n in range(stages - 1)), last),
    )
    return replace(
        two,
        plan=plan,
        stage=stages - 1,
        wire_rules=WireRules(sums=rule * stages, hops=rule * (stages - 1)),
    )
