"""A TCP relay on loopback that counts what passes, and cuts, corrupts or delays it on demand."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one connection's bytes on their way to the target."""

    cut_after: int | None = None
    """The connection breaks both ways after so many bytes."""
    corrupt_at: int | None = None
    """The byte at this offset is inverted."""
    delay_s: float = 0.0
    """Before each chunk of at most 64 KiB."""


@dataclass(slots=True)
class Passage:
    """One connection that came through."""

    to_target_bytes: int = 0
    seen: bytearray = field(default_factory=bytearray)
    """What came back, and what went there, as far as it was kept."""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)


class Relay:
    """Listens until `close`; every connection takes the next of `faults`, or none."""

    def __init__(self, target: str, *faults: Fault, keeps: bool = False) -> None:
        """`keeps` all that passes."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.faults = deque(faults)
        self._keeps = keeps
        self.passages: list[Passage] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def sent_bytes(self) -> int:
        """To the target, over all connections."""
        return sum(passage.to_target_bytes for passage in self.passages)

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        passage = Passage(writers=[writer])
        self.passages.append(passage)
        fault = self.faults.popleft() if self.faults else Fault()
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            passage.writers.append(target_writer)
            pumps = [
                asyncio.create_task(self._forward(reader, target_writer, passage, fault)),
                asyncio.create_task(self._return(target_reader, writer, passage)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the target is not there: the caller sees its connection close
        finally:
            for each in passage.writers:
                each.transport.abort()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passage: Passage,
        fault: Fault,
    ) -> None:
        while content := bytearray(await reader.read(CHUNK_BYTES)):
            if fault.delay_s:
                await asyncio.sleep(fault.delay_s)
            start = passage.to_target_bytes
            if fault.corrupt_at is not None and 0 <= fault.corrupt_at - start < len(content):
                content[fault.corrupt_at - start] ^= 0xFF
            is_cut = fault.cut_after is not None and start + len(content) >= fault.cut_after
            if is_cut:
                assert fault.cut_after is not None
                del content[fault.cut_after - start :]
            writer.write(content)
            if self._keeps:
                passage.seen += content
            passage.to_target_bytes += len(content)
            await writer.drain()
            if is_cut:
                return

    async def _return(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passage: Passage
    ) -> None:
        while content := await reader.read(CHUNK_BYTES):
            writer.write(content)
            if self._keeps:
                passage.seen += content
            await writer.drain()
