"""Frames to one coordinator, with backpressure: it may read slowly, or not at all."""

from __future__ import annotations

import asyncio

from edge import transport
from edge.engine.kv_copies import KvCopyQuotaShare
from edge.engine.report_batching import Sent, Told
from edge.protocol.frame_codec import Event, to_frame
from edge.protocol.heartbeat import patience_s
from edge.protocol.kv_frames import KvRows
from edge.transport import Channel, Frame

MAX_UNSENT_REPORTS = 64
"""With this many unsent reports no frame is read from the coordinator."""


class OutgoingFrames:
    """Sends answers directly and reports in order. For the loop."""

    def __init__(
        self, channel: Channel, copy_quota: KvCopyQuotaShare, *, silent_after_s: float
    ) -> None:
        """copy_quota: gets the memory of KV copies back once they are sent."""
        self._channel = channel
        self._copy_quota = copy_quota
        self._silent_after_s = silent_after_s
        self._reports: asyncio.Queue[Told] = asyncio.Queue()
        self._report_sent = asyncio.Event()

    @property
    def unsent(self) -> int:
        """Number of unsent reports."""
        return self._reports.qsize()

    async def send(self, frame: Frame) -> None:
        """Send a frame. Raises TransportError if the coordinator does not read it in time: a
        session, and memory that others need, waits meanwhile."""
        try:
            async with asyncio.timeout(patience_s(self._silent_after_s, len(frame.payload))):
                await self._channel.send(frame)
        except TimeoutError:
            raise transport.TransportError("the coordinator does not read its frames") from None

    def report(self, event: Event, sent: Sent = lambda: None) -> None:
        """Queue a report; `sent` is called once it is sent."""
        self._reports.put_nowait((event, sent))

    async def until_told(self) -> None:
        """Wait until fewer than MAX_UNSENT_REPORTS are unsent."""
        while self.unsent >= MAX_UNSENT_REPORTS:
            self._report_sent.clear()
            await self._report_sent.wait()

    async def send_reports(self) -> None:
        """Send reports for ever. Raises what `send` raises."""
        while True:
            report, sent = await self._reports.get()
            self._report_sent.set()
            await self.send(to_frame(report.kind, report))
            sent()
            if isinstance(report, KvRows):
                self._copy_quota.give_back(len(report.rows))
