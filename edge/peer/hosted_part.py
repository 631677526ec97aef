"""A part of a graph as hosted by a peer: its process, and the link over which its runs come.

The process computes (graph_process.py). What comes in and goes out is bytes here. Two threads serve
the link in turns: one receives the next inputs while the process computes for the other one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from edge.concurrency.blocking import run_blocking
from edge.errors import ProtocolError, RequestError
from edge.graphs.parts import GRAPH_NAME, INSIDE
from edge.host.confined_process import ConfinedProcess, Limits
from edge.host.free_memory import format_size
from edge.offload import CachedShard
from edge.protocol import graph_frames as frames
from edge.protocol.part_runs import STILL_HERE, PartAnswer, answer, receive_asked, receive_content
from edge.transport import ChannelClosedError, Link, Member, TransportError
from edge.transport.frame import Buffer

_log = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("graph_process.py").resolve()

_LOAD_LIMIT_S = 600.0
_LOOKS, _SHORTEST_LOOK_S, _LONGEST_LOOK_S = 20, 0.01, 1.0
"""A run that takes too long is seen within this part of its limit, between so many seconds."""
_BUFFERED_BYTES = 128 << 10
"""Inputs of so many bytes wait in buffers of the system while others are computed."""


GRAPH_DTYPE = "onnx"
"""Told of a part where models tell the format of their weights."""


def use_name(session: str) -> str:
    """The name of a part among what takes memory here."""
    return f"part {session}"


@dataclass(slots=True)
class _Run:
    """One run, and its inputs until they are computed."""

    number: int
    content: memoryview


class HostedPart:
    """A part that is open here. Its runs are computed one after the other."""

    def __init__(
        self,
        call: frames.OpenPart,
        shard: CachedShard,
        user: Member | None,
        *,
        threads: int,
        memory_bytes: int,
    ) -> None:
        """user: the device that opens it. memory_bytes: limit of the process."""
        self.call = call
        self._device = None if user is None else user.id
        self._link: Link | None = None
        self._is_closing = False
        self._memory_bytes = memory_bytes
        graph = next((e for e in shard.manifest.tensors if e.name == GRAPH_NAME), None)
        if graph is None:
            raise ProtocolError("the upload has no graph")
        self._folder = (
            tempfile.TemporaryDirectory(prefix="edge-graph-", ignore_cleanup_errors=True)
            if call.profile
            else None
        )
        self._load = (
            b"load\n"
            + json.dumps(
                {
                    "path": str(shard.path.resolve()),
                    "offset": graph.offset,
                    "nbytes": graph.nbytes,
                    "profile": call.profile,
                    "plain": call.plain,
                    "inside": INSIDE,
                }
            ).encode()
        )
        limits = Limits(
            # The peer's clock ends a process that takes too long; this one, if the peer is gone.
            cpu_s=(call.run_limit_s + _LOAD_LIMIT_S) * threads,
            wall_s=call.run_limit_s,
            memory_bytes=memory_bytes,
            reply_bytes=max(call.held_bytes, frames.PROFILE_BYTES if call.profile else 0),
        )
        folder = "" if self._folder is None else self._folder.name
        self._process = ConfinedProcess(_PROGRAM, limits, (str(threads), folder))
        self._small_bytes = call.held_bytes // 3
        """Inputs of so many bytes come in while others of at most as many are computed."""
        self._receiving, self._computing = threading.Lock(), threading.Lock()
        self._sending = threading.Lock()
        """Acquired before `_computing` is released, so that answers come in order."""
        self._computed_bytes = self._result_bytes = self._unsent_bytes = 0
        """The size of the inputs that are computed now, or were last; of the last result; and of
        one that is being sent."""
        # Of its own: a request may take minutes, and others must not wait for a thread so long.
        self._asking = ThreadPoolExecutor(1, "edge-graph-asks")
        self._threads: list[threading.Thread] = []
        self._clock = threading.Lock()
        self._ends_s: float | None = None
        """When the run under way has taken too long."""
        self._is_late = False
        self._watching: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Start the process. Raises RequestError with the cause if the part cannot be loaded."""
        kind, content = await self._asked(self._ask_load)
        if kind != "loaded":
            raise RequestError(f"the graph cannot be loaded: {self._cause(kind, content)}")
        self._watching = asyncio.create_task(self._watch())

    def offer(self, link: Link, member: Member | None) -> bool:
        """Take runs from this link. False: the part has one, or belongs to another device."""
        device = None if member is None else member.id
        if self._link is not None or self._is_closing or device != self._device:
            return False
        self._link = link
        for _ in range(2):
            thread = threading.Thread(
                target=self._serve, args=(link,), name="edge-graph-part", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return True

    async def profile(self) -> bytearray:
        """The times of nodes; see `ProfilePart`. Raises RequestError if there are none."""
        kind, content = await self._asked(
            lambda: self._process.ask(
                b"profile\n", wall_s=_LOAD_LIMIT_S, reply_bytes=frames.PROFILE_BYTES
            )
        )
        if kind != "profile":
            raise RequestError(f"the nodes were not timed: {self._cause(kind, content)}")
        return content

    def end_waits(self) -> None:
        """End all runs now, because the part is about to close."""
        self._is_closing = True
        self._process.forbid()
        if self._link is not None:
            self._link.close()

    async def aclose(self) -> None:
        """Free everything."""
        self.end_waits()  # `close` waits for the request under way
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await run_blocking(self._close)

    def _close(self) -> None:
        for thread in self._threads:
            thread.join()
        self._process.close()
        self._asking.shutdown()
        if self._folder is not None:
            self._folder.cleanup()

    def _serve(self, link: Link) -> None:
        """Receive a run, compute it and answer, until the link ends.

        While small inputs are computed, nobody receives: the system's buffers hold the next ones,
        and a thread that waits for a link takes time from the one that computes.
        """
        try:
            while True:
                with self._receiving:
                    run = self._next_run(link)  # and the turn to compute
                    is_small = max(len(run.content), self._result_bytes) <= _BUFFERED_BYTES
                    if is_small:
                        self._answer(link, run)
                if not is_small:
                    self._answer(link, run)
        except TransportError as error:
            _log.debug("a part of a graph gets no more runs: %s", error)
        finally:
            link.close()

    def _answer(self, link: Link, run: _Run) -> None:
        try:
            found = self._computed(run.number, run.content)
            run.content = memoryview(b"")  # others may need its memory now
            if found.failed and self._is_closing:  # the run can be computed elsewhere
                raise ChannelClosedError("the part was closed")
            self._sending.acquire()
            self._result_bytes = self._unsent_bytes = len(found.content)
        finally:
            self._computing.release()
        try:
            answer(link, found)
        finally:
            self._unsent_bytes = 0
            self._sending.release()

    def _next_run(self, link: Link) -> _Run:
        """The next run. `_computing` is held then. It was acquired before the inputs came, if they
        do not fit beside those that are computed."""
        while True:
            number, nbytes = receive_asked(link, self.call.held_bytes)
            if number != STILL_HERE:
                break
            with self._computing, self._sending:
                answer(link, PartAnswer(STILL_HERE, False, 0.0, memoryview(b"")))
        if nbytes <= self._small_bytes >= self._computed_bytes:
            content = receive_content(link, nbytes)
            self._computing.acquire()
        else:
            self._computing.acquire()
            try:
                with self._sending:
                    pass  # what is being sent may leave no room
                content = receive_content(link, nbytes)
            except BaseException:
                self._computing.release()
                raise
        self._computed_bytes = len(content)
        return _Run(number, content)

    def _computed(self, number: int, content: memoryview) -> PartAnswer:
        began_s = time.perf_counter()
        try:
            kind, found = self._run(content)
            if kind != "ran":
                found = bytearray(self._cause(kind, found).encode())
        except OSError as error:
            kind = "failed"
            found = bytearray(f"its process cannot be started: {error.strerror}".encode())
        except Exception as error:
            _log.exception("a part of a graph failed")
            kind, found = "failed", bytearray(f"its peer failed: {type(error).__name__}".encode())
        return PartAnswer(number, kind != "ran", time.perf_counter() - began_s, memoryview(found))

    def _run(self, content: Buffer) -> tuple[str, bytearray]:
        if not self._process.is_running:  # a limit ended it
            kind, loaded = self._ask_load()
            if kind != "loaded":
                return kind, loaded
        limit_s, held = self.call.run_limit_s, self.call.held_bytes
        next_bytes = self._small_bytes if len(content) <= self._small_bytes else 0
        room = max(0, held - len(content) - next_bytes - self._unsent_bytes)
        with self._clock:
            self._is_late, self._ends_s = False, time.monotonic() + limit_s
        try:
            kind, found = self._process.ask(b"run\n", content, wall_s=math.inf, reply_bytes=room)
        finally:
            with self._clock:
                self._ends_s = None
        if kind == "exhausted" and self._is_late:
            return "failed", bytearray(f"it did not end within {limit_s:g} s".encode())
        return kind, found

    async def _watch(self) -> None:
        """End the process of a run that takes too long. One timer for all runs: one for each would
        wake the loop with every run."""
        look_s = max(_SHORTEST_LOOK_S, self.call.run_limit_s / _LOOKS)
        look_s = min(_LONGEST_LOOK_S, look_s)
        while True:
            await asyncio.sleep(look_s)
            with self._clock:
                if self._ends_s is not None and time.monotonic() > self._ends_s:
                    self._is_late = True
                    self._process.kill()

    async def _asked(self, ask: Callable[[], tuple[str, bytearray]]) -> tuple[str, bytearray]:
        return await run_blocking(ask, stop=self._process.kill, threads=self._asking)

    def _ask_load(self) -> tuple[str, bytearray]:
        return self._process.ask(self._load, wall_s=_LOAD_LIMIT_S)

    def _cause(self, kind: str, content: bytearray) -> str:
        cause = content.decode("utf-8", "replace").strip()
        if kind == "exhausted":
            limit = format_size(self._memory_bytes)
            return cause or f"its process has ended; it may take {limit} of memory"
        return cause
