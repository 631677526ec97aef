"""What connections of one member hold of a peer's memory, whatever they send: a known sum."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from pathlib import Path

import pytest

from edge import transport
from edge.peer.resources import SMALL_FRAMES_BYTES
from edge.protocol.frame_codec import SMALL
from edge.transport import Frame, same_host
from edge.transport.frame import Buffer, encode
from edge.transport.listener import MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ONE
from edge.transport.sealed_socket import SMALL_BYTES, SealedSocket
from edge.transport.tcp_channel import TcpChannel
from edge.version import __version__
from tests.support.members import Kept
from tests.support.null_peers import null_peers

CONNECTIONS = 12
RECORDS_BYTES = 2 * SMALL_BYTES
"""Of a connection: a record that arrives, and one that is opened."""
OTHER_BYTES = 16 << 10
"""What Python takes for it besides, at both ends, which are in this process."""


def objects(header_bytes: int) -> Frame:
    """A header that takes many times its size once it is read."""
    return Frame("describe", {"call": 1, "x": [{"a": 0}] * (header_bytes // len('{"a":0},'))})


SENT: tuple[tuple[list[Buffer], ...], ...] = (
    # The answer to the first is waited for: two wait behind it, and one behind these.
    tuple(encode(Frame("memory_rate", {"call": 1})) for _ in range(1)),
    *(
        tuple(encode(each) for _ in range(4))
        for each in (
            objects(30 << 10),
            objects(SMALL.header_bytes - (1 << 10)),
            Frame("describe", {"call": 1, "text": "x" * 30_000 + "\U0001f600"}),
            Frame("describe", {"call": 1}, bytes(30_000)),
            objects(1 << 10),
        )
    ),
    # And these are never whole.
    (encode(Frame("describe", {"call": 1}, bytes(30_000)))[:1],),
)


async def settled() -> None:
    """Whatever the loop can do without waiting is done."""
    for _ in range(500):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", range(1, len(SENT)))
def test_small_frames_and_records_of_a_device_are_bounded(
    kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "way", lambda *_ends, **_listens: "")  # as of two hosts
    attic = Kept.founded()
    mallory = attic.taking_in("mallory")

    async def main() -> None:
        async with (
            null_peers(tmp_path, 1, membership=attic.membership) as (daemon,),
            contextlib.AsyncExitStack() as stack,
        ):
            resources = daemon.resources
            channels: list[TcpChannel] = []
            for _ in range(CONNECTIONS):
                channel = await transport.connect(
                    resources.addresses[0],
                    hello={"name": "mallory", "software": __version__},
                    credentials=mallory.credentials(),
                )
                stack.push_async_callback(channel.aclose)
                channels.append(channel)
            async with resources.measurement.turn("another"):
                gc.collect()
                tracemalloc.start()
                try:
                    tasks = [
                        asyncio.create_task(flood(channel, (*SENT[0], *SENT[kind], *SENT[-1])))
                        for channel in channels
                    ]
                    await settled()
                    gc.collect()
                    taken = tracemalloc.get_traced_memory()[0]
                finally:
                    tracemalloc.stop()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                held = resources.small_frames.held, resources.frames.held
            await stack.aclose()
            while resources.small_frames.held or resources.frames.held:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert held[0] <= SMALL_FRAMES_BYTES // 4
        assert sum(held) > 0
        assert taken <= sum(held) + CONNECTIONS * (RECORDS_BYTES + OTHER_BYTES)

    asyncio.run(main())


async def flood(channel: TcpChannel, sent: tuple[list[Buffer], ...]) -> None:
    connection = channel._connection
    assert isinstance(connection, SealedSocket)
    for buffers in sent:
        await connection.send_all(buffers)


def test_the_sums_are_those_of_the_description() -> None:
    """In docs/guide/limits.md."""
    of_one = MAX_CONNECTIONS_OF_ONE * RECORDS_BYTES + SMALL_FRAMES_BYTES // 4
    of_all = MAX_CONNECTIONS * RECORDS_BYTES + SMALL_FRAMES_BYTES
    assert (of_one >> 20, of_all >> 20) == (3, 12)
    told = (Path(__file__).parents[3] / "docs/guide/limits.md").read_text(encoding="utf-8")
    assert "3 MiB" in told
    assert "12 MiB" in told
