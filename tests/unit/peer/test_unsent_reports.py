"""Of whoever does not read what it is told, a peer keeps little, and its own sessions wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edge.engine.send_window import SendWindow, event_bytes
from edge.peer.connection import Connection
from edge.peer.outgoing_frames import MAX_UNSENT_REPORTS
from edge.protocol import kv_frames, step_frames
from edge.protocol.frame_codec import to_frame
from edge.protocol.heartbeat import ALIVE
from edge.transport import Frame, MemoryChannel, TransportError
from edge.transport.channel import MEMORY_QUEUE_FRAMES
from tests.support.hostile_talks import talk
from tests.support.null_peers import null_peers

RESERVE = to_frame("reserve", kv_frames.Reserve(session="s", request="r", tokens=4))


def states(num_bytes: int) -> step_frames.States:
    return step_frames.States(rows=bytes(num_bytes))


@contextlib.asynccontextmanager
async def session(folder: Path) -> AsyncIterator[tuple[MemoryChannel, Connection, list[Frame]]]:
    """A coordinator's end, of a session that is ready; and the frames that ask it once."""
    async with null_peers(folder, 1, kv_disk_bytes=1 << 20) as (daemon,):
        ours, theirs = MemoryChannel.pair("coordinator", "peer")
        connection = Connection(daemon.resources, theirs, silent_after_s=1e9)
        serving = asyncio.create_task(connection.run())
        frames = [
            frame
            for frame in talk(daemon.resources.addresses[0])
            if frame.kind not in ("set_memory", "keep")
        ]
        ready = 1 + next(at for at, each in enumerate(frames) if each.kind == "connect")
        try:
            for frame in frames[:ready]:
                await ours.send(frame)
                assert (await told(ours)).kind == "ok"
            yield ours, connection, frames[ready:]
        finally:
            await ours.aclose()
            await serving


async def told(channel: MemoryChannel) -> Frame:
    """The next frame that is more than a sign of life."""
    while (frame := await channel.receive()).kind == ALIVE.kind:
        pass
    return frame


def test_who_is_told_and_does_not_listen_is_not_read_any_more(tmp_path: Path) -> None:
    count = 20 * MAX_UNSENT_REPORTS

    async def main() -> None:
        async with session(tmp_path) as (ours, connection, _frames):

            async def flood() -> None:
                """As fast as the session's thread carries them out, which nothing else slows."""
                (hosted,) = connection._sessions._mine.values()
                for _ in range(count):
                    await ours.send(RESERVE)
                    while (  # noqa: ASYNC110 - a thread carries them out
                        hosted.backlog.held_bytes
                        and connection._outgoing.unsent < MAX_UNSENT_REPORTS
                    ):
                        await asyncio.sleep(0)

            flooding = asyncio.create_task(flood())
            waiting = ours._outgoing.frames
            while not flooding.done() and len(waiting) < MEMORY_QUEUE_FRAMES:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not flooding.done()
            assert connection._outgoing.unsent < 4 * MAX_UNSENT_REPORTS
            for _ in range(count):
                assert (await told(ours)).kind == "reserved"
            await flooding

    asyncio.run(main())


def test_who_reads_no_reports_is_not_waited_for(tmp_path: Path) -> None:
    """Others' loads may need what its session holds."""

    async def main() -> None:
        async with session(tmp_path) as (ours, connection, _frames):
            connection._outgoing._silent_after_s = 0.01

            async def send_on() -> None:
                while True:
                    await ours.send(RESERVE)

            with pytest.raises(TransportError):
                await send_on()

    asyncio.run(main())


def test_a_session_ends_though_nobody_reads_what_it_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread waits in a report then."""
    waits = threading.Event()
    monkeypatch.setattr(SendWindow.__init__, "__defaults__", (1,))
    fits = SendWindow._fits

    def seen(unsent: SendWindow, num_bytes: int) -> bool:
        found = fits(unsent, num_bytes)
        if not found:
            waits.set()
        return found

    monkeypatch.setattr(SendWindow, "_fits", seen)

    async def main() -> None:
        async with session(tmp_path) as (ours, _connection, _frames):
            for _ in range(3 * MEMORY_QUEUE_FRAMES):
                await ours.send(RESERVE)
            while not waits.is_set():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0)
        # The session has ended.

    asyncio.run(main())


def test_who_reports_waits_for_room() -> None:
    unsent = SendWindow(1000 + 2 * event_bytes(states(0)))
    first = unsent.take(states(5000))  # more than there is room: alone it may
    order: list[str] = []

    def report() -> None:
        sent = unsent.take(states(600))
        order.append("took")
        sent()

    thread = threading.Thread(target=report)
    thread.start()
    order.append("sent")
    first()
    thread.join()
    assert order == ["sent", "took"]


def test_nobody_waits_for_room_once_it_is_over() -> None:
    unsent = SendWindow(1)
    unsent.take(states(1))
    thread = threading.Thread(target=unsent.take, args=(states(1),))
    thread.start()
    unsent.end()
    thread.join()
    unsent.take(states(1))
