"""Calls to a peer that does not answer them as it should, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edge.errors import EdgeError, PeerError, ProtocolError
from edge.protocol.client import PeerClient
from edge.protocol.frame_codec import Done
from edge.protocol.peer_frames import Describe
from edge.protocol.session_frames import Close
from edge.transport import Channel, Frame
from tests.support.passing_time import let_pass
from tests.support.scripted_peers import Behaviour, peer

CLOSE = Close(session="s")


def ask(behave: Behaviour, asking: Callable[[PeerClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with peer(behave, answers_calls=False) as address:
            client = await PeerClient.connect(address, None, silent_after_s=1e9)
            try:
                await asking(client)
            finally:
                await client.aclose()

    asyncio.run(main())


def test_a_call_that_is_never_answered_ends_at_its_limit_and_the_next_one_is_answered() -> None:
    """The late answer is for nobody; it does no harm."""
    asked = asyncio.Event()
    late: list[int] = []

    async def behave(channel: Channel, frame: Frame) -> None:
        if frame.kind == "alive":
            return
        if frame.kind == "describe":
            late.append(frame.header["call"])
            asked.set()
            return
        for call in (*late, frame.header["call"]):
            await channel.send(Frame("ok", {"call": call}))

    async def asking(client: PeerClient) -> None:
        waiting = asyncio.create_task(client.call(Describe()))
        await asked.wait()
        let_pass(Describe.limit_s)
        with pytest.raises(PeerError) as raised:
            await waiting
        assert str(raised.value) == (
            "peer odd: it did not answer 'describe' within 10 s; restart Edge there"
        )
        assert await client.call(CLOSE) == Done()

    ask(behave, asking)


@pytest.mark.parametrize("offset", [-1, 1, 100])
def test_an_answer_to_a_call_that_nobody_made_ends_the_connection(offset: int) -> None:
    async def behave(channel: Channel, frame: Frame) -> None:
        await channel.send(Frame("ok", {"call": frame.header["call"] + offset}))

    async def asking(client: PeerClient) -> None:
        lost: list[EdgeError] = []
        client.watch(lost.append)
        with pytest.raises(ProtocolError, match=r"peer odd answers call .*, which was not made"):
            await client.call(CLOSE)
        with pytest.raises(ProtocolError):
            await client.call(CLOSE)
        assert len(lost) == 1

    ask(behave, asking)


def test_a_call_that_is_answered_twice_ends_the_connection() -> None:
    async def behave(channel: Channel, frame: Frame) -> None:
        for _ in range(2):
            await channel.send(Frame("ok", {"call": frame.header["call"]}))

    async def asking(client: PeerClient) -> None:
        ended = asyncio.Event()
        client.watch(lambda _error: ended.set())
        assert await client.call(CLOSE) == Done()
        await ended.wait()
        with pytest.raises(ProtocolError, match="answers call 1, which was not made"):
            await client.call(CLOSE)

    ask(behave, asking)
