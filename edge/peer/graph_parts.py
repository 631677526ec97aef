"""Parts of graphs of one coordinator on this peer: opened, fed, taken and closed.

Each part has a process of its own (graph_process.py). What comes in and goes out is bytes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.errors import PeerError, ProtocolError, RequestError
from edge.graphs.parts import GRAPH_NAME, INSIDE
from edge.host.confined_process import ConfinedProcess, Limits
from edge.host.free_memory import format_size
from edge.memory.ledger import Use
from edge.offload import CachedShard
from edge.peer.quota import QuotaShare
from edge.peer.resources import PeerResources
from edge.peer.weight_uploads import WeightUploads
from edge.protocol import graph_frames as frames
from edge.protocol.frame_codec import Call
from edge.transport import Member

_log = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("graph_process.py").resolve()

_LOAD_LIMIT_S = 600.0


@dataclass(slots=True)
class _Run:
    """One run of a part."""

    inputs: bytearray
    got: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    result: bytearray = field(default_factory=bytearray)
    failure: str | None = None
    computed_s: float = 0.0


class _HostedPart:
    """A part that is open here. Its runs are computed one after the other."""

    def __init__(
        self, call: frames.OpenPart, shard: CachedShard, threads: int, memory_bytes: int
    ) -> None:
        self.call = call
        self.runs: dict[int, _Run] = {}
        self.held_bytes = 0
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
        # Of its own: a run may take minutes, and others must not wait for a thread so long.
        self._thread = ThreadPoolExecutor(1, "edge-graph-part")
        self._queue: asyncio.Queue[_Run] = asyncio.Queue()
        self._computing: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Start the process. Raises RequestError with the cause if the part cannot be loaded."""
        kind, content = await self._asked(self._ask_load)
        if kind != "loaded":
            raise RequestError(f"the graph cannot be loaded: {self._cause(kind, content)}")
        self._computing = asyncio.create_task(self._compute())

    def feed(self, call: frames.FeedPart) -> None:
        """Take a piece of inputs. Raises ProtocolError for one that does not fit to others."""
        run = self.runs.get(call.run)
        if run is None:
            if len(self.runs) >= frames.MOST_RUNS:
                raise ProtocolError(f"a part has at most {frames.MOST_RUNS} runs at once")
            if (excess := self._excess("inputs", call.total_bytes)) is not None:
                raise RequestError(excess)
            run = self.runs[call.run] = _Run(bytearray(call.total_bytes))
            self.held_bytes += call.total_bytes
        end = call.offset + len(call.content)
        if call.offset != run.got or end > len(run.inputs) or call.total_bytes != len(run.inputs):
            raise ProtocolError("a piece of inputs is not the next one")
        run.inputs[call.offset : end] = call.content
        run.got = end
        if end == len(run.inputs):
            self._queue.put_nowait(run)

    async def take(self, call: frames.TakeResult) -> frames.PartPiece:
        run = self.runs.get(call.run)
        if run is None:
            raise ProtocolError("this run was not begun")
        await run.ended.wait()
        if run.failure is not None:
            self._forget(call.run)
            raise RequestError(run.failure)
        content = memoryview(run.result)[call.offset : call.offset + frames.BLOB_PIECE_BYTES]
        if call.offset + len(content) >= len(run.result):
            self._forget(call.run)
        return frames.PartPiece(
            total_bytes=len(run.result), computed_s=run.computed_s, content=content
        )

    async def profile(self) -> bytearray:
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
        for run in self.runs.values():
            run.failure = "the part was closed"
            run.ended.set()

    async def aclose(self) -> None:
        self.end_waits()  # `close` waits for the request under way
        if self._computing is not None:
            self._computing.cancel()
            await asyncio.gather(self._computing, return_exceptions=True)
        await run_blocking(self._process.close)
        self._thread.shutdown(wait=False)
        if self._folder is not None:
            self._folder.cleanup()

    def _forget(self, number: int) -> None:
        run = self.runs.pop(number, None)
        if run is not None:
            self.held_bytes -= len(run.inputs) + len(run.result)

    def _excess(self, what: str, nbytes: int) -> str | None:
        """A sentence if so many bytes more are beyond what is reserved."""
        most = self.call.held_bytes
        if self.held_bytes + nbytes <= most:
            return None
        return (
            f"{what} of {format_size(nbytes)} are more than the {format_size(most)} reserved for "
            "what waits; load the graph with a larger sample"
        )

    async def _compute(self) -> None:
        while True:
            run = await self._queue.get()
            began_s = time.perf_counter()
            try:
                kind, content = await self._computed(run)
                excess = self._excess("results", len(content))
                if kind == "ran" and excess is None:
                    run.result = content
                    self.held_bytes += len(content)
                else:
                    run.failure = excess if kind == "ran" else self._cause(kind, content)
            except OSError as error:
                run.failure = f"its process cannot be started: {error.strerror}"
            except Exception as error:
                _log.exception("a part of a graph failed")
                run.failure = f"its peer failed: {type(error).__name__}"
            run.computed_s = time.perf_counter() - began_s
            run.ended.set()

    async def _asked(self, ask: Callable[[], tuple[str, bytearray]]) -> tuple[str, bytearray]:
        return await run_blocking(ask, stop=self._process.kill, threads=self._thread)

    async def _computed(self, run: _Run) -> tuple[str, bytearray]:
        if self._is_closing:
            return "failed", bytearray(b"the part was closed")
        if not self._process.is_running:  # a limit ended it
            kind, content = await self._asked(self._ask_load)
            if kind != "loaded":
                return kind, content
        limit_s, is_late = self.call.run_limit_s, asyncio.Event()

        def end_it() -> None:
            is_late.set()
            self._process.kill()

        # By the loop: a timer of its own for each request would be a thread.
        timer = asyncio.get_running_loop().call_later(limit_s, end_it)
        try:
            room = self.call.held_bytes - self.held_bytes
            asking = partial(
                self._process.ask, b"run\n", run.inputs, wall_s=math.inf, reply_bytes=max(0, room)
            )
            kind, content = await self._asked(asking)
        finally:
            timer.cancel()
        if kind == "exhausted" and is_late.is_set():
            return "failed", bytearray(f"it did not end within {limit_s:g} s".encode())
        return kind, content

    def _ask_load(self) -> tuple[str, bytearray]:
        return self._process.ask(self._load, wall_s=_LOAD_LIMIT_S)

    def _cause(self, kind: str, content: bytearray) -> str:
        cause = content.decode("utf-8", "replace").strip()
        if kind == "exhausted":
            limit = format_size(self._memory_bytes)
            return cause or f"its process has ended; it may take {limit} of memory"
        return cause


