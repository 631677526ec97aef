"""One coordinator's connection to a peer: reads its frames and answers them in order.

Everything that the coordinator opened is closed when the connection ends, for any reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from edge import partition, transport
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.engine.compute_thread import ThreadEndedError
from edge.errors import (
    CapacityError,
    EdgeError,
    PeerError,
    PlanError,
    ProtocolError,
    RequestError,
)
from edge.peer.coordinator_sessions import CoordinatorSessions
from edge.peer.frame_memory import FrameBytes, FrameMemory
from edge.peer.graph_parts import CoordinatorParts
from edge.peer.outgoing_frames import OutgoingFrames
from edge.peer.profiling_calls import ProfilingCalls
from edge.peer.resources import PeerResources
from edge.peer.towers import CoordinatorTowers
from edge.peer.weight_uploads import WeightUploads
from edge.protocol import (
    kv_frames,
    peer_frames,
    prefix_frames,
    session_frames,
    step_frames,
    tower_frames,
    weight_frames,
)
from edge.protocol.description import PeerDescription
from edge.protocol.error_codec import Failed, map_store_error
from edge.protocol.expulsion import until_expelled
from edge.protocol.frame_codec import ANSWER, SMALL, Body, Call, Done, Post, from_frame, to_frame
from edge.protocol.frame_table import FRAMES, limits_of
from edge.protocol.graph_frames import ClosePart, ProfilePart
from edge.protocol.heartbeat import (
    ALIVE,
    COORDINATOR_SILENT_AFTER_S,
    LOOK_AT_LINKS_EVERY_S,
    Hearing,
    show_life,
)
from edge.protocol.kept_files import AllKept, Keep
from edge.protocol.token_masks import most_mask_bytes
from edge.transport import MEMBER, Channel, Frame, Member
from edge.transport.frame import FrameLimits

MAX_WAITING_CALLS = 2
"""Calls read ahead of the one being answered. A piece of weights has 4 MiB, a manifest at most
16."""

TELLS_WITHIN_S = 1.0
"""Time limit for telling an expelled device so. Without a call or a read in this time it is not
told."""

LARGE_BYTES = 256 << 10
"""Frames that may be larger are decoded in a thread, off the event loop."""

LARGE_ANSWERS = frozenset(
    (
        *(
            Keep.kind,
            weight_frames.Offer.kind,
            session_frames.Observed.kind,
            tower_frames.TakeRows.kind,
        ),
        ProfilePart.kind,
    )
)
"""Calls whose answers are as large as their question."""

OF_SESSIONS = frozenset(
    (
        *(session_frames.Connect.kind, kv_frames.PutKv.kind, step_frames.PictureRows.kind),
        step_frames.RunStep.kind,
    )
)
"""Frames that may be large once a session is open."""

AT_ONCE = (step_frames.YieldRun, session_frames.AskLink)
"""Posts that are handled by the loop, not by a compute thread."""


_log = logging.getLogger(__name__)


async def anybody(_: Member | None) -> bool:
    """Admit every device."""
    return True


class Connection:
    """One connection. `run` it once; when it returns, all that the coordinator had here is
    released."""

    def __init__(
        self,
        resources: PeerResources,
        channel: Channel,
        *,
        silent_after_s: float = COORDINATOR_SILENT_AFTER_S,
        lets_in: Callable[[Member | None], Awaitable[bool]] = anybody,
    ) -> None:
        """lets_in: whether to answer this device; awaited before the first answer."""
        self._peer = resources
        self._channel = channel
        self._lets_in = lets_in
        self._loop = asyncio.get_running_loop()
        self._user: Member | None = channel.remote_hello.get(MEMBER)
        self._owner = object() if self._user is None else self._user.id
        """The owner for which resources are counted."""
        self._is_answering = False
        """Whether a first call has come and was admitted."""
        self._hearing = Hearing(channel, silent_after_s=silent_after_s)
        self._copy_quota = resources.copy_quota.of(self._owner)
        self._outgoing = OutgoingFrames(channel, self._copy_quota, silent_after_s=silent_after_s)
        self._incoming = FrameMemory(
            resources.frames, resources.small_frames, self._owner, self._hearing
        )
        self._calls_read: asyncio.Queue[tuple[Frame, FrameBytes]] = asyncio.Queue(MAX_WAITING_CALLS)
        """Each call with the memory that its frame holds."""
        self._weights = WeightUploads(resources, self._user, self._owner)
        self._profiling = ProfilingCalls(resources, self._user, self._owner)
        self._sessions = CoordinatorSessions(
            resources,
            self._user,
            self._owner,
            weights=self._weights,
            profiling=self._profiling,
            outgoing=self._outgoing,
            hearing=self._hearing,
            copy_quota=self._copy_quota,
        )
        self._towers = CoordinatorTowers(resources, self._user, self._owner, self._weights)
        self._parts = CoordinatorParts(resources, self._user, self._owner, self._weights)
        self._calls: dict[type[Call[Any]], Callable[[Any], Awaitable[object]]] = {
            peer_frames.Describe: self._describe,
            peer_frames.SetMemory: self._set_memory,
            peer_frames.TakeOver: self._take_over,
            Keep: self._keep_files,
            **self._profiling.calls,
            **self._weights.calls,
            **self._sessions.calls,
            **self._towers.calls,
            **self._parts.calls,
        }
        self._posts = self._sessions.posts

    async def run(self) -> None:
        """Answer frames until the coordinator disconnects, falls silent or breaks the protocol."""
        receiving = asyncio.create_task(self._receive())
        answering = asyncio.create_task(self._answer_calls())
        tasks: list[asyncio.Task[Any]] = [receiving, answering]
        tasks += [
            asyncio.create_task(work)
            for work in (
                self._outgoing.send_reports(),
                show_life(self._channel),
                self._tell_silence(),
                self._hearing.until_silent(),  # frees its memory for others
                self._until_too_slow(),
                until_expelled(
                    self._peer.credentials, self._user, lambda: self._sessions.neighbour_devices
                ),
            )
        ]
        telling = asyncio.create_task(self._tell_leaving())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await self._tell_expelled(receiving, answering)
        finally:
            await uninterrupted(self._clean_up([*tasks, telling]))

    async def _tell_expelled(
        self, receiving: asyncio.Task[None], answering: asyncio.Task[None]
    ) -> None:
        """Tell an expelled device that it was expelled, if it waits for an answer or has just
        connected. A handshake would tell it less."""
        credentials, user = self._peer.credentials, self._user
        if credentials is None or user is None:
            return
        if self._calls_read.empty() and (self._is_answering or receiving.done()):
            return
        error = PeerError(
            self._peer.settings.name,
            "this device was expelled from the cluster, or paired again since this program started",
            remedy="start this program again, or pair the device again with `edge pair`",
        )
        with contextlib.suppress(RequestError, transport.TransportError, TimeoutError):
            if not credentials.is_admitted(user.id, user.edition):
                answering.cancel()  # no other call is answered from now on
                async with asyncio.timeout(TELLS_WITHIN_S):
                    frame, _ = await self._calls_read.get()
                    answer = to_frame(Failed.kind, Failed.of(error), call=frame.header.get("call"))
                    await self._channel.send(answer)

    async def _clean_up(self, tasks: list[asyncio.Task[Any]]) -> None:
        await self._channel.aclose()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, transport.TransportError):
                self._peer.failures.failed("serving a coordinator", outcome)
        async with AsyncExitStack() as stack:  # run all of these, even if one fails
            stack.callback(self._copy_quota.give_back_all)
            stack.callback(self._incoming.give_back_all)  # runs last, when no session is left
            stack.push_async_callback(self._weights.aclose)
            stack.push_async_callback(self._towers.aclose)
            stack.push_async_callback(self._parts.aclose)
            stack.push_async_callback(self._sessions.aclose)
        # Break the reference cycle: handlers are bound methods of this object. Otherwise its
        # buffers stay until the garbage collector runs, which is late in an idle daemon.
        self._calls.clear()
        self._posts.clear()

    async def _receive(self) -> None:
        """Pass posts to the compute threads, and calls to the task that answers them one by one.

        A post may overtake earlier calls, whose sender can wait for their answers. Nothing
        overtakes a post. A `Close` ends the waits of its session at once, because a call that is
        being answered may wait for a lost neighbour. Calls are read ahead, so that a disconnect is
        noticed while a shard loads.
        """
        while True:
            await self._outgoing.until_told()
            self._hearing.listening()
            frame = await self._channel.receive(self._limits_of, self._incoming.admit)
            self._hearing.not_listening()  # handling the frame takes our time, not the sender's
            taken = self._incoming.received()
            if frame.kind == ALIVE.kind:
                self._incoming.give_back(taken)
                continue
            cls = FRAMES.get(frame.kind)
            if cls is None or not issubclass(cls, Post):
                if cls is session_frames.Close:
                    self._sessions.end_waits(frame.header.get("session"))
                elif cls is ClosePart:
                    self._parts.end_waits(frame.header.get("session"))
                await self._calls_read.put((frame, taken))
                continue
            try:
                has_large_header = taken.large > len(frame.payload)
                post = await self._read_aside(cls, frame) if has_large_header else None
                await self._post(post or from_frame(cls, frame), taken)
            except Exception as error:
                # Backpressure: a sender of invalid frames that does not read the errors is not read
                # either.
                await self._outgoing.send(to_frame(Failed.kind, self._failed(error)))
            del frame  # drop the payload before waiting for the next frame
            self._incoming.give_back(taken)

    async def _post(self, post: Any, taken: FrameBytes) -> None:
        """Pass a post to its session once the session's backlog has room. The memory of a large
        post stays counted until the compute thread begins it."""
        if not isinstance(post, AT_ONCE):
            hosted = self._sessions.get(post.session)
            begun = await hosted.backlog.take(taken.large + taken.small)
            try:
                self._sessions.get(post.session)  # it may have ended during the wait
            except EdgeError:
                begun()
                raise
            # The compute thread calls this when all earlier posts are done.
            hosted.shard.at_turn(partial(self._begun, begun, FrameBytes(large=taken.large)))
            taken.large = 0
        self._posts[type(post)](post)

    def _begun(self, begun: Callable[[], None], taken: FrameBytes) -> None:
        """Give back the post's memory. Called by the compute thread."""
        begun()
        if taken.large:
            with contextlib.suppress(RuntimeError):  # the loop may end during a step
                self._loop.call_soon_threadsafe(self._incoming.give_back, taken)

    @property
    def _may_use(self) -> bool:
        with contextlib.suppress(RequestError):
            self._peer.check_may_use(self._user)
            return True
        return False

    def _limits_of(self, kind: str) -> FrameLimits:
        """Size limits of a frame of this kind in the present state: small unless a large one is
        expected."""
        limits = limits_of(kind)
        if not self._may_use or (kind == weight_frames.Piece.kind and not self._weights.are_coming):
            return SMALL
        assignments = self._sessions.assignments
        if kind in OF_SESSIONS and not assignments:
            return SMALL
        if kind in {prefix_frames.MatchPrefix.kind, step_frames.Finish.kind}:
            contexts = [each.limits.context_tokens for each in assignments]
            return replace(
                limits, payload_bytes=max(SMALL.payload_bytes, 8 * max(contexts, default=0))
            )
        if kind == tower_frames.ReadTile.kind:
            return replace(limits, payload_bytes=self._towers.most_tile_bytes)
        if kind == tower_frames.PutHidden.kind:
            return replace(limits, payload_bytes=self._towers.most_hidden_bytes)
        if kind == step_frames.RunStep.kind:
            most = [
                most_mask_bytes(each.limits.requests, each.model.vocab_size) for each in assignments
            ]
            return replace(limits, payload_bytes=max(SMALL.payload_bytes, *most, 0))
        return limits

    async def _answer_calls(self) -> None:
        if not await self._lets_in(self._user):
            return
        while True:
            frame, taken = await self._calls_read.get()
            self._is_answering = True
            async with self._large_answer(frame.kind):
                answering = self._answer(frame)
                del frame  # may be large: drop it before the answer is sent
                await self._outgoing.send(await answering)
            self._incoming.give_back(taken)

    @contextlib.asynccontextmanager
    async def _large_answer(self, kind: str) -> AsyncIterator[None]:
        """Hold a slot of `large_answers` while a large answer is made and sent."""
        if kind not in LARGE_ANSWERS:
            yield
            return
        await self._peer.large_answers.take(self._owner, 1)
        try:
            yield
        finally:
            self._peer.large_answers.give_back(self._owner, 1)

    async def _until_too_slow(self) -> None:
        num_bytes = await self._incoming.until_too_slow()
        _log.info("%s sends a large frame too slowly: %d bytes", self._channel.peer, num_bytes)

    async def _tell_silence(self) -> None:
        """Report links on which nothing arrives. A peer that waits cannot tell a busy neighbour
        from a dead link. The coordinator hears both ends, and can."""
        while True:
            await asyncio.sleep(LOOK_AT_LINKS_EVERY_S)
            await self._outgoing.until_told()
            for waits in self._sessions.silent_links():
                self._outgoing.report(waits)

    async def _tell_leaving(self) -> None:
        await self._peer.leaving.wait()
        self._outgoing.report(peer_frames.Leaving())

    async def _answer(self, frame: Frame) -> Frame:
        call_id = frame.header.get("call")
        try:
            cls = FRAMES.get(frame.kind)
            if cls not in self._calls:
                raise ProtocolError(f"{frame.kind[:80]!r} is not a call that a peer answers")
            self._peer.check_may_use(self._user)
            call = await self._read(cls, frame)
            del frame
            answer = await self._calls[cls](call)
        except Exception as error:
            return to_frame(Failed.kind, self._failed(error), call=call_id)
        return to_frame(ANSWER, answer, call=call_id)

    async def _read(self, cls: type[Call[Any]], frame: Frame) -> Call[Any]:
        limits = cls.limits
        if max(limits.header_bytes, limits.payload_bytes) <= LARGE_BYTES:
            return from_frame(cls, frame)
        return await self._read_aside(cls, frame)

    async def _read_aside(self, cls: type[Body], frame: Frame) -> Body:
        """Decode a frame in a thread, one at a time: decoding may need many times the frame's
        size."""
        async with self._peer.reading.turn(self._owner):
            return await run_blocking(lambda: from_frame(cls, frame))

    def _failed(self, error: Exception) -> Failed:
        mapped = _mapped(error)
        if not isinstance(mapped, EdgeError | OSError):
            self._peer.failures.failed("handling a coordinator's frame", mapped)
        return Failed.of(mapped)

    async def _describe(self, _call: peer_frames.Describe) -> PeerDescription:
        return self._peer.describe(self._user)

    async def _set_memory(self, call: peer_frames.SetMemory) -> PeerDescription:
        await self._peer.promise(call.bytes, self._user)
        return self._peer.describe(self._user)

    async def _take_over(self, call: peer_frames.TakeOver) -> Done:
        user_id = None if self._user is None else self._user.id
        await uninterrupted(self._peer.leases.take_over(user_id, call.lease))
        return Done()

    async def _keep_files(self, call: Keep) -> AllKept:
        return await run_blocking(lambda: self._peer.kept_files(self._user, call.remove))


def _mapped(error: Exception) -> Exception:
    """The error as one of `edge.errors`, so that the coordinator can raise it by kind."""
    if isinstance(error, partition.CapacityError):
        return CapacityError(str(error))
    error = map_store_error(error)
    if isinstance(error, partition.PlanError):
        return PlanError(str(error), error.problems)
    if isinstance(error, ThreadEndedError):
        return PlanError("the session was closed while it was loading")
    return error
