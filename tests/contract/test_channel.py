"""What every channel promises, checked on each implementation."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edge.transport import (
    MAX_HEADER_BYTES,
    Channel,
    ChannelClosedError,
    Frame,
    PeerLostError,
    ProtocolError,
)
from edge.transport.frame import FrameLimits
from edge.transport.testing import Fault, FaultyChannel
from tests.support.transport_pairs import CHANNEL_KINDS, channel_pair

pytestmark = pytest.mark.parametrize("kind", CHANNEL_KINDS)


def check(kind: str, scenario: Callable[[Channel, Channel], Awaitable[None]]) -> None:
    async def run() -> None:
        async with channel_pair(kind) as (alice, bob), asyncio.timeout(60):
            await scenario(alice, bob)

    asyncio.run(run())


async def until_blocked(task: "asyncio.Task[Any]") -> None:
    """Let the loop turn until ``task`` has had every chance to finish."""
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done()


async def flood(channel: Channel) -> None:
    """Send until it fails."""
    while True:
        await channel.send(Frame("more", {}, bytes(1 << 20)))


async def drain(channel: Channel) -> int:
    """Receive until the peer is lost; how many frames there were."""
    count = 0
    with contextlib.suppress(PeerLostError):
        while await channel.receive():
            count += 1
    return count


def test_both_ends_know_each_other(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        assert alice.remote_hello["name"] == "bob"
        assert bob.remote_hello["name"] == "alice"
        assert "bob" in alice.peer
        assert "alice" in bob.peer

    check(kind, scenario)


def test_frames_arrive_whole_and_in_order_both_ways(kind: str) -> None:
    frames = [
        Frame("empty"),
        Frame("nested", {"layers": [1, 2, {"deep": None}], "name": "Zoë", "rate": 0.5}),
        Frame("bytes", {}, b"\x00\xff" * 1000),
        Frame("view", {"a": 1}, memoryview(bytearray(b"abc"))),
    ]

    async def scenario(alice: Channel, bob: Channel) -> None:
        for frame in frames:
            await alice.send(frame)
            await bob.send(frame)
        for frame in frames:
            assert await bob.receive() == frame
            assert await alice.receive() == frame

    check(kind, scenario)


def test_a_large_payload_belongs_to_the_receiver(kind: str) -> None:
    payload = bytes(range(256)) * (5 << 12)

    async def scenario(alice: Channel, bob: Channel) -> None:
        sending = asyncio.create_task(alice.send(Frame("shard", {}, payload)))
        frame = await bob.receive()
        await sending
        assert frame.payload == payload
        assert isinstance(frame.payload, bytearray)

    check(kind, scenario)


def test_many_tasks_may_send_at_once(kind: str) -> None:
    payload = bytes(100_000)

    async def scenario(alice: Channel, bob: Channel) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(30):
                tasks.create_task(alice.send(Frame("piece", {"number": number}, payload)))
            seen = {(await bob.receive()).header["number"] for _ in range(30)}
        assert seen == set(range(30))

    check(kind, scenario)


def test_send_waits_for_a_peer_that_does_not_read(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        task = asyncio.create_task(flood(alice))
        await asyncio.wait({task}, timeout=0.2)
        await alice.aclose()
        with pytest.raises(ChannelClosedError):
            await task
        assert await drain(bob) < 100

    check(kind, scenario)


def test_a_cancelled_receive_loses_nothing(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        waiting = asyncio.create_task(bob.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        sending = asyncio.create_task(alice.send(Frame("large", {"n": 1}, bytes(8 << 20))))
        frame = None
        # Cancelled at every turn of the loop, it still gets the frame, piece by piece.
        while frame is None:
            waiting = asyncio.create_task(bob.receive())
            for _ in range(3):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            frame = None if waiting.cancelled() else waiting.result()
        await sending
        assert (frame.kind, frame.header, len(frame.payload)) == ("large", {"n": 1}, 8 << 20)

    check(kind, scenario)


def test_one_task_at_a_time_receives(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        waiting = asyncio.create_task(bob.receive())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await bob.receive()
        await alice.send(Frame("late"))
        assert (await waiting).kind == "late"

    check(kind, scenario)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(""),
        Frame("set", {"a": {1, 2}}),
        Frame("nan", {"a": float("nan")}),
        Frame("surrogate", {"a": "\ud800"}),
        Frame("large", {"a": "x" * MAX_HEADER_BYTES}),
        Frame("strided", {}, memoryview(bytes(10))[::2]),
    ],
    ids=lambda frame: frame.kind or "no kind",
)
def test_a_frame_that_is_not_allowed_is_refused_and_the_channel_lives_on(
    kind: str, frame: Frame
) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        with pytest.raises(ProtocolError):
            await alice.send(frame)
        await alice.send(Frame("fine"))
        assert (await bob.receive()).kind == "fine"

    check(kind, scenario)


def test_our_close_ends_pending_and_later_calls(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        waiting = asyncio.create_task(alice.receive())
        await asyncio.sleep(0)
        await alice.aclose()
        await alice.aclose()
        with pytest.raises(ChannelClosedError):
            await waiting
        with pytest.raises(ChannelClosedError):
            await alice.receive()
        with pytest.raises(ChannelClosedError):
            await alice.send(Frame("late"))

    check(kind, scenario)


def test_their_close_loses_the_peer_after_what_it_sent(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        await bob.send(Frame("last words"))
        await bob.aclose()
        assert (await alice.receive()).kind == "last words"
        for _ in range(2):
            with pytest.raises(PeerLostError) as lost:
                await alice.receive()
            assert lost.value.peer == alice.peer
        with pytest.raises(PeerLostError):
            await flood(alice)  # The system may take a frame before it hears that nobody reads.

    check(kind, scenario)


def test_their_close_ends_a_pending_receive_and_a_pending_send(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        receiving = asyncio.create_task(alice.receive())
        sending = asyncio.create_task(flood(alice))
        await until_blocked(receiving)
        await bob.aclose()
        for task in (receiving, sending):
            with pytest.raises(PeerLostError):
                await task

    check(kind, scenario)


def test_a_lost_connection_is_lost_on_both_sides(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        faulty = FaultyChannel(alice, Fault.LOSE, after_calls=1)
        await faulty.send(Frame("one"))
        with pytest.raises(PeerLostError):
            await faulty.send(Frame("two"))
        assert (await bob.receive()).kind == "one"
        with pytest.raises(PeerLostError):
            await bob.receive()

    check(kind, scenario)


def test_dropped_and_truncated_frames(kind: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        truncating = FaultyChannel(alice, Fault.TRUNCATE, after_calls=1)
        for number in range(3):
            await truncating.send(Frame("piece", {"number": number}, b"abcd"))
        assert [bytes((await bob.receive()).payload) for _ in range(3)] == [b"abcd", b"ab", b"abcd"]
        dropping = FaultyChannel(bob, Fault.DROP, after_calls=1)
        for number in range(3):
            await dropping.send(Frame("piece", {"number": number}))
        await bob.send(Frame("after"))
        assert (await alice.receive()).header == {"number": 0}
        assert (await alice.receive()).kind == "after"

    check(kind, scenario)


@pytest.mark.parametrize("large", ["header", "payload"])
def test_a_frame_may_be_so_large_and_no_larger(kind: str, large: str) -> None:
    async def scenario(alice: Channel, bob: Channel) -> None:
        most = FrameLimits(header_bytes=100, payload_bytes=100)
        small = Frame("k", {"text": "x" * 50}, bytes(100))
        await alice.send(small)
        assert await bob.receive(most=most) == small
        await alice.send(
            Frame("k", {"text": "x" * 100}) if large == "header" else Frame("k", {}, bytes(101))
        )
        with pytest.raises(ProtocolError, match=f"has a {large} of .* over the limit of 100"):
            await bob.receive(most=most)

    check(kind, scenario)