class CoordinatorParts:
    """The parts of one coordinator. Close with `aclose`."""

    def __init__(
        self, resources: PeerResources, user: Member | None, owner: object, weights: WeightUploads
    ) -> None:
        """Resources are counted for `user` and `owner`. weights: uploads that parts load."""
        self._peer, self._user, self._weights = resources, user, weights
        self._owner = owner
        self._shards = QuotaShare(resources.shards, owner)
        self._parts: dict[str, _HostedPart] = {}
        self._opening: set[str] = set()

    @property
    def calls(self) -> dict[type[Call[Any]], Callable[[Any], Awaitable[object]]]:
        return {
            frames.OpenPart: self._open,
            frames.FeedPart: self._feed,
            frames.TakeResult: self._take,
            frames.ProfilePart: self._profile,
            frames.ClosePart: self._close,
        }

    @property
    def are_open(self) -> bool:
        return bool(self._parts)

    def end_waits(self, session: object) -> None:
        """End the runs of a part that is about to close. Unknown names are ignored."""
        part = self._parts.get(session) if isinstance(session, str) else None
        if part is not None:
            part.end_waits()

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:  # run all of these, even if one fails
            for session in tuple(self._parts):
                stack.push_async_callback(self._end, session)

    async def _open(self, call: frames.OpenPart) -> frames.PartOpened:
        if self._peer.leaving.is_set():
            raise PeerError(self._peer.settings.name, "its user has stopped it")
        if call.session in self._parts or call.session in self._opening:
            raise ProtocolError("this session is open already")
        shard = self._weights.sealed(call.manifest_digest)
        await run_blocking(lambda: shard.note(call.model))
        use = part_use(shard.manifest.total_bytes, call)
        name = _use_name(call.session)
        self._opening.add(call.session)
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._shards.take()
                stack.callback(self._shards.give_back)
                await self._peer.reserve(name, use, self._user)
                stack.callback(self._peer.release, name)
                # ONNX Runtime maps the file, too: addresses, and no memory that is reserved.
                own = (1 + frames.PACKED) * shard.manifest.total_bytes + call.buffer_bytes
                part = _HostedPart(call, shard, self._peer.settings.threads, own)
                stack.push_async_callback(part.aclose)
                await part.load()  # its memory is reserved, so nobody needs to wait for it
                stack.pop_all()
        finally:
            self._opening.discard(call.session)
        self._parts[call.session] = part
        return frames.PartOpened(threads=self._peer.settings.threads)

    async def _feed(self, call: frames.FeedPart) -> frames.PartDone:
        self._get(call.session).feed(call)
        return frames.PartDone()

    async def _take(self, call: frames.TakeResult) -> frames.PartPiece:
        return await self._get(call.session).take(call)

    async def _profile(self, call: frames.ProfilePart) -> frames.PartProfile:
        return frames.PartProfile(content=await self._get(call.session).profile())

    async def _close(self, call: frames.ClosePart) -> frames.PartDone:
        await uninterrupted(self._end(call.session))
        return frames.PartDone()

    def _get(self, session: str) -> _HostedPart:
        part = self._parts.get(session)
        if part is None:
            raise ProtocolError("the part is not open")
        return part

    async def _end(self, session: str) -> None:
        part = self._parts.pop(session, None)
        if part is None:
            return
        try:
            await part.aclose()
        finally:
            self._peer.release(_use_name(session))
            self._shards.give_back()


def part_use(weight_bytes: int, call: frames.OpenPart) -> Use:
    """The memory of a part: its weights, packed, a process with tensors, and what waits here."""
    return Use(
        weight_bytes=frames.PACKED * weight_bytes,
        buffer_bytes=frames.PROCESS_BYTES
        + call.buffer_bytes
        + call.held_bytes
        + call.profile * frames.PROFILE_BYTES,
    )


def _use_name(session: str) -> str:
    return f"part {session}"
