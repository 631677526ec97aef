"""What a connection does with frames: calls one after the other, posts at once, and neither without
end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import CapacityError, EdgeError, ProtocolError
from edge.host.disk_rate import TEMPORARY
from edge.membership.identity import Identity
from edge.membership.membership import Membership, credentials
from edge.membership.roles import LEND, USE
from edge.memory.kv_budget import KvRoom
from edge.memory.ledger import MEASURING, Baseline, Ledger, Use
from edge.memory.model_sizes import model_facts
from edge.offload import Manifest
from edge.partition import Workload, memory_use
from edge.peer.access import UserLimits
from edge.peer.backlog import MOST_BACKLOG_BYTES
from edge.peer.connection import Connection
from edge.peer.hosted_shard import MAX_REQUESTS_UNDER_WAY, HostedShard
from edge.peer.profiling_calls import ProfilingCalls
from edge.peer.resources import PeerResources
from edge.peer.settings import PeerSettings
from edge.protocol.client import PeerClient
from edge.protocol.draft_frames import DraftSource
from edge.protocol.fields import token_bytes
from edge.protocol.frame_codec import SMALL, from_frame, to_frame
from edge.protocol.heartbeat import ALIVE
from edge.protocol.measurements import MemoryRate
from edge.protocol.peer_frames import Describe
from edge.protocol.prefix_frames import MatchPrefix
from edge.protocol.session_frames import Close, Connect
from edge.protocol.step import MAX_REQUESTS, Step, StepEntry, StepLimits
from edge.protocol.step_frames import Finish, RunStep
from edge.protocol.topology import Place
from edge.protocol.wire_rules import WireRules
from edge.transport import MEMBER, Frame, Member, MemoryChannel, TransportError, WireRule
from tests.support.formats import uniform_format
from tests.support.plans import make_plan, solo_assignment, streaming
from tests.support.specs import plain_spec
from tests.support.transport_pairs import link_pair

LIMITS = StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8)
FINISH = to_frame("finish", Finish(session="s", request="r"))


def settings(folder: Path) -> PeerSettings:
    return PeerSettings(
        name="p",
        listen="127.0.0.1:0",
        threads=1,
        announce=False,
        cache_root=folder,
        cache_limit_bytes=1 << 20,
    )


async def told(channel: MemoryChannel) -> Frame:
    """The next frame that is more than a sign of life."""
    while True:
        frame = await channel.receive()
        if frame.kind != ALIVE.kind:
            return frame


def talk(
    folder: Path, coordinate: Callable[[MemoryChannel, PeerResources, Connection], Awaitable[None]]
) -> None:
    """With a peer whose back end is never opened."""

    async def main() -> None:
        resources = PeerResources(settings(folder), None)
        ours, theirs = MemoryChannel.pair("coordinator", "peer")
        connection = Connection(resources, theirs, silent_after_s=1e9)
        serving = asyncio.create_task(connection.run())
        try:
            await coordinate(ours, resources, connection)
        finally:
            await ours.aclose()
            await serving
            await resources.aclose()

    asyncio.run(main())


def test_a_post_does_not_wait_for_a_call_that_is_being_answered(tmp_path: Path) -> None:
    async def coordinate(
        channel: MemoryChannel, resources: PeerResources, _connection: Connection
    ) -> None:
        async with resources.measurement.turn("another"):  # the call waits until this is free
            await channel.send(to_frame("memory_rate", MemoryRate(), call=1))
            await channel.send(FINISH)
            refused = await told(channel)
            assert (refused.kind, refused.header.get("call")) == ("failed", None)
            assert "not open" in refused.header["message"]

    talk(tmp_path, coordinate)


def test_who_sends_nonsense_and_does_not_listen_is_not_read_any_more(tmp_path: Path) -> None:
    count = 1000

    async def coordinate(
        channel: MemoryChannel, _resources: PeerResources, _connection: Connection
    ) -> None:
        async def flood() -> None:
            for _ in range(count):
                await channel.send(FINISH)

        flooding = asyncio.create_task(flood())
        for _ in range(20 * count):
            await asyncio.sleep(0)
        assert not flooding.done()
        for _ in range(count):
            assert (await told(channel)).kind == "failed"
        await flooding

    talk(tmp_path, coordinate)


LONG = 1 << 16
"""Tokens of a prompt."""
LOOK_FOR = to_frame(
    "match_prefix", MatchPrefix(session="s", request="r", prompt=token_bytes([7] * LONG))
)


@pytest.mark.parametrize(
    ("posts", "most"), [((FINISH,), 1000), ((LOOK_FOR, FINISH), 9)], ids=["small", "prompts"]
)
def test_what_waits_for_a_compute_thread_is_bounded(
    posts: tuple[Frame, ...], most: int, tmp_path: Path
) -> None:
    """Who sends more is not read, and nothing is refused: the thread comes to all of it."""
    may_go_on = threading.Event()

    def wait() -> None:
        may_go_on.wait()

    spec = replace(plain_spec(num_layers=1), context_tokens=LONG)
    limits = StepLimits(context_tokens=LONG, chunk_tokens=8, requests=1, cached_tokens=LONG)

    async def coordinate(
        channel: MemoryChannel, resources: PeerResources, connection: Connection
    ) -> None:
        assignment = solo_assignment(spec, limits, WireRules(sums=(WireRule(),), hops=()))
        hosted = HostedShard(
            assignment,
            Manifest(tensors=(), total_bytes=0),
            lambda _event: None,
            KvRoom(memory_bytes=None, disk=None),
        )
        sent = 0

        async def flood() -> None:
            nonlocal sent
            for _ in range(3 * most // len(posts)):
                for post in posts:
                    await channel.send(post)
                    sent += 1

        def read() -> int:
            return sent - len(channel._outgoing.frames)

        try:
            hosted.shard.at_turn(wait)
            connection._sessions._mine["s"] = hosted
            flooding = asyncio.create_task(flood())
            for _ in range(20 * most):
                await asyncio.sleep(0)
            assert 0 < read() <= most
            assert 0 < hosted.backlog.held_bytes <= MOST_BACKLOG_BYTES
            assert (resources.frames.held > 0) == (LOOK_FOR in posts)
            may_go_on.set()
            await flooding
            await channel.send(to_frame("describe", Describe(), call=1))
            while (answer := await told(channel)).header.get("call") != 1:
                assert "describe" in answer.header["message"]
            while hosted.backlog.held_bytes or resources.frames.held:  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0)
        finally:
            may_go_on.set()
            connection._sessions._mine.clear()
            await hosted.aclose()

    talk(tmp_path, coordinate)


def test_the_room_of_what_waits_is_given_back_once_where_its_connection_ends(
    tmp_path: Path,
) -> None:
    may_go_on = threading.Event()

    def wait() -> None:
        may_go_on.wait()

    limits = StepLimits(context_tokens=LONG, chunk_tokens=8, requests=1, cached_tokens=LONG)
    spec = replace(plain_spec(num_layers=1), context_tokens=LONG)

    async def main() -> None:
        resources = PeerResources(settings(tmp_path), None)
        baseline = Baseline(process_bytes=0, work_bytes=0)
        resources._ledger = Ledger(budget_bytes=1 << 30, baseline=baseline)
        ours, theirs = MemoryChannel.pair("coordinator", "peer")
        connection = Connection(resources, theirs, silent_after_s=1e9)
        serving = asyncio.create_task(connection.run())
        assignment = solo_assignment(spec, limits, WireRules(sums=(WireRule(),), hops=()))
        hosted = HostedShard(
            assignment,
            Manifest(tensors=(), total_bytes=0),
            lambda _: None,
            resources.kv_room,
            end_reports=may_go_on.set,  # as the session is ended
        )
        hosted.shard.at_turn(wait)
        connection._sessions._mine["s"] = resources.sessions[assignment.key] = hosted
        connection._sessions._take_shard(assignment)
        await ours.send(LOOK_FOR)
        while not hosted.backlog.held_bytes:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        assert resources.frames.held > 0
        await ours.aclose()
        await serving
        assert resources.frames.held == resources.small_frames.held == 0
        await resources.aclose()

    asyncio.run(main())


def test_what_waits_for_a_session_that_ends_is_refused(tmp_path: Path) -> None:
    """And holds nothing up."""
    may_go_on = threading.Event()

    def wait() -> None:
        may_go_on.wait()

    async def coordinate(
        channel: MemoryChannel, _resources: PeerResources, connection: Connection
    ) -> None:
        assignment = solo_assignment(
            plain_spec(num_layers=1), LIMITS, WireRules(sums=(WireRule(),), hops=())
        )
        hosted = HostedShard(
            assignment,
            Manifest(tensors=(), total_bytes=0),
            lambda _event: None,
            KvRoom(memory_bytes=None, disk=None),
        )
        hosted.shard.at_turn(wait)
        begun = await hosted.backlog.take(MOST_BACKLOG_BYTES)
        hosted.shard.at_turn(begun)
        connection._sessions._mine["s"] = hosted
        await channel.send(FINISH)
        for _ in range(100):
            await asyncio.sleep(0)
        connection._sessions._mine.clear()
        may_go_on.set()
        await hosted.aclose()
        assert "not open" in (await told(channel)).header["message"]
        assert hosted.backlog.held_bytes == 0

    talk(tmp_path, coordinate)


@pytest.mark.parametrize(("requests", "aside"), [(1, False), (MAX_REQUESTS, True)])
def test_a_large_header_of_a_step_is_read_next_to_the_loop(
    requests: int, aside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a MiB takes tens of milliseconds to check; a usual one less than going elsewhere."""
    entries = [
        StepEntry(request=f"r{number}", position=0, tokens=(1,), logit_rows=1)
        for number in range(requests)
    ]
    step = to_frame(RunStep.kind, RunStep(session="s", step=Step(entries=tuple(entries))))
    threads: list[bool] = []

    def read(cls: type[Any], frame: Frame) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return from_frame(cls, frame)

    monkeypatch.setattr("edge.peer.connection.from_frame", read)

    async def coordinate(
        channel: MemoryChannel, resources: PeerResources, connection: Connection
    ) -> None:
        limits = replace(LIMITS, requests=MAX_REQUESTS, cached_tokens=MAX_REQUESTS)
        assignment = solo_assignment(
            plain_spec(num_layers=1), limits, WireRules(sums=(WireRule(),), hops=())
        )
        hosted = HostedShard(
            assignment, Manifest(tensors=(), total_bytes=0), lambda _: None, resources.kv_room
        )
        connection._sessions._mine["s"] = hosted
        try:
            await channel.send(step)
            await channel.send(to_frame(Describe.kind, Describe(), call=1))
            await told(channel)
            assert threads[0] is aside
        finally:
            connection._sessions._mine.clear()
            await hosted.aclose()

    talk(tmp_path, coordinate)


