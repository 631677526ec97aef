"""What one coordinator is told, which may read slowly, or not at all."""

from __future__ import annotations

import asyncio

from edge import transport
from edge.engine.kv_copies import CopyRoom
from edge.engine.report_batching import Sent, Told
from edge.protocol.frame_codec import Event, to_frame
from edge.protocol.heartbeat import patience_s
from edge.protocol.messages import KvRows
from edge.transport import Channel, Frame

MAX_UNSENT_REPORTS = 64
"""Then no frame is read until some are sent: whoever does not read what it is told is not heard."""


class OutgoingFrames:
    """Answers are sent by whoever has them, reports one after the other. For the loop."""

    def __init__(self, channel: Channel, copy_room: CopyRoom, *, silent_after_s: float) -> None:
        """copy_room: what copies of keys and values give back once they are sent."""
        self._channel = channel
        self._copy_room = copy_room
        self._silent_after_s = silent_after_s
        self._reports: asyncio.Queue[Told] = asyncio.Queue()
        self._report_sent = asyncio.Event()

    @property
    def unsent(self) -> int:
        """Reports."""
        return self._reports.qsize()

    async def send(self, frame: Frame) -> None:
        """Raises TransportError for who does not read it: a session waits meanwhile, and whoever
        needs the peer's promise waits for the session; or room that is others', too, is taken."""
        try:
            async with asyncio.timeout(patience_s(self._silent_after_s, len(frame.payload))):
                await self._channel.send(frame)
        except TimeoutError:
            raise transport.TransportError("the coordinator reads nothing it is told") from None

    def report(self, event: Event, sent: Sent = lambda: None) -> None:
        """Behind all reports before; `sent` is called once it is sent."""
        self._reports.put_nowait((event, sent))

    async def until_told(self) -> None:
        """All reports have been sent, but for a few."""
        while self.unsent >= MAX_UNSENT_REPORTS:
            self._report_sent.clear()
            await self._report_sent.wait()

    async def send_reports(self) -> None:
        """For ever. Raises what `send` raises."""
        while True:
            report, sent = await self._reports.get()
            self._report_sent.set()
            await self.send(to_frame(report.kind, report))
            sent()
            if isinstance(report, KvRows):
                self._copy_room.give_back(len(report.rows))
