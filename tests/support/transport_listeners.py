"""A listener that echoes, and strangers who call on it."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from edge.transport import (
    PROTOCOL_VERSION,
    Channel,
    Credentials,
    Frame,
    Listener,
    PeerLostError,
    TransportError,
    connect,
    listen,
)
from tests.support.transport_pairs import refuse_link

GREETING = struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION, 1)
SECURED_GREETING = GREETING[:-1] + b"\x11"


async def echo(channel: Channel) -> None:
    with contextlib.suppress(PeerLostError):
        while True:
            await channel.send(await channel.receive())
    await channel.aclose()


@contextlib.asynccontextmanager
async def echoing(address: str = "127.0.0.1:0", **options: Any) -> AsyncIterator[Listener]:
    listener = await listen(
        address,
        **{"hello": {}, "credentials": None, "on_channel": echo, "on_link": refuse_link, **options},
    )
    try:
        yield listener
    finally:
        await listener.aclose()


async def check_echo(listener: Listener, credentials: Credentials | None = None) -> None:
    channel = await connect(listener.addresses[0], credentials=credentials, hello={})
    await channel.send(Frame("ping"))
    assert (await channel.receive()).kind == "ping"
    await channel.aclose()


async def stranger(listener: Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", listener.port)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Refusals:
    """What a listener refused, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[TransportError] = asyncio.Queue()

    def __call__(self, address: str, error: TransportError) -> None:
        assert address.startswith("127.0.0.1:")
        self.queue.put_nowait(error)


class Silent:
    """Takes connections, and says nothing."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._called, "127.0.0.1", 0) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            while not self.calls.empty():
                self.calls.get_nowait().close()

    def _called(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls.put_nowait(writer)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(limited())
