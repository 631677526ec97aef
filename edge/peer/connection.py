"""One coordinator's talk with a peer: its frames, answered in order, and what it opened here.

What a coordinator opened is closed when it goes away, however it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import ExitStack
from typing import Any

import partition
import transport
from edge.backends.interface import ShardWeights
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.errors import (
    CapacityError,
    EdgeError,
    PlanError,
    ProtocolError,
)
from edge.host.free_memory import process_memory
from edge.memory.shard_memory import host_share, shard_use
from edge.peer.hosted_shard import HostedSession
from edge.peer.profiling_calls import ProfilingCalls
from edge.peer.resources import PeerResources
from edge.protocol.heartbeat import ALIVE, SILENT_AFTER_S, Hearing, show_life
from edge.protocol.messages import (
    Assignment,
    SamplingTerms,
    error_to_header,
    integer,
    places_from_payload,
    prompt_from_payload,
    step_from_header,
    text,
)
from edge.protocol.store_errors import map_store_error
from offload import CachedShard, Manifest, ShardWriter
from transport import Channel, Frame

MAX_WAITING_FRAMES = 2
"""Read ahead of the one that is being answered. A piece of weights has 4 MiB, any frame at most
64."""

_log = logging.getLogger(__name__)


class Connection:
    """`run` it once; when it returns, nothing of the coordinator's is left here."""

    def __init__(
        self, resources: PeerResources, channel: Channel, *, silent_after_s: float = SILENT_AFTER_S
    ) -> None:
        self._peer = resources
        self._channel = channel
        self._hearing = Hearing(silent_after_s=silent_after_s)
        self._frames: asyncio.Queue[Frame] = asyncio.Queue(MAX_WAITING_FRAMES)
        self._reports: asyncio.Queue[Frame] = asyncio.Queue()
        self._writers: dict[str, ShardWriter] = {}
        self._sealed: dict[str, CachedShard] = {}
        self._mine: dict[str, HostedSession] = {}
        self._kept = ExitStack()
        self._profiling = ProfilingCalls(resources)
        self._calls: dict[str, Callable[[Frame], Awaitable[tuple[dict[str, Any], bytes]]]] = {
            "describe": self._describe,
            **self._profiling.calls,
            "offer": self._offer,
            "piece": self._piece,
            "seal": self._seal,
            "open": self._open,
            "connect": self._connect,
            "measure": self._measure,
            "close": self._close,
            "memory": self._memory,
        }
        self._posts: dict[str, Callable[[Frame], None]] = {
            "begin": self._begin,
            "step": self._step,
            "yield": self._yield,
            "suspend": self._suspend,
            "reserve": self._reserve,
            "recall": self._recall,
            "finish": self._finish,
        }

    async def run(self) -> None:
        """Answer frames until the coordinator goes away, falls silent or talks nonsense."""
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._receive(),
                self._answer_frames(),
                self._send_reports(),
                show_life(self._channel),
                self._hearing.until_silent(),  # the memory it holds may serve others
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await uninterrupted(self._clean_up(tasks))

    async def _clean_up(self, tasks: list[asyncio.Task[None]]) -> None:
        await self._channel.aclose()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, transport.TransportError):
                _log.error("serving %s failed", self._channel.peer, exc_info=outcome)
        for session in list(self._mine):
            await self._end_session(session)
        await self._profiling.aclose()
        for writer in self._writers.values():
            await run_blocking(writer.close)
        await run_blocking(self._kept.close)

    async def _receive(self) -> None:
        """Read ahead, so that a coordinator that goes away is noticed while a shard loads."""
        while True:
            self._hearing.heard()
            frame = await self._channel.receive()
            self._hearing.not_listening()  # what follows takes as long as we do
            if frame.kind != ALIVE.kind:
                await self._frames.put(frame)

    async def _answer_frames(self) -> None:
        while True:
            frame = await self._frames.get()
            answer = await self._handle(frame)
            if answer is not None:
                await self._channel.send(answer)

    async def _send_reports(self) -> None:
        while True:
            await self._channel.send(await self._reports.get())

    async def _handle(self, frame: Frame) -> Frame | None:
        """The answer to a call, or to a post that failed."""
        post = self._posts.get(frame.kind)
        if post is not None:
            try:
                post(frame)
            except Exception as error:
                header = {"request": frame.header.get("request"), **error_to_header(_mapped(error))}
                return Frame("failed", header)
            return None
        call_id = frame.header.get("call")
        try:
            call = self._calls.get(frame.kind)
            if call is None:
                raise ProtocolError(f"{frame.kind[:80]!r} is not something a peer does")
            header, payload = await call(frame)
        except Exception as error:
            return Frame("failed", {**error_to_header(_mapped(error)), "call": call_id})
        return Frame("ok", {**header, "call": call_id}, payload)

    async def _describe(self, _frame: Frame) -> tuple[dict[str, Any], bytes]:
        return self._peer.describe(), b""

    async def _memory(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        """Another budget; the answer is how the peer describes itself then."""
        await self._peer.promise(integer(frame.header, "bytes"))
        return self._peer.describe(), b""

    async def _offer(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        """Which pieces are missing of a shard."""
        manifest = Manifest.from_json(bytes(frame.payload))
        digest = manifest.digest
        missing: tuple[str, ...] = ()
        if digest not in self._sealed:
            if digest not in self._writers:
                begun = await run_blocking(
                    lambda: self._peer.cache.begin(manifest), discard=lambda begun: begun.close()
                )
                if isinstance(begun, CachedShard):
                    self._keep(digest, begun)
                else:
                    self._writers[digest] = begun
            if digest in self._writers:
                writer = self._writers[digest]
                missing = await run_blocking(lambda: writer.missing)
        return {}, json.dumps(missing).encode()

    async def _piece(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        writer, digest = self._writer(frame), text(frame.header, "digest")
        await run_blocking(lambda: writer.put(digest, frame.payload))
        return {}, b""

    async def _seal(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        digest = text(frame.header, "manifest")
        if digest not in self._sealed:
            writer = self._writer(frame)
            self._keep(digest, await run_blocking(writer.finish, discard=CachedShard.close))
            del self._writers[digest]
        return {}, b""

    def _writer(self, frame: Frame) -> ShardWriter:
        writer = self._writers.get(text(frame.header, "manifest"))
        if writer is None:
            raise ProtocolError("a piece of a shard that was not offered")
        return writer

    def _keep(self, digest: str, cached: CachedShard) -> None:
        """Hold the shard in the cache for as long as this coordinator may load it."""
        self._sealed[digest] = self._kept.enter_context(cached)

    async def _open(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        assignment = Assignment.from_payload(frame.payload)
        if assignment.session in self._peer.sessions:
            raise ProtocolError("this session is open already")
        cached = self._sealed.get(assignment.manifest_digest)
        if cached is None:
            raise ProtocolError("a shard that was not sent")
        use = shard_use(
            assignment, cached.manifest, host_bytes=self._host_share(assignment, cached.manifest)
        )
        await self._peer.reserve(assignment.session, use)
        host_free_bytes = self._peer.host_free_bytes
        host_bytes = self._host_share(assignment, cached.manifest) or 0  # others may have come
        loop = asyncio.get_running_loop()

        def report(event: Frame) -> None:
            with contextlib.suppress(RuntimeError):  # the loop ended while a step was under way
                loop.call_soon_threadsafe(self._reports.put_nowait, event)

        try:
            hosted = HostedSession(
                assignment,
                cached.manifest,
                report,
                self._peer.kv_room,
                host_bytes=host_bytes,
                kv_host_bytes=None if host_free_bytes is None else host_free_bytes - host_bytes,
            )
        except BaseException:
            self._peer.release(assignment.session)
            raise
        self._peer.sessions[assignment.session] = hosted
        self._mine[assignment.session] = hosted
        try:
            backend = await run_blocking(self._peer.backend)
            async with self._peer.loading:  # two at once would take the same room
                weights = ShardWeights(
                    path=cached.path,
                    manifest=cached.manifest,
                    packed=self._peer.packed,
                    # Nothing is kept in the cache before the first step.
                    load_room_bytes=self._peer.ledger.free_bytes + use.kv_bytes + use.buffer_bytes,
                    host_bytes=hosted.host_bytes,
                )
                loaded_bytes = await asyncio.wrap_future(
                    hosted.shard.load(backend, weights, hosted.kv.tier, hosted.kv.prefixes)
                )
        except BaseException:
            await uninterrupted(self._end_session(assignment.session))
            raise
        return {"weight_bytes": loaded_bytes}, b""

    def _host_share(self, assignment: Assignment, manifest: Manifest) -> int | None:
        """What a new shard's weights are given of the host's memory; None where there is none."""
        free_bytes = self._peer.host_free_bytes
        return None if free_bytes is None else host_share(free_bytes, assignment, manifest)

    async def _connect(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        hosted = self._session(frame)
        await hosted.connect(places_from_payload(frame.payload), self._peer.settings.name)
        await asyncio.wrap_future(hosted.shard.prepare())
        return {}, b""

    async def _measure(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        hosted = self._session(frame)
        written_bytes = hosted.kv.tier.written_bytes if hosted.kv.tier is not None else 0
        times = await asyncio.wrap_future(hosted.shard.measure())
        return {**times, **process_memory(), "kv_written_bytes": written_bytes}, b""

    async def _close(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        await uninterrupted(self._end_session(text(frame.header, "session")))
        return {}, b""

    def _begin(self, frame: Frame) -> None:
        terms = SamplingTerms.from_header(frame.header)
        self._session(frame).shard.begin(text(frame.header, "request"), terms)

    def _step(self, frame: Frame) -> None:
        self._session(frame).shard.step(step_from_header(frame.header))

    def _yield(self, frame: Frame) -> None:
        self._session(frame).shard.yield_run()

    def _suspend(self, frame: Frame) -> None:
        self._session(frame).shard.suspend(text(frame.header, "request"))

    def _reserve(self, frame: Frame) -> None:
        hosted, tokens = self._session(frame), integer(frame.header, "tokens")
        if not 0 <= tokens <= hosted.assignment.limits.context_tokens:
            raise ProtocolError(f"room for {tokens} tokens, which is not in the context")
        hosted.shard.reserve(text(frame.header, "request"), tokens)

    def _recall(self, frame: Frame) -> None:
        hosted = self._session(frame)
        prompt = prompt_from_payload(
            frame.payload,
            hosted.assignment.model.vocab_size,
            most_tokens=hosted.assignment.limits.context_tokens,
        )
        hosted.shard.recall(text(frame.header, "request"), prompt)

    def _finish(self, frame: Frame) -> None:
        self._session(frame).shard.finish(text(frame.header, "request"))

    def _session(self, frame: Frame) -> HostedSession:
        hosted = self._mine.get(text(frame.header, "session"))
        if hosted is None:
            raise ProtocolError("a session that is not open")
        return hosted

    async def _end_session(self, session: str) -> None:
        hosted = self._mine.pop(session, None)
        if hosted is not None:
            await hosted.aclose()
            self._peer.sessions.pop(session, None)
            self._peer.release(session)


def _mapped(error: Exception) -> Exception:
    """Errors of lower packages as ours, so that the coordinator can raise them by kind."""
    if isinstance(error, partition.CapacityError):
        return CapacityError(str(error))
    error = map_store_error(error)
    if isinstance(error, partition.PlanError):
        return PlanError(str(error), error.problems)
    if isinstance(error, CancelledError):
        return PlanError("the session was closed while it was loading")
    if not isinstance(error, EdgeError | OSError):
        _log.error("a coordinator's frame could not be handled", exc_info=error)
    return error
