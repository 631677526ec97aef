"""Many who call at once where members of a cluster listen: whose place is whose."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import psutil
import pytest

from edge.transport import Credentials, PeerLostError, connect
from edge.transport import listener as listener_module
from edge.transport.async_socket import AsyncSocket
from edge.transport.credentials import NONCE_BYTES
from edge.transport.handshake import Greeted, Role, greet
from edge.transport.listener import MAX_UNFINISHED_HANDSHAKES, Listener
from tests.support.transport_pairs import (
    SECURED_GREETING,
    Refusals,
    check_echo,
    echoing,
    hang_up,
    members,
    run,
    stranger,
)


def test_strangers_who_wait_keep_no_member_out() -> None:
    """Many at once from one address: they are dropped, oldest first, and cost a few descriptors."""

    async def scenario() -> None:
        ours, theirs = members(2)
        async with echoing(credentials=theirs, handshake_timeout_s=1e9) as listener:
            before = psutil.Process().num_fds()
            waiting = []
            for number in range(500):
                reader, writer = await stranger(listener)
                writer.write(SECURED_GREETING + bytes(NONCE_BYTES) if number % 2 else b"")
                waiting.append((reader, writer))
                if number % 100 == 99:
                    await check_echo(listener, ours)
            served = psutil.Process().num_fds() - before - len(waiting)
            assert served <= MAX_UNFINISHED_HANDSHAKES + 1
            for _, writer in waiting:
                await hang_up(writer)

    run(scenario)


def test_one_address_does_not_push_out_another() -> None:
    async def scenario() -> None:
        (member,) = members(1)
        async with echoing(
            credentials=member, handshake_timeout_s=1e9, max_unfinished_handshakes=4
        ) as listener:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", listener.port, local_addr=("127.0.0.2", 0)
            )
            crowd = [await stranger(listener) for _ in range(20)]
            writer.write(SECURED_GREETING)
            assert await reader.readexactly(len(SECURED_GREETING)) == SECURED_GREETING
            for _, each in [*crowd, (reader, writer)]:
                await hang_up(each)

    run(scenario)


class Held(AsyncSocket):
    """It reads three times, and then once it may: a member that has shown its tag, and waits."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected, "it")
        self.waits, self.may = asyncio.Event(), asyncio.Event()
        self._reads = 0

    async def receive_into(self, space: memoryview) -> int:
        self._reads += 1
        if self._reads == 4:
            self.waits.set()
            await self.may.wait()
        return await super().receive_into(space)


def small(credentials: Credentials) -> contextlib.AbstractAsyncContextManager[Listener]:
    """One with room for four who have not said enough, for as long as they like."""
    return echoing(credentials=credentials, handshake_timeout_s=1e9, max_unfinished_handshakes=4)


async def held(listener: Listener, credentials: Credentials) -> tuple[Held, asyncio.Task[Greeted]]:
    connected = socket.create_connection(("127.0.0.1", listener.port))
    connected.setblocking(False)
    connection = Held(connected)
    greeting = asyncio.create_task(greet(connection, Role.CHANNEL, {}, credentials))
    await connection.waits.wait()
    return connection, greeting


def test_strangers_do_not_push_out_a_member_at_their_own_address() -> None:
    async def scenario() -> None:
        ours, theirs = members(2)
        async with small(theirs) as listener:
            connection, greeting = await held(listener, ours)
            crowd = [await stranger(listener) for _ in range(20)]
            connection.may.set()
            (await greeting).connection.close()
            for _, each in crowd:
                await hang_up(each)

    run(scenario)


@pytest.mark.parametrize("addresses", [3, 20])
def test_strangers_of_many_addresses_do_not_push_out_a_member(addresses: int) -> None:
    async def scenario() -> None:
        ours, theirs = members(2)
        async with small(theirs) as listener:
            both = [await held(listener, ours) for _ in range(2)]
            crowd = [
                await asyncio.open_connection(
                    "127.0.0.1",
                    listener.port,
                    local_addr=(f"127.0.1.{1 + number % addresses}", 0),
                )
                for number in range(20)
            ]
            for connection, greeting in both:
                connection.may.set()
                (await greeting).connection.close()
            for _, each in crowd:
                await hang_up(each)

    run(scenario)


def test_a_crowd_with_tags_does_not_push_out_who_has_just_come() -> None:
    """An expelled device has the key for these still."""

    async def scenario() -> None:
        ours, theirs = members(2)
        async with small(theirs) as listener:
            reader, writer = await stranger(listener)
            crowd = [await held(listener, ours) for _ in range(20)]
            writer.write(SECURED_GREETING)
            assert await reader.readexactly(len(SECURED_GREETING)) == SECURED_GREETING
            await hang_up(writer)
            for connection, greeting in crowd:
                greeting.cancel()
                await asyncio.wait([greeting])
                connection.close()

    run(scenario)


def test_a_device_has_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_CONNECTIONS_OF_ONE", 3)

    async def scenario() -> None:
        refused = Refusals()
        ours, theirs, others = members(3)
        async with echoing(credentials=theirs, on_refused=refused) as listener:
            address = listener.addresses[0]
            channels = [await connect(address, hello={}, credentials=ours) for _ in range(3)]
            extra = await connect(address, hello={}, credentials=ours)
            assert "too many connections" in str(await refused.queue.get())
            with pytest.raises(PeerLostError):
                await extra.receive()
            await check_echo(listener, others)
            for channel in (*channels, extra):
                await channel.aclose()

    run(scenario)