@pytest.mark.parametrize("kind", ["step", "connect", "put_kv"])
def test_without_a_session_its_frames_are_small(kind: str, tmp_path: Path) -> None:
    """A large header costs the loop tens of milliseconds."""

    async def coordinate(
        channel: MemoryChannel, _resources: PeerResources, _connection: Connection
    ) -> None:
        await channel.send(Frame(kind, {"session": "s", "step": "x" * (SMALL.header_bytes + 1)}))
        with pytest.raises(TransportError):
            await told(channel)

    talk(tmp_path, coordinate)


def test_the_end_of_a_session_does_not_wait_for_a_neighbour_that_is_gone(tmp_path: Path) -> None:
    """A device that takes connections and says nothing, as one that is stopped."""
    rules = WireRules(sums=(WireRule(),) * 2, hops=(WireRule(),))
    assignment = solo_assignment(plain_spec(num_layers=2), LIMITS, rules, layout="pipeline_2")

    async def coordinate(
        channel: MemoryChannel, resources: PeerResources, connection: Connection
    ) -> None:
        baseline = Baseline(process_bytes=0, work_bytes=0)
        resources._ledger = Ledger(budget_bytes=1 << 30, baseline=baseline)
        hosted = HostedShard(
            assignment, Manifest(tensors=(), total_bytes=0), lambda _: None, resources.kv_room
        )
        connection._sessions._mine["s"] = resources.sessions[assignment.key] = hosted
        connection._sessions._take_shard(assignment)
        with socket.create_server(("127.0.0.1", 0)) as mute:
            mute.setblocking(False)
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            gone = Place(name="gone", device=None, addresses=(address,))
            connect = Connect(session="s", places={(0, 0): gone, (1, 0): gone})
            await channel.send(to_frame("connect", connect, call=1))
            dialled, _ = await asyncio.get_running_loop().sock_accept(mute)
            with dialled:
                await channel.send(to_frame("close", Close(session="s"), call=2))
                refused = await told(channel)
                assert "closed while its shards linked up" in refused.header["message"]
                assert (await told(channel)).header["call"] == 2
        assert resources.sessions == {}

    talk(tmp_path, coordinate)


