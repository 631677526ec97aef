"""A TCP relay on loopback that counts bytes, and cuts, corrupts or delays them on demand.

Faults are set before a connection is made (`Fault`), or while it lasts, by the methods of `Relay`,
from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

CHUNK_BYTES = 64 << 10

_SO_ATTACH_FILTER = 26
_TAKE_NOTHING = struct.pack("@HBBI", 0x06, 0, 0, 0)
"""A socket filter of one instruction: return 0, so that no segment reaches the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one connection's bytes on their way to the target."""

    cut_after: int | None = None
    """The connection breaks both ways after this number of bytes."""
    corrupt_at: int | None = None
    """The byte at this offset is inverted."""
    delay_s: float = 0.0
    """Before each chunk of at most 64 KiB."""


@dataclass(slots=True, eq=False)
class Passage:
    """One connection that came through."""

    source_port: int
    """The port that it was made from."""
    is_open: bool = True
    has_vanished: bool = False
    is_swallowed: bool = False
    to_target_bytes: int = 0
    seen: bytearray = field(default_factory=bytearray)
    """What came back, and what went there, as far as it was kept."""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    """To where it came from; then to the target."""

    def sockets(self) -> list[socket.socket]:
        return [writer.get_extra_info("socket") for writer in self.writers]


class Relay:
    """Listens until `close`; every connection takes the next of `faults`, or none."""

    def __init__(self, target: str, *faults: Fault, keeps: bool = False) -> None:
        """`keeps` all that passes."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.faults = deque(faults)
        self._keeps = keeps
        self.passages: list[Passage] = []
        self._delay_s, self._bytes_per_s = 0.0, math.inf
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

    def open_passages(self) -> list[Passage]:
        """Those that lead to the target now."""
        return [each for each in self.passages if each.is_open and len(each.writers) == 2]

    def reset(self, passage: Passage) -> None:
        """Both ends are told that the connection is not there any more."""

        def done() -> None:
            for writer in passage.writers:
                now = struct.pack("@ii", 1, 0)  # closing it sends a reset
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
                writer.transport.abort()

        self._do(passage, done)

    def garble(self, passage: Passage, content: bytes, *, to_target: bool) -> None:
        """These bytes come between the others."""
        self._do(passage, lambda: passage.writers[to_target].write(content))

    def vanish(self, passage: Passage) -> None:
        """Drop bytes of either end from now on, without acknowledging them or telling anyone."""

        def done() -> None:
            passage.has_vanished = True
            program = ctypes.create_string_buffer(_TAKE_NOTHING, len(_TAKE_NOTHING))
            told = struct.pack("@HP", 1, ctypes.addressof(program))
            for each in passage.sockets():
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)

        self._do(passage, done)

    def swallow(self, passage: Passage) -> None:
        """Acknowledge and drop bytes of either end from now on, without telling anyone."""

        def done() -> None:
            passage.is_swallowed = True

        self._do(passage, done)

    def end_vanished(self) -> None:
        """Reset connections whose ends no longer use them but could not say so."""
        for passage in self.open_passages():
            if passage.has_vanished or passage.is_swallowed:
                self.reset(passage)

    def slow(self, *, delay_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        """Delay each chunk of each connection from now on; without arguments, no longer."""
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def _do(self, passage: Passage, done: Callable[[], None]) -> None:
        """In the loop, while the passage is open."""

        async def do() -> None:
            if passage.is_open:
                done()

        self._run(do())

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
        passage = Passage(source_port=writer.get_extra_info("peername")[1], writers=[writer])
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
        except (OSError, asyncio.CancelledError):
            pass  # the target is not there, or we end: the caller sees its connection close
        finally:
            passage.is_open = False
            for each in passage.writers:  # all, before any wait, which `_end` may cut short
                each.transport.abort()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                for each in passage.writers:
                    await each.wait_closed()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passage: Passage,
        fault: Fault,
    ) -> None:
        while content := bytearray(await reader.read(CHUNK_BYTES)):
            if passage.is_swallowed:
                continue
            await self._wait(len(content), fault.delay_s)
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
            if passage.is_swallowed:
                continue
            await self._wait(len(content), 0.0)
            writer.write(content)
            if self._keeps:
                passage.seen += content
            await writer.drain()

    async def _wait(self, num_bytes: int, more_s: float) -> None:
        """For as long as these bytes are on their way."""
        if wait_s := self._delay_s + num_bytes / self._bytes_per_s + more_s:
            await asyncio.sleep(wait_s)
