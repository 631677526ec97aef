"""One coordinator's talk with a peer: its frames, answered in order, and what it opened here.

What a coordinator opened is closed when it goes away, however it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge import partition, transport
from edge.backends.interface import ShardWeights, StageProgram
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.engine.compute_thread import ThreadEndedError
from edge.engine.prefix_cache import PrefixPlaces
from edge.engine.shard_engine import NO_MASKS
from edge.errors import (
    CapacityError,
    EdgeError,
    PeerError,
    PlanError,
    ProtocolError,
    RequestError,
)
from edge.host.free_memory import process_memory
from edge.memory.ledger import MEASURING, Use
from edge.memory.shard_memory import check_plan, host_share, shard_use
from edge.memory.step_memory import load_bytes
from edge.offload import CachedShard, DerivedCache, Manifest, ShardWriter
from edge.peer.hosted_shard import HostedShard
from edge.peer.incoming_frames import IncomingFrames, Taken
from edge.peer.outgoing_frames import OutgoingFrames
from edge.peer.profiling_calls import ProfilingCalls
from edge.peer.quota import Held
from edge.peer.resources import PeerResources
from edge.peer.unsent import Unsent
from edge.protocol import messages
from edge.protocol.assignment import Assignment
from edge.protocol.description import MAX_SESSIONS, PeerDescription
from edge.protocol.error_codec import Failed, map_store_error
from edge.protocol.expulsion import until_expelled
from edge.protocol.fields import token_ids
from edge.protocol.frame_codec import ANSWER, SMALL, Body, Call, Event, Post, from_frame, to_frame
from edge.protocol.heartbeat import (
    ALIVE,
    COORDINATOR_SILENT_AFTER_S,
    LINK_SILENT_AFTER_S,
    LOOK_AT_LINKS_EVERY_S,
    Hearing,
    show_life,
)
from edge.protocol.kept_files import AllKept, Keep
from edge.protocol.step_times import ShardTimes
from edge.protocol.token_masks import mask_bytes, read_masks
from edge.protocol.topology import neighbours
from edge.transport import MEMBER, Channel, Frame, Member
from edge.transport.frame import FrameLimits
from edge.weights.shard_tensors import check_tensors

MAX_WAITING_CALLS = 2
"""Read ahead of the one that is being answered. A piece of weights has 4 MiB, a manifest at most
16."""

TELLS_WITHIN_S = 1.0
"""Who is expelled and does not read is not waited for."""

LARGE_BYTES = 256 << 10
"""A frame that may be larger is read in a thread, next to the loop."""

LARGE_ANSWERS = frozenset((Keep.kind, messages.Offer.kind, messages.Observed.kind))
"""Calls whose answers are as large as what was asked about."""

OF_SESSIONS = frozenset((messages.Connect.kind, messages.PutKv.kind, messages.RunStep.kind))
"""That may be large, where there is a session."""

AT_ONCE = (messages.YieldRun, messages.AskLink)
"""Posts that no compute thread carries out."""


_log = logging.getLogger(__name__)


async def anybody(_: Member | None) -> bool:
    """Is let in."""
    return True


class Connection:
    """`run` it once; when it returns, nothing of the coordinator's is left here."""

    def __init__(
        self,
        resources: PeerResources,
        channel: Channel,
        *,
        silent_after_s: float = COORDINATOR_SILENT_AFTER_S,
        lets_in: Callable[[Member | None], Awaitable[bool]] = anybody,
    ) -> None:
        """lets_in: whether the other end is answered; asked, and waited for, before the first."""
        self._peer = resources
        self._channel = channel
        self._lets_in = lets_in
        self._loop = asyncio.get_running_loop()
        self._user: Member | None = channel.remote_hello.get(MEMBER)
        self._owner = object() if self._user is None else self._user.id
        """Whose what is held counts as."""
        self._offers = Held(resources.offers, self._owner)
        self._manifest_entries = Held(resources.manifest_entries, self._owner)
        self._shards = Held(resources.shards, self._owner)
        self._links = Held(resources.links, self._owner)
        self._hearing = Hearing(channel, silent_after_s=silent_after_s)
        self._copy_room = resources.copy_room.of(self._owner)
        self._outgoing = OutgoingFrames(channel, self._copy_room, silent_after_s=silent_after_s)
        self._incoming = IncomingFrames(
            resources.frames, resources.small_frames, self._owner, self._hearing
        )
        self._calls_read: asyncio.Queue[tuple[Frame, Taken]] = asyncio.Queue(MAX_WAITING_CALLS)
        """And what each has taken of the rooms for frames."""
        self._writers: dict[str, ShardWriter] = {}
        self._sealed: dict[str, CachedShard] = {}
        self._mine: dict[str, HostedShard] = {}
        self._ending: dict[str, asyncio.Event] = {}
        """Sessions that are being closed, by this coordinator or for another one."""
        self._replaced: dict[str, RequestError] = {}
        """Why sessions have ended that another coordinator's came for."""
        self._parked: list[str] = []
        """What is kept ready for this coordinator, as long as it is there."""
        self._is_gone = False
        self._kept = ExitStack()
        self._profiling = ProfilingCalls(resources, self._user, self._owner)
        self._calls: dict[type[Call[Any]], Callable[[Any], Awaitable[object]]] = {
            messages.Describe: self._describe,
            messages.SetMemory: self._set_memory,
            messages.TakeOver: self._take_over,
            Keep: self._keep_files,
            **self._profiling.calls,
            messages.Offer: self._offer,
            messages.Piece: self._piece,
            messages.Seal: self._seal,
            messages.Open: self._open,
            messages.Connect: self._connect,
            messages.PutKv: self._put_kv,
            messages.Measure: self._measure,
            messages.Observed: self._observed,
            messages.Close: self._close,
        }
        self._posts: dict[type[Post], Callable[[Any], None]] = {
            messages.MatchPrefix: self._match_prefix,
            messages.Reserve: self._reserve,
            messages.RunStep: self._run_step,
            messages.YieldRun: self._yield_run,
            messages.SwapOut: self._swap_out,
            messages.SaveState: self._save_state,
            messages.Finish: self._finish,
            messages.AskLink: self._ask_link,
        }

    async def run(self) -> None:
        """Answer frames until the coordinator goes away, falls silent or talks nonsense."""
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._receive(),
                self._answer_calls(),
                self._outgoing.send_reports(),
                show_life(self._channel),
                self._tell_silence(),
                self._hearing.until_silent(),  # the memory it holds may serve others
                self._until_too_slow(),
                until_expelled(self._peer.credentials, self._user, self._neighbours),
            )
        ]
        telling = asyncio.create_task(self._tell_leaving())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await self._tell_expelled()
        finally:
            await uninterrupted(self._clean_up([*tasks, telling]))

    async def _tell_expelled(self) -> None:
        """Whoever is no member any more, where it waits for an answer: the handshake will tell it
        less."""
        credentials, user = self._peer.credentials, self._user
        if credentials is None or user is None or self._calls_read.empty():
            return
        error = PeerError(
            self._peer.settings.name,
            "it has heard that this device was expelled from the cluster, or paired again since",
            remedy="start this program anew, or take the device in again with `edge pair`",
        )
        with contextlib.suppress(RequestError, transport.TransportError, TimeoutError):
            if not credentials.is_admitted(user.id, user.edition):
                frame, _ = self._calls_read.get_nowait()
                answer = to_frame(Failed.kind, Failed.of(error), call=frame.header.get("call"))
                async with asyncio.timeout(TELLS_WITHIN_S):
                    await self._channel.send(answer)

    async def _clean_up(self, tasks: list[asyncio.Task[Any]]) -> None:
        await self._channel.aclose()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, transport.TransportError):
                self._peer.failures.failed("serving a coordinator", outcome)
        self._is_gone = True
        for parked in self._parked:
            self._peer.let_go(parked)
        async with AsyncExitStack() as stack:  # each of these whatever became of those before
            stack.callback(self._copy_room.give_back_all)
            stack.callback(self._manifest_entries.give_back_all)
            stack.callback(self._offers.give_back_all)
            stack.callback(self._incoming.give_back_all)  # no session is left then
            stack.push_async_callback(run_blocking, self._kept.close)
            for writer in self._writers.values():
                stack.push_async_callback(run_blocking, writer.close)
            for session in (*self._mine, *self._ending):
                stack.push_async_callback(self._end_session, session)
        # Handlers are methods of this object: with them it would wait, buffers and all, until the
        # garbage is collected, which a daemon that has nothing to do does not.
        self._calls.clear()
        self._posts.clear()

    @property
    def _user_id(self) -> str | None:
        return None if self._user is None else self._user.id

    def _neighbours(self) -> list[str | None]:
        """The devices that its sessions are linked with."""
        return [id for hosted in self._mine.values() for id in hosted.neighbour_devices]

    async def _receive(self) -> None:
        """Hand posts to the compute threads, and calls to who answers them one after the other.

        A post may overtake calls that came before it, which their sender can wait for, but nothing
        overtakes a post. A call that is being answered may wait for a neighbour that is gone: the
        end of its session does not wait for that. Calls are read ahead of the one that is being
        answered, so that a coordinator that goes away is noticed while a shard loads.
        """
        while True:
            await self._outgoing.until_told()
            self._hearing.listening()
            frame = await self._channel.receive(self._limits_of, self._incoming.admit)
            self._hearing.not_listening()  # what follows takes as long as we do
            taken = self._incoming.received()
            if frame.kind == ALIVE.kind:
                self._incoming.give_back(taken)
                continue
            cls = messages.FRAMES.get(frame.kind)
            if cls is None or not issubclass(cls, Post):
                if cls is messages.Close:
                    self._end_waits(frame)
                await self._calls_read.put((frame, taken))
                continue
            try:
                has_large_header = taken.large > len(frame.payload)
                post = await self._read_aside(cls, frame) if has_large_header else None
                await self._post(post or from_frame(cls, frame), taken)
            except Exception as error:
                # A sender of nonsense that does not read what it is told is not read any more.
                await self._outgoing.send(to_frame(Failed.kind, self._failed(error)))
            del frame  # no payload is kept while the next is waited for
            self._incoming.give_back(taken)

    async def _post(self, post: Any, taken: Taken) -> None:
        """Hand it to its session, once that has not too many that wait. What is large of it stays
        taken until the compute thread begins with it."""
        if not isinstance(post, AT_ONCE):
            hosted = self._session(post.session)
            begun = await hosted.unbegun.take(taken.large + taken.small)
            if self._mine.get(post.session) is not hosted:  # it ended meanwhile
                begun()
                self._session(post.session)
            # It is the post's turn once all that was posted before is over.
            hosted.shard.at_turn(partial(self._begun, begun, Taken(large=taken.large)))
            taken.large = 0
        self._posts[type(post)](post)

    def _begun(self, begun: Callable[[], None], taken: Taken) -> None:
        """For the compute thread."""
        begun()
        if taken.large:
            with contextlib.suppress(RuntimeError):  # the loop ended while a step was under way
                self._loop.call_soon_threadsafe(self._incoming.give_back, taken)

    def _end_waits(self, frame: Frame) -> None:
        session = frame.header.get("session")
        hosted = self._mine.get(session) if isinstance(session, str) else None
        if hosted is not None:
            hosted.end_waits()

    @property
    def _may_use(self) -> bool:
        with contextlib.suppress(RequestError):
            self._peer.check_may_use(self._user)
            return True
        return False

    def _limits_of(self, kind: str) -> FrameLimits:
        """As large as what has been agreed makes them: what nobody waits for is small."""
        limits = messages.limits_of(kind)
        if not self._may_use or (kind == messages.Piece.kind and not self._writers):
            return SMALL
        if kind in OF_SESSIONS and not self._mine:
            return SMALL
        if kind in {messages.MatchPrefix.kind, messages.Finish.kind}:
            contexts = [hosted.assignment.limits.context_tokens for hosted in self._mine.values()]
            return replace(
                limits, payload_bytes=max(SMALL.payload_bytes, 4 * max(contexts, default=0))
            )
        if kind == messages.RunStep.kind:
            most = [
                hosted.assignment.limits.requests * mask_bytes(hosted.assignment.model.vocab_size)
                for hosted in self._mine.values()
            ]
            return replace(limits, payload_bytes=max(SMALL.payload_bytes, *most, 0))
        return limits

    async def _answer_calls(self) -> None:
        if not await self._lets_in(self._user):
            return
        while True:
            frame, taken = await self._calls_read.get()
            async with self._large_answer(frame.kind):
                answering = self._answer(frame)
                del frame  # which may be large; it is not kept while its answer is sent
                await self._outgoing.send(await answering)
            self._incoming.give_back(taken)

    @contextlib.asynccontextmanager
    async def _large_answer(self, kind: str) -> AsyncIterator[None]:
        """While the answer to a call of this kind is made and sent."""
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
        """Who waits cannot know whether the other one computes or the link is dead; whoever is
        told by both ends can."""
        while True:
            await asyncio.sleep(LOOK_AT_LINKS_EVERY_S)
            await self._outgoing.until_told()
            for hosted in self._mine.values():
                found = hosted.shard.links.silent(at_least_s=LINK_SILENT_AFTER_S)
                for (stage, rank), state in found.items():
                    self._outgoing.report(
                        messages.Waits(
                            stage=stage,
                            rank=rank,
                            received=state.received,
                            silent_s=state.silent_s,
                        )
                    )

    async def _tell_leaving(self) -> None:
        await self._peer.leaving.wait()
        self._outgoing.report(messages.Leaving())

    async def _answer(self, frame: Frame) -> Frame:
        call_id = frame.header.get("call")
        try:
            cls = messages.FRAMES.get(frame.kind)
            if cls not in self._calls:
                raise ProtocolError(f"{frame.kind[:80]!r} is not something a peer does")
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
        """Next to the loop, one at a time: it may take many times its size for a moment."""
        async with self._peer.reading.turn(self._owner):
            return await run_blocking(lambda: from_frame(cls, frame))

    def _failed(self, error: Exception) -> Failed:
        mapped = _mapped(error)
        if not isinstance(mapped, EdgeError | OSError):
            self._peer.failures.failed("handling a coordinator's frame", mapped)
        return Failed.of(mapped)

    async def _describe(self, _call: messages.Describe) -> PeerDescription:
        return self._peer.describe(self._user)

    async def _set_memory(self, call: messages.SetMemory) -> PeerDescription:
        await self._peer.promise(call.bytes, self._user)
        return self._peer.describe(self._user)

    async def _take_over(self, call: messages.TakeOver) -> messages.Done:
        await uninterrupted(self._peer.leases.take_over(self._user_id, call.lease))
        return messages.Done()

    async def _keep_files(self, call: Keep) -> AllKept:
        return await run_blocking(lambda: self._peer.kept_files(self._user, call.remove))

    async def _offer(self, call: messages.Offer) -> messages.Missing:
        manifest = call.manifest
        digest = manifest.digest
        missing: tuple[str, ...] = ()
        if digest not in self._sealed:
            if digest not in self._writers:
                self._take_offer(manifest)
                try:
                    begun = await run_blocking(
                        lambda: self._peer.cache.begin(
                            manifest,
                            owner=None if self._user is None else self._user.id,
                            owner_limit_bytes=self._peer.user_cache_bytes,
                        ),
                        discard=lambda begun: begun.close(),
                    )
                except BaseException:
                    self._give_back_offer(manifest)
                    raise
                if isinstance(begun, CachedShard):
                    self._keep(digest, begun)
                else:
                    self._writers[digest] = begun
            if digest in self._writers:
                writer = self._writers[digest]
                missing = await run_blocking(lambda: writer.missing)
        return messages.Missing(digests=missing)

    def _take_offer(self, manifest: Manifest) -> None:
        self._offers.take()
        try:
            self._manifest_entries.take(_entries(manifest))
        except CapacityError:
            self._offers.give_back()
            raise

    def _give_back_offer(self, manifest: Manifest) -> None:
        self._offers.give_back()
        self._manifest_entries.give_back(_entries(manifest))

    async def _piece(self, call: messages.Piece) -> messages.Done:
        writer = self._writer(call.manifest)
        await run_blocking(lambda: writer.put(call.digest, call.content))
        return messages.Done()

    async def _seal(self, call: messages.Seal) -> messages.Done:
        digest = call.manifest
        if digest not in self._sealed:
            writer = self._writer(digest)
            self._keep(digest, await run_blocking(writer.finish, discard=CachedShard.close))
            del self._writers[digest]
        return messages.Done()

    def _writer(self, digest: str) -> ShardWriter:
        writer = self._writers.get(digest)
        if writer is None:
            raise ProtocolError("a piece of a shard that was not offered")
        return writer

    def _keep(self, digest: str, cached: CachedShard) -> None:
        """Hold the shard in the cache for as long as this coordinator may load it."""
        self._sealed[digest] = self._kept.enter_context(cached)

    async def _open(self, call: messages.Open) -> messages.Opened:
        assignment = call.assignment
        if assignment.session.startswith(MEASURING):
            raise ProtocolError("a session with the name of a measurement")
        self._check_new(assignment)
        await run_blocking(lambda: check_plan(assignment))
        if assignment.manifest_digest == messages.MADE_UP_WEIGHTS:
            return await uninterrupted(self._load_made_up(call))
        cached = self._sealed.get(assignment.manifest_digest)
        if cached is None:
            raise ProtocolError("a shard that was not sent")
        await run_blocking(lambda: cached.note(assignment.plan.model))
        check_tensors(
            cached.manifest,
            assignment.layout,
            assignment.weight_format.recipe,
            hidden_size=assignment.model.hidden_size,
        )
        return await self._load(call, cached.path, cached.manifest, self._peer.packed)

    def _check_new(self, assignment: Assignment) -> None:
        """Raises ProtocolError for a key that another one has: it is that of its memory, too.

        PeerError when no session may begin any more.
        """
        if self._peer.leaving.is_set():
            raise PeerError(
                self._peer.settings.name,
                "it is leaving: it was stopped by its user; load on other peers",
            )
        taken = assignment.key in self._peer.sessions or assignment.key in self._peer.ledger.uses
        if taken or assignment.session in self._mine:
            raise ProtocolError("this session is open already")

    async def _load_made_up(self, call: messages.Open) -> messages.Opened:
        """Random weights, which are gone from the disk once they are loaded."""
        with ExitStack() as stack:
            written = await run_blocking(
                lambda: stack.enter_context(self._profiling.made_up_weights(call.assignment))
            )
            return await self._load(call, written.path, written.manifest, None)

    async def _load(
        self, call: messages.Open, path: Path, manifest: Manifest, packed: DerivedCache | None
    ) -> messages.Opened:
        assignment = call.assignment
        use = await run_blocking(
            lambda: shard_use(
                assignment, manifest, host_bytes=self._host_share(assignment, manifest)
            )
        )
        parked = await self._reserve_for(call, use)
        host_free_bytes = self._peer.host_free_bytes
        host_bytes = self._host_share(assignment, manifest) or 0  # others may have come
        loop, unsent = asyncio.get_running_loop(), Unsent()

        def report(event: Event) -> None:
            sent = unsent.take(event)
            with contextlib.suppress(RuntimeError):  # the loop ended while a step was under way
                loop.call_soon_threadsafe(self._outgoing.report, event, sent)

        try:
            hosted = HostedShard(
                assignment,
                manifest,
                report,
                self._peer.kv_room,
                host_bytes=host_bytes,
                kv_host_bytes=None if host_free_bytes is None else host_free_bytes - host_bytes,
                copy_room=self._copy_room,
                expected=call.expected,
                end_reports=unsent.end,
            )
        except BaseException:
            self._peer.leases.give_back(assignment.key)
            self._peer.release(assignment.key)
            self._give_back_shard(assignment)
            if parked is not None:
                await uninterrupted(run_blocking(parked.close))
            raise
        if parked is not None:
            hosted.shard.resume(parked)
        self._peer.sessions[assignment.key] = hosted
        self._peer.fit_beginnings()  # its host may have less than before
        self._mine[assignment.session] = hosted
        prefixes = None
        if assignment.manifest_digest != messages.MADE_UP_WEIGHTS:
            prefixes = PrefixPlaces(
                memory=self._peer.kv_room.beginnings,
                disk=hosted.kv.prefixes,
                secret=call.prefix_secret,
                owner=self._user_id or "",
                trusted=call.prefixes_of,
            )
        try:
            backend = await run_blocking(self._peer.backend)
            more_bytes = load_bytes(assignment.layout, assignment.weight_format)
            # Two at once would take the same room.
            async with (
                self._peer.loading.turn(self._owner),
                self._peer.room_to_load(more_bytes),
            ):
                weights = ShardWeights(
                    path=path,
                    manifest=manifest,
                    packed=packed,
                    # Nothing is kept in the cache before the first step.
                    load_room_bytes=self._peer.ledger.free_bytes + use.kv_bytes + use.buffer_bytes,
                    # Where they have a limit of their own, it is of weights and KV caches together.
                    lends_buffers=self._peer.ledger.model_limit_bytes is None,
                    host_bytes=hosted.host_bytes,
                )
                loaded_bytes = await asyncio.wrap_future(
                    hosted.shard.load(
                        backend,
                        weights,
                        hosted.kv.tier,
                        prefixes,
                    )
                )
        except BaseException:
            await uninterrupted(self._end_session(assignment.session))
            if (replaced := self._replaced.get(assignment.session)) is not None:
                raise replaced from None
            raise
        if assignment.manifest_digest != messages.MADE_UP_WEIGHTS:
            self._peer.audit.loaded(self._user, assignment, use.total)
        return messages.Opened(
            weight_bytes=loaded_bytes,
            rows_agree=hosted.shard.rows_agree,
            batches_agree=hosted.shard.batches_agree,
        )

    async def _reserve_for(self, call: messages.Open, use: Use) -> StageProgram | None:
        """Its memory, a shard of its owner's, and its place among the run's coordinators. And what
        was parked of the same, if there is that: it takes no more memory."""
        key, leases = call.assignment.key, self._peer.leases

        async def end(replaced: RequestError) -> None:
            await self._end_replaced(call.assignment.session, replaced)

        await leases.take(
            self._user_id, call.lease, key, end, silent_s=lambda: self._hearing.silent_s
        )
        parked = None
        try:
            parked = self._peer.parked(self._user_id, call.assignment)
            await self._peer.reserve(key, use, self._user)
            try:
                leases.check(self._user_id, call.lease)  # it may have waited for memory
                self._take_shard(call.assignment)
            except EdgeError:
                self._peer.release(key)
                raise
        except BaseException:
            leases.give_back(key)
            if parked is not None:
                await uninterrupted(run_blocking(parked.close))
            raise
        return parked

    def _take_shard(self, assignment: Assignment) -> None:
        self._shards.take()
        try:
            self._links.take(_links(assignment))
        except CapacityError:
            self._shards.give_back()
            raise

    def _give_back_shard(self, assignment: Assignment) -> None:
        self._shards.give_back()
        self._links.give_back(_links(assignment))

    def _host_share(self, assignment: Assignment, manifest: Manifest) -> int | None:
        """What a new shard's weights are given of the host's memory; None where there is none."""
        free_bytes = self._peer.host_free_bytes
        return None if free_bytes is None else host_share(free_bytes, assignment, manifest)

    async def _connect(self, call: messages.Connect) -> messages.Connected:
        hosted = self._session(call.session)
        peer = self._peer
        await hosted.connect(call.places, peer.settings.name, peer.credentials, peer.reached)
        digest = await asyncio.wrap_future(hosted.shard.prepare())
        return messages.Connected(kv_digest=digest or None)

    async def _put_kv(self, call: messages.PutKv) -> messages.Done:
        hosted = self._session(call.session)
        vocab_size = hosted.assignment.model.vocab_size
        if not all(0 <= token < vocab_size for token in call.tokens):
            raise ProtocolError(f"tokens outside a vocabulary of {vocab_size}")
        last = call.first + len(call.tokens)
        if not 0 <= call.first < last <= hosted.assignment.limits.context_tokens:
            raise ProtocolError(f"keys and values of tokens {call.first} to {last}")
        hosted.announce(call.request)
        put = hosted.shard.put_kv(call.request, call.first, call.tokens, call.rows)
        await asyncio.wrap_future(put)
        return messages.Done()

    async def _measure(self, call: messages.Measure) -> ShardTimes:
        hosted = self._session(call.session)
        prompt, decode = await asyncio.wrap_future(hosted.shard.measure())
        memory = process_memory()
        return ShardTimes(
            prompt=prompt,
            decode=decode,
            resident_bytes=memory["resident_bytes"],
            peak_bytes=memory["peak_bytes"],
            kv_written_bytes=hosted.kv.tier.written_bytes if hosted.kv.tier is not None else 0,
        )

    async def _observed(self, call: messages.Observed) -> messages.Gram:
        gram = await asyncio.wrap_future(self._session(call.session).shard.gram(call.run))
        return messages.Gram(content=gram.view(np.uint8).reshape(-1).data)

    async def _close(self, call: messages.Close) -> messages.Done:
        await uninterrupted(self._end_session(call.session, parks=call.parks))
        return messages.Done()

    def _match_prefix(self, post: messages.MatchPrefix) -> None:
        hosted = self._session(post.session)
        prompt = token_ids(
            post.prompt,
            hosted.assignment.model.vocab_size,
            most_tokens=hosted.assignment.limits.context_tokens,
        )
        if not 0 <= post.tokens <= len(prompt):
            raise ProtocolError(f"{post.tokens} tokens of a prompt of {len(prompt)}")
        hosted.announce(post.request, prompt_tokens=len(prompt))
        hosted.shard.match_prefix(
            post.request, prompt, source=post.source, tokens=post.tokens, moves=post.moves
        )

    def _reserve(self, post: messages.Reserve) -> None:
        hosted = self._session(post.session)
        if post.tokens > hosted.assignment.limits.context_tokens:
            raise ProtocolError(f"room for {post.tokens} tokens, which is not in the context")
        hosted.shard.reserve(post.request, post.tokens)

    def _run_step(self, post: messages.RunStep) -> None:
        hosted = self._session(post.session)
        vocab_size = hosted.assignment.model.vocab_size
        for request, terms in post.terms.items():
            if any(token >= vocab_size for token in terms.end_ids):
                raise ProtocolError(f"a reply that ends outside a vocabulary of {vocab_size}")
            if any(token >= vocab_size for token in terms.sampling.logit_bias):
                raise ProtocolError(f"a bias of a token outside a vocabulary of {vocab_size}")
            hosted.announce(request)
        masks = NO_MASKS
        if hosted.shard.layout.is_last_stage:
            masks = read_masks(post.masked, post.masks, vocab_size)
        hosted.shard.step(post.step, post.terms, masks)

    def _yield_run(self, post: messages.YieldRun) -> None:
        self._session(post.session).shard.yield_run()

    def _swap_out(self, post: messages.SwapOut) -> None:
        self._session(post.session).shard.swap_out(post.request)

    def _save_state(self, post: messages.SaveState) -> None:
        self._session(post.session).save_state(post.request, post.tokens, post.place)

    def _finish(self, post: messages.Finish) -> None:
        hosted = self._session(post.session)
        hosted.forget(post.request)
        most_tokens = hosted.assignment.limits.context_tokens
        vocab_size = hosted.assignment.model.vocab_size
        answer = (
            token_ids(post.answer, vocab_size, most_tokens=most_tokens) if post.answer else None
        )
        answer_tokens = 0 if answer is None else len(answer)
        if not answer_tokens <= post.kept_tokens <= most_tokens:
            raise ProtocolError(
                f"{post.kept_tokens} tokens of a cache, {answer_tokens} of an answer"
            )
        hosted.shard.finish(post.request, kept_tokens=post.kept_tokens, answer=answer)

    def _ask_link(self, post: messages.AskLink) -> None:
        state = self._session(post.session).shard.links.state((post.stage, post.rank))
        self._outgoing.report(messages.LinkSent(stage=post.stage, rank=post.rank, sent=state.sent))

    def _session(self, session: str) -> HostedShard:
        hosted = self._mine.get(session)
        if hosted is None:
            raise self._replaced.get(session) or ProtocolError("a session that is not open")
        return hosted

    async def _end_replaced(self, session: str, replaced: RequestError) -> None:
        """Another coordinator has taken over. Whoever had it is told, and refused from now on."""
        self._replaced[session] = replaced
        while len(self._replaced) > MAX_SESSIONS:
            del self._replaced[next(iter(self._replaced))]
        self._outgoing.report(Failed.of(replaced))
        await uninterrupted(self._end_session(session, parks=True, is_asked=False))

    async def _end_session(
        self, session: str, *, parks: bool = False, is_asked: bool = True
    ) -> None:
        """Its memory is free when this returns, whoever has begun to end it.

        parks: see `Close`. is_asked: by this coordinator, which may come for it.
        """
        hosted = self._mine.pop(session, None)
        if hosted is None:
            if (ending := self._ending.get(session)) is not None:
                await ending.wait()
            return
        ended = self._ending[session] = asyncio.Event()
        key = hosted.assignment.key
        program = None
        self._peer.fit_beginnings()  # this session's, too
        try:
            program = await hosted.aclose(parks=parks)
        finally:
            self._peer.sessions.pop(key, None)
            self._peer.leases.give_back(key)
            self._give_back_shard(hosted.assignment)
            try:
                if program is not None:
                    await self._park(hosted, program, stays=is_asked)
            finally:
                self._peer.release(key)
                self._peer.audit.ended(key)
                del self._ending[session]
                ended.set()

    async def _park(self, hosted: HostedShard, program: StageProgram, *, stays: bool) -> None:
        name = None
        if hosted.is_as_planned:  # else the ledger has what it was to take since it began to end
            name = self._peer.park(self._user_id, hosted.assignment, program)
        if name is None:
            await run_blocking(program.close)
        elif stays and not self._is_gone:
            self._parked.append(name)
            if len(self._parked) > MAX_SESSIONS:
                self._peer.let_go(self._parked.pop(0))
        else:
            self._peer.let_go(name)


def _mapped(error: Exception) -> Exception:
    """Errors of lower packages as ours, so that the coordinator can raise them by kind."""
    if isinstance(error, partition.CapacityError):
        return CapacityError(str(error))
    error = map_store_error(error)
    if isinstance(error, partition.PlanError):
        return PlanError(str(error), error.problems)
    if isinstance(error, ThreadEndedError):
        return PlanError("the session was closed while it was loading")
    return error


def _entries(manifest: Manifest) -> int:
    """Tensors and pieces: what its memory goes by."""
    return sum(1 + len(tensor.pieces) for tensor in manifest.tensors)


def _links(assignment: Assignment) -> int:
    """That a shard has with others of its plan."""
    sizes = tuple(len(stage.shards) for stage in assignment.plan.stages)
    return len(neighbours(sizes, (assignment.stage, assignment.rank)))