def test_nothing_of_a_connection_is_left_when_it_ends(tmp_path: Path) -> None:
    """Not even until the garbage is collected: it may hold payloads."""
    kept: list[weakref.ref[Connection]] = []

    async def coordinate(
        channel: MemoryChannel, _resources: PeerResources, connection: Connection
    ) -> None:
        kept.append(weakref.ref(connection))
        for kind in ("describe?", "finish", "offer"):
            await channel.send(Frame(kind, {"call": 1, "session": "s"}, bytes(50_000)))
        for _ in range(3):
            assert (await told(channel)).kind == "failed"
        await channel.send(Frame("offer", {"call": 1}, bytes(50_000)))

    gc.disable()
    try:
        talk(tmp_path, coordinate)
        assert [each() for each in kept] == [None]
    finally:
        gc.enable()


def test_what_is_under_way_in_a_session_has_a_limit() -> None:
    async def main() -> None:
        spec = plain_spec(num_layers=1)
        hosted = HostedShard(
            # Tokens on a disk that this peer has not count for nothing.
            solo_assignment(
                spec,
                replace(LIMITS, disk_tokens=1 << 50, saved_states=2),
                WireRules(sums=(WireRule(),), hops=()),
            ),
            Manifest(tensors=(), total_bytes=0),
            lambda _event: None,
            KvRoom(memory_bytes=None, disk=None),
        )
        try:
            most_tokens = 6 * LIMITS.cached_tokens
            hosted.announce("long", prompt_tokens=most_tokens)
            with pytest.raises(ProtocolError, match=f"prompts of more than {most_tokens} tokens"):
                hosted.announce("longer", prompt_tokens=1)
            for number in range(MAX_REQUESTS_UNDER_WAY - 1):
                hosted.announce(str(number))
            hosted.announce("0")
            with pytest.raises(ProtocolError, match=f"than {MAX_REQUESTS_UNDER_WAY} requests"):
                hosted.announce("one more")
            hosted.forget("long")
            hosted.announce("one more", prompt_tokens=1)
            with pytest.raises(ProtocolError, match="no place 2 for a saved state"):
                hosted.save_state("0", 4, 2)
        finally:
            await hosted.aclose()

    asyncio.run(main())


def test_who_is_expelled_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a coordinator hangs up on a peer that is."""
    monkeypatch.setattr("edge.peer.connection.TELLS_WITHIN_S", 0.0)
    founded, other = Membership.founded("attic"), Identity.made().id
    now = [founded]
    known = credentials(lambda: now[0])
    member = Member(id=other, name="cellar", roles=frozenset({USE, LEND}), edition=0)

    async def main() -> None:
        resources = PeerResources(settings(tmp_path), known)
        ours, theirs = MemoryChannel.pair("coordinator", "peer", first_hello={MEMBER: member})
        serving = asyncio.create_task(Connection(resources, theirs).run())
        to_peer, _ = MemoryChannel.pair("coordinator", "peer", second_hello={MEMBER: member})
        lost: asyncio.Queue[EdgeError] = asyncio.Queue()
        client = PeerClient(to_peer, "h:1", credentials=known, silent_after_s=1e9, on_event=None)
        client.watch(lost.put_nowait)
        now[0] = founded.expelling(other)
        async with asyncio.timeout(60):
            await serving
            with pytest.raises(TransportError):
                await ours.receive()
            assert "has been expelled" in str(await lost.get())
        await client.aclose()
        await resources.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("is_quick", [True, False])
def test_who_is_expelled_while_it_waits_to_be_let_in_is_told(
    tmp_path: Path, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also who has come just before, and asks only now."""
    monkeypatch.setattr("edge.peer.connection.TELLS_WITHIN_S", 1e9)
    founded, other = Membership.founded("attic"), Identity.made().id
    now = [founded]
    known = credentials(lambda: now[0])
    member = Member(id=other, name="cellar", roles=frozenset({USE, LEND}), edition=0)

    async def main() -> None:
        asked = asyncio.Event()

        async def lets_in(_: Member | None) -> bool:
            await asked.wait()
            return False

        resources = PeerResources(settings(tmp_path), known)
        ours, theirs = MemoryChannel.pair("coordinator", "peer", first_hello={MEMBER: member})
        connection = Connection(resources, theirs, lets_in=lets_in)
        serving = asyncio.create_task(connection.run())
        if is_quick:
            await ours.send(to_frame(Describe.kind, Describe(), call=1))
            while connection._calls_read.empty():  # noqa: ASYNC110
                await asyncio.sleep(0)
        now[0] = founded.expelling(other)
        asked.set()
        if not is_quick:
            for _ in range(100):
                await asyncio.sleep(0)
            await ours.send(to_frame(Describe.kind, Describe(), call=1))
        answer = await told(ours)
        assert (answer.kind, answer.header["call"]) == ("failed", 1)
        assert "expelled from the cluster" in answer.header["message"]
        await serving
        await resources.aclose()

    asyncio.run(main())


def test_two_at_once_do_not_share_a_line_of_the_ledger(tmp_path: Path) -> None:
    async def main() -> None:
        resources = PeerResources(settings(tmp_path), None)
        baseline = Baseline(process_bytes=0, work_bytes=0)
        resources._ledger = Ledger(budget_bytes=1 << 30, baseline=baseline)
        await resources.reserve("s", Use(weight_bytes=1 << 20))
        with pytest.raises(ProtocolError, match="with this name already"):
            await resources.reserve("s", Use(weight_bytes=1 << 20))
        assert resources.ledger.free_bytes == (1 << 30) - (1 << 20)
        await resources.aclose()

    asyncio.run(main())


def taken_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_made_up_model_takes_no_more_of_the_disk_than_of_memory(tmp_path: Path) -> None:
    """A plan can have any number of layers that stay on disk."""
    sizes = {"num_layers": 50, "hidden_size": 256, "ffn_columns": 1024}
    model, format_ = plain_spec(**sizes), uniform_format("int4", 32)
    facts = model_facts(model, format_, name="m", embedding_itemsize=4)
    whole = make_plan(model, "solo", model="m")
    plans = {"in memory": whole, "on disk": streaming(whole, 50)}
    workload = Workload(prompt_tokens=1, output_tokens=0)
    takes = {
        where: [use.weight_bytes for use in memory_use(plan, facts, workload).values()]
        for where, plan in plans.items()
    }

    async def main() -> None:
        resources = PeerResources(replace(settings(tmp_path), backend="ort"), None)
        calls = ProfilingCalls(resources, None, object())
        solo = solo_assignment(model, LIMITS, WireRules(sums=(WireRule(),), hops=()))

        def written(where: str, budget_bytes: int) -> int:
            baseline = Baseline(process_bytes=0, work_bytes=0)
            resources._ledger = Ledger(budget_bytes=budget_bytes, baseline=baseline)
            assignment = replace(solo, plan=plans[where], weight_format=format_)
            with calls.made_up_weights(assignment) as weights:
                return taken_bytes(weights.path)

        (resident_bytes,), (streamed_bytes,) = takes["in memory"], takes["on disk"]
        assert written("in memory", 5 * resident_bytes) > 2 * streamed_bytes
        with pytest.raises(CapacityError, match="lacks the memory"):
            written("on disk", max(8 << 20, 5 * streamed_bytes))
        await resources.aclose()

    asyncio.run(main())
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


def test_measurements_count_as_their_users(tmp_path: Path) -> None:
    kitchen, cellar = (
        Member(id=id * 32, name=name, roles=frozenset({USE}), edition=0)
        for id, name in (("a", "kitchen"), ("b", "cellar"))
    )
    limits = UserLimits(memory_bytes=64 << 20, sessions=1)

    async def main() -> None:
        resources = PeerResources(replace(settings(tmp_path), each_user=limits), None)
        resources._ledger = Ledger(
            budget_bytes=1 << 30, baseline=Baseline(process_bytes=0, work_bytes=0)
        )
        assert resources.free_bytes(kitchen) == 64 << 20
        with pytest.raises(CapacityError, match=r"this measurement needs .*--each-user"):
            await resources.reserve(f"{MEASURING}0", Use(buffer_bytes=80 << 20), kitchen)
        await resources.reserve(f"{MEASURING}1", Use(buffer_bytes=16 << 20), kitchen)
        assert resources.free_bytes(kitchen) == 48 << 20
        assert resources.free_bytes(cellar) == 64 << 20
        await resources.reserve("s", Use(weight_bytes=40 << 20), kitchen)  # one shard is allowed
        assert resources.free_bytes(kitchen) == 8 << 20
        resources.release(f"{MEASURING}1")
        assert resources.free_bytes(kitchen) == 24 << 20
        await resources.aclose()

    asyncio.run(main())


def hosted_shard(layout: str) -> HostedShard:
    two_stages = layout == "pipeline_2"
    rules = WireRules(sums=(WireRule(),) * (1 + two_stages), hops=(WireRule(),) * two_stages)
    return HostedShard(
        solo_assignment(plain_spec(num_layers=2), LIMITS, rules, layout=layout),
        Manifest(tensors=(), total_bytes=0),
        lambda _event: None,
        KvRoom(memory_bytes=None, disk=None),
    )


def test_one_device_may_ask_a_draft_model_once_it_was_named() -> None:
    async def main() -> None:
        hosted = hosted_shard("solo")
        one, other = (
            Member(id=each, name=each, roles=frozenset({LEND}), edition=0) for each in "ab"
        )
        with contextlib.ExitStack() as stack:
            pairs = [stack.enter_context(link_pair("tcp")) for _ in range(3)]
            assert not hosted.offer((0, 0), pairs[0][0], one), "nobody was named"
            hosted.serve_drafts("a")
            assert not hosted.offer((0, 0), pairs[0][0], other)
            assert not hosted.offer((0, 1), pairs[0][0], one)
            assert hosted.offer((0, 0), pairs[0][0], one)
            assert not hosted.offer((0, 0), pairs[1][0], one), "it was named for one link"
            hosted.serve_drafts("b")
            assert hosted.offer((0, 0), pairs[2][0], other)
            with pytest.raises(TransportError):
                pairs[0][1].receive(np.zeros(1))  # the earlier one is over
            await hosted.aclose()
            with pytest.raises(TransportError):
                pairs[2][1].receive(np.zeros(1))

    asyncio.run(main())


def test_drafts_are_of_a_whole_model_and_for_the_shard_that_samples() -> None:
    async def main() -> None:
        hosted = hosted_shard("pipeline_2")
        with pytest.raises(ProtocolError, match="a draft model must be on one device"):
            hosted.serve_drafts("a")
        place = Place(name="n", addresses=("127.0.0.1:1",))
        source = DraftSource(place=place, session="t", context_tokens=9, vocab_size=9, ahead=True)
        with pytest.raises(ProtocolError, match="only the shard that samples"):
            await hosted.ask_drafts(source, "n", None, {})
        await hosted.aclose()
        hosted = hosted_shard("solo")
        await hosted.ask_drafts(None, "n", None, {})
        await hosted.aclose()

    asyncio.run(main())


def test_a_neighbour_may_come_again_before_all_are_there() -> None:
    """It has given up its first link, and nobody else may take its seat."""

    async def main() -> None:
        hosted = hosted_shard("pipeline_2")
        one, other = (
            Member(id=each, name=each, roles=frozenset({LEND}), edition=0) for each in "ab"
        )
        (seat,) = hosted.shard.links.neighbours
        with contextlib.ExitStack() as stack:
            first, second, third = (stack.enter_context(link_pair("tcp"))[0] for _ in range(3))
            assert hosted.offer(seat, first, one)
            assert not hosted.offer(seat, second, other)
            assert hosted.offer(seat, third, one)
            with pytest.raises(TransportError):
                first.send(np.zeros(1))
            third.send(np.zeros(1))
            await hosted.aclose()

    asyncio.run(main())
