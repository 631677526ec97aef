"""The sessions of one coordinator on this peer: opened, linked, run and closed.

A session is open from `Open` until `Close`, until another coordinator takes over the run, or until
its coordinator disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.interface import ShardWeights, StageProgram
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.engine.kv_copies import KvCopyQuotaShare
from edge.engine.prefix_cache import PrefixStorage
from edge.engine.report_batching import ReportBatcher
from edge.engine.shard_engine import NO_MASKS, ShardEngine
from edge.errors import CapacityError, EdgeError, PeerError, ProtocolError, RequestError
from edge.host.free_memory import process_memory
from edge.memory.ledger import MEASURING, Use
from edge.memory.shard_memory import check_plan, host_share, shard_use
from edge.memory.step_memory import load_bytes
from edge.models.pictures import is_row
from edge.offload import DerivedCache, Manifest
from edge.peer.hosted_shard import HostedShard
from edge.peer.outgoing_frames import OutgoingFrames
from edge.peer.profiling_calls import ProfilingCalls
from edge.peer.quota import QuotaShare
from edge.peer.resources import PeerResources
from edge.peer.weight_uploads import WeightUploads
from edge.protocol import draft_frames, kv_frames, prefix_frames, session_frames, step_frames
from edge.protocol.assignment import Assignment
from edge.protocol.description import MAX_SESSIONS
from edge.protocol.error_codec import Failed
from edge.protocol.fields import token_ids
from edge.protocol.frame_codec import Call, Done, Post
from edge.protocol.heartbeat import LINK_SILENT_AFTER_S, Hearing
from edge.protocol.step_times import ShardTimes, TokenSteps
from edge.protocol.token_masks import read_masks
from edge.protocol.topology import neighbours
from edge.transport import Member
from edge.weights.layout import ShardLayout, shard_layout
from edge.weights.shard_tensors import check_tensors


class CoordinatorSessions:
    """The sessions of one coordinator. Close with `aclose`."""

    def __init__(
        self,
        resources: PeerResources,
        user: Member | None,
        owner: object,
        *,
        weights: WeightUploads,
        profiling: ProfilingCalls,
        outgoing: OutgoingFrames,
        hearing: Hearing,
        copy_quota: KvCopyQuotaShare,
    ) -> None:
        """Resources are counted for `user` and `owner`. weights: uploads that sessions load.
        outgoing: where reports are sent. hearing: how long the coordinator has been silent."""
        self._peer = resources
        self._user_id = None if user is None else user.id
        self._user = user
        self._owner = owner
        self._weights = weights
        self._profiling = profiling
        self._outgoing = outgoing
        self._hearing = hearing
        self._copy_quota = copy_quota
        self._shards = QuotaShare(resources.shards, owner)
        self._links = QuotaShare(resources.links, owner)
        self._mine: dict[str, HostedShard] = {}
        self._ending: dict[str, asyncio.Event] = {}
        """Sessions that are being closed, by this coordinator or by a takeover."""
        self._replaced: dict[str, RequestError] = {}
        """Why a session was ended by a takeover."""
        self._parked: list[str] = []
        """Parked programs that stay until this coordinator disconnects."""
        self._is_gone = False

    @property
    def calls(self) -> dict[type[Call[Any]], Callable[[Any], Awaitable[object]]]:
        return {
            session_frames.Open: self._open,
            session_frames.Connect: self._connect,
            draft_frames.ServeDrafts: self._serve_drafts,
            draft_frames.AskDrafts: self._ask_drafts,
            kv_frames.PutKv: self._put_kv,
            prefix_frames.AskPrefix: self._ask_prefix,
            prefix_frames.ReadPrefix: self._read_prefix,
            prefix_frames.PutPrefix: self._put_prefix,
            session_frames.Measure: self._measure,
            session_frames.CountSteps: self._count_steps,
            session_frames.Observed: self._observed,
            session_frames.Close: self._close,
        }

    @property
    def posts(self) -> dict[type[Post], Callable[[Any], None]]:
        return {
            prefix_frames.MatchPrefix: self._match_prefix,
            kv_frames.Reserve: self._reserve,
            step_frames.PictureRows: self._picture_rows,
            step_frames.RunStep: self._run_step,
            step_frames.YieldRun: self._yield_run,
            kv_frames.SwapOut: self._swap_out,
            kv_frames.SaveState: self._save_state,
            step_frames.Finish: self._finish,
            session_frames.AskLink: self._ask_link,
        }

    @property
    def assignments(self) -> list[Assignment]:
        """Assignments of the open sessions."""
        return [hosted.assignment for hosted in self._mine.values()]

    @property
    def neighbour_devices(self) -> list[str | None]:
        """Devices that the open sessions are linked with."""
        return [id for hosted in self._mine.values() for id in hosted.neighbour_devices]

    def get(self, session: str) -> HostedShard:
        """The open session of this name. Raises ProtocolError if it is not open, and RequestError
        if another coordinator took it over."""
        hosted = self._mine.get(session)
        if hosted is None:
            raise self._replaced.get(session) or ProtocolError("the session is not open")
        return hosted

    def end_waits(self, session: object) -> None:
        """End the waits of a session that is about to close. Unknown names are ignored."""
        hosted = self._mine.get(session) if isinstance(session, str) else None
        if hosted is not None:
            hosted.end_waits()

    def silent_links(self) -> list[session_frames.Waits]:
        """Links on which nothing has arrived for LINK_SILENT_AFTER_S."""
        return [
            session_frames.Waits(
                stage=stage, rank=rank, received=state.received, silent_s=state.silent_s
            )
            for hosted in self._mine.values()
            for (stage, rank), state in hosted.shard.links.silent(
                at_least_s=LINK_SILENT_AFTER_S
            ).items()
        ]

    async def aclose(self) -> None:
        """Close every session and release the parked programs."""
        self._is_gone = True
        async with AsyncExitStack() as stack:  # run all of these, even if one fails
            for parked in self._parked:
                stack.callback(self._peer.let_go, parked)
            for session in (*self._mine, *self._ending):
                stack.push_async_callback(self._end, session)

    async def _open(self, call: session_frames.Open) -> session_frames.Opened:
        assignment = call.assignment
        if assignment.session.startswith(MEASURING):
            raise ProtocolError(f"the name of a session cannot begin with {MEASURING!r}")
        self._check_new(assignment)
        await run_blocking(lambda: check_plan(assignment))
        if assignment.manifest_digest == session_frames.MADE_UP_WEIGHTS:
            return await uninterrupted(self._load_made_up(call))
        cached = self._weights.sealed(assignment.manifest_digest)
        await run_blocking(lambda: cached.note(assignment.plan.model))
        check_tensors(
            cached.manifest,
            assignment.layout,
            assignment.weight_format.recipe,
            assignment.further,
            hidden_size=assignment.model.hidden_size,
        )
        return await self._load(call, cached.path, cached.manifest, self._peer.packed)

    def _check_new(self, assignment: Assignment) -> None:
        """Raises ProtocolError if the assignment's key is in use: it also names the session's
        memory in the ledger. Raises PeerError if the daemon is stopping."""
        if self._peer.leaving.is_set():
            raise PeerError(
                self._peer.settings.name,
                "its user has stopped it; load the model on other peers",
            )
        taken = assignment.key in self._peer.sessions or assignment.key in self._peer.ledger.uses
        if taken or assignment.session in self._mine:
            raise ProtocolError("this session is open already")

    async def _load_made_up(self, call: session_frames.Open) -> session_frames.Opened:
        """Load random weights, which are deleted from disk afterwards."""
        with ExitStack() as stack:
            written = await run_blocking(
                lambda: stack.enter_context(self._profiling.made_up_weights(call.assignment))
            )
            return await self._load(call, written.path, written.manifest, None)

    async def _load(
        self, call: session_frames.Open, path: Path, manifest: Manifest, packed: DerivedCache | None
    ) -> session_frames.Opened:
        assignment = call.assignment
        use = await run_blocking(
            lambda: shard_use(
                assignment,
                manifest,
                host_bytes=self._host_share(assignment, manifest),
                has_tiles=self._peer.has_tiles(),
            )
        )
        parked = await self._reserve_for(call, use)
        host_free_bytes = self._peer.host_free_bytes
        host_bytes = 0  # below: other sessions may have opened since the reservation
        if host_free_bytes is not None:
            host_bytes = host_share(host_free_bytes, assignment, manifest)
        reports = ReportBatcher(self._outgoing.report)
        try:
            hosted = HostedShard(
                assignment,
                manifest,
                reports.report,
                self._peer.kv_room,
                host_bytes=host_bytes,
                kv_host_bytes=None if host_free_bytes is None else host_free_bytes - host_bytes,
                copy_quota=self._copy_quota,
                expected=call.expected,
                end_reports=reports.end,
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
        self._peer.fit_beginnings()  # this session may have taken host memory
        self._mine[assignment.session] = hosted
        prefixes = None
        if assignment.manifest_digest != session_frames.MADE_UP_WEIGHTS:
            prefixes = PrefixStorage(
                memory=self._peer.kv_room.beginnings,
                disk=hosted.kv.prefixes,
                secret=call.prefix_secret,
                owner=self._user_id or "",
                trusted=call.prefixes_of,
            )
        try:
            backend = await run_blocking(self._peer.backend)
            more_bytes = load_bytes(assignment.layout, assignment.weight_format)
            if (further := assignment.further) is not None:
                more_bytes = max(more_bytes, load_bytes(further.layout, further.weight_format))
            # One load at a time: two would use the same spare memory.
            async with (
                self._peer.loading.turn(self._owner),
                self._peer.room_to_load(more_bytes),
            ):
                weights = ShardWeights(
                    path=path,
                    manifest=manifest,
                    packed=packed,
                    # The KV cache and the buffers are empty until the first step, so loading may
                    # use them.
                    load_room_bytes=self._peer.free_now_bytes(None)
                    + use.kv_bytes
                    + use.buffer_bytes,
                    # A separate limit for models covers weights and KV caches together.
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
            await uninterrupted(self._end(assignment.session))
            if (replaced := self._replaced.get(assignment.session)) is not None:
                raise replaced from None
            raise
        if assignment.manifest_digest != session_frames.MADE_UP_WEIGHTS:
            self._peer.audit.loaded(
                self._user,
                assignment.key,
                assignment.plan.model,
                session=assignment.session,
                dtype=assignment.weight_format.name,
                stage=assignment.stage,
                rank=assignment.rank,
                bytes=use.total,
            )
        return session_frames.Opened(
            weight_bytes=loaded_bytes,
            rows_agree=hosted.shard.rows_agree,
            batches_agree=hosted.shard.batches_agree,
            mixes=hosted.shard.mixes,
        )

    async def _reserve_for(self, call: session_frames.Open, use: Use) -> StageProgram | None:
        """Reserve the session's memory, quota and lease. Returns a parked program of an equal
        assignment, if there is one; it needs no further memory."""
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
                leases.check(
                    self._user_id, call.lease
                )  # the wait for memory may have outlasted the lease
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
        """Host memory for a new shard's weights, in bytes. None: the device computes in host
        memory."""
        free_bytes = self._peer.host_free_bytes
        return None if free_bytes is None else host_share(free_bytes, assignment, manifest)

    async def _connect(self, call: session_frames.Connect) -> session_frames.Connected:
        hosted = self.get(call.session)
        peer = self._peer
        await hosted.connect(call.places, peer.settings.name, peer.credentials, peer.reached)
        digest = await asyncio.wrap_future(hosted.shard.prepare())
        return session_frames.Connected(kv_digest=digest or None)

    async def _serve_drafts(self, call: draft_frames.ServeDrafts) -> Done:
        self.get(call.session).serve_drafts(call.device)
        return Done()

    async def _ask_drafts(self, call: draft_frames.AskDrafts) -> Done:
        peer = self._peer
        await self.get(call.session).ask_drafts(
            call.source, peer.settings.name, peer.credentials, peer.reached
        )
        return Done()

    async def _put_kv(self, call: kv_frames.PutKv) -> Done:
        hosted = self.get(call.session)
        vocab_size = hosted.assignment.model.vocab_size
        if not all(0 <= token < vocab_size or is_row(token) for token in call.tokens):
            raise ProtocolError(f"tokens outside a vocabulary of {vocab_size}")
        last = call.first + len(call.tokens)
        if not 0 <= call.first < last <= hosted.assignment.limits.context_tokens:
            raise ProtocolError(f"tokens {call.first} to {last} are outside the context")
        hosted.announce(call.request)
        put = hosted.shard.put_kv(call.request, call.first, call.tokens, call.rows)
        await asyncio.wrap_future(put)
        return Done()

    async def _ask_prefix(self, call: prefix_frames.AskPrefix) -> prefix_frames.HeldPrefix:
        shard, layout = self._of_seat(call)
        held = shard.stored_prefix(lambda stored: stored.held(call.request, layout, call.point))
        told = await asyncio.wrap_future(held)
        return prefix_frames.HeldPrefix(pieces=told.astype("<u4").tobytes())

    async def _read_prefix(self, call: prefix_frames.ReadPrefix) -> prefix_frames.PrefixPieces:
        shard, layout = self._of_seat(call)
        read = shard.stored_prefix(lambda stored: stored.read(call, layout))
        content = await asyncio.wrap_future(read)
        return prefix_frames.PrefixPieces(content=content)

    async def _put_prefix(self, call: prefix_frames.PutPrefix) -> Done:
        shard = self.get(call.session).shard
        await asyncio.wrap_future(shard.stored_prefix(lambda stored: stored.put(call)))
        return Done()

    def _of_seat(
        self, call: prefix_frames.AskPrefix | prefix_frames.ReadPrefix
    ) -> tuple[ShardEngine, ShardLayout]:
        """The session's shard, and the layout of the shard that is asked for."""
        hosted = self.get(call.session)
        assignment = hosted.assignment
        stages = assignment.plan.stages
        if not (0 <= call.stage < len(stages) and 0 <= call.rank < len(stages[call.stage].shards)):
            raise ProtocolError(f"the plan has no seat {(call.stage, call.rank)}")
        model, plan = assignment.model, assignment.plan
        return hosted.shard, shard_layout(model, plan, stage=call.stage, rank=call.rank)

    async def _measure(self, call: session_frames.Measure) -> ShardTimes:
        hosted = self.get(call.session)
        prompt, decode = await asyncio.wrap_future(hosted.shard.measure())
        memory = process_memory()
        return ShardTimes(
            prompt=prompt,
            decode=decode,
            resident_bytes=memory["resident_bytes"],
            peak_bytes=memory["peak_bytes"],
            kv_written_bytes=hosted.kv.tier.written_bytes if hosted.kv.tier is not None else 0,
        )

    async def _count_steps(self, call: session_frames.CountSteps) -> TokenSteps:
        return await asyncio.wrap_future(self.get(call.session).shard.count_steps())

    async def _observed(self, call: session_frames.Observed) -> session_frames.Gram:
        gram = await asyncio.wrap_future(self.get(call.session).shard.gram(call.run))
        return session_frames.Gram(content=gram.view(np.uint8).reshape(-1).data)

    async def _close(self, call: session_frames.Close) -> Done:
        await uninterrupted(self._end(call.session, parks=call.parks))
        return Done()

    def _match_prefix(self, post: prefix_frames.MatchPrefix) -> None:
        hosted = self.get(post.session)
        prompt = token_ids(
            post.prompt,
            hosted.assignment.model.vocab_size,
            most_tokens=hosted.assignment.limits.context_tokens,
        )
        if not 0 <= post.tokens <= len(prompt):
            raise ProtocolError(f"a prefix of {post.tokens} of {len(prompt)} tokens")
        hosted.announce(post.request, prompt_tokens=len(prompt))
        hosted.shard.match_prefix(
            post.request,
            prompt,
            salt=post.salt or "",
            source=post.source,
            tokens=post.tokens,
            moves=post.moves,
        )

    def _reserve(self, post: kv_frames.Reserve) -> None:
        hosted = self.get(post.session)
        if post.tokens > hosted.assignment.limits.context_tokens:
            raise ProtocolError(f"room for {post.tokens} tokens is more than the context needs")
        hosted.shard.reserve(post.request, post.tokens)

    def _picture_rows(self, post: step_frames.PictureRows) -> None:
        self.get(post.session).shard.pictures.add(post.request, post.position, post.rows)

    def _run_step(self, post: step_frames.RunStep) -> None:
        hosted = self.get(post.session)
        vocab_size = hosted.assignment.model.vocab_size
        for request, terms in post.terms.items():
            if any(token >= vocab_size for token in terms.end_ids):
                raise ProtocolError(f"an end token outside a vocabulary of {vocab_size}")
            if any(token >= vocab_size for token in terms.sampling.logit_bias):
                raise ProtocolError(f"a logit bias outside a vocabulary of {vocab_size}")
            hosted.announce(request)
        masks = NO_MASKS
        if hosted.shard.layout.is_last_stage:
            masks = read_masks(post.masked, post.step.run, post.masks, vocab_size)
        hosted.shard.step(post.step, post.terms, masks)

    def _yield_run(self, post: step_frames.YieldRun) -> None:
        self.get(post.session).shard.yield_run()

    def _swap_out(self, post: kv_frames.SwapOut) -> None:
        self.get(post.session).shard.swap_out(post.request)

    def _save_state(self, post: kv_frames.SaveState) -> None:
        self.get(post.session).save_state(post.request, post.tokens, post.place)

    def _finish(self, post: step_frames.Finish) -> None:
        hosted = self.get(post.session)
        hosted.forget(post.request)
        most_tokens = hosted.assignment.limits.context_tokens
        vocab_size = hosted.assignment.model.vocab_size
        answer = (
            token_ids(post.answer, vocab_size, most_tokens=most_tokens) if post.answer else None
        )
        answer_tokens = 0 if answer is None else len(answer)
        if not answer_tokens <= post.kept_tokens <= most_tokens:
            raise ProtocolError(
                f"{post.kept_tokens} kept tokens cannot include {answer_tokens} of the answer, "
                f"or are more than the context of {most_tokens}"
            )
        hosted.shard.finish(post.request, kept_tokens=post.kept_tokens, answer=answer)

    def _ask_link(self, post: session_frames.AskLink) -> None:
        state = self.get(post.session).shard.links.state((post.stage, post.rank))
        self._outgoing.report(
            session_frames.LinkSent(stage=post.stage, rank=post.rank, sent=state.sent)
        )

    async def _end_replaced(self, session: str, replaced: RequestError) -> None:
        """End a session that another coordinator took over, and tell this one."""
        self._replaced[session] = replaced
        while len(self._replaced) > MAX_SESSIONS:
            del self._replaced[next(iter(self._replaced))]
        self._outgoing.report(Failed.of(replaced))
        await uninterrupted(self._end(session, parks=True, is_asked=False))

    async def _end(self, session: str, *, parks: bool = False, is_asked: bool = True) -> None:
        """Close a session; its memory is free on return, also when another task had begun to close
        it.

        parks: see `Close`. is_asked: closed by this coordinator, which may load the same again.
        """
        hosted = self._mine.pop(session, None)
        if hosted is None:
            if (ending := self._ending.get(session)) is not None:
                await ending.wait()
            return
        ended = self._ending[session] = asyncio.Event()
        key = hosted.assignment.key
        program = None
        self._peer.fit_beginnings()  # frees its cached prefixes as well
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
        if hosted.is_as_planned:  # otherwise the ledger shows the rebalanced use, not this one's
            name = self._peer.park(self._user_id, hosted.assignment, program)
        if name is None:
            await run_blocking(program.close)
        elif stays and not self._is_gone:
            self._parked.append(name)
            if len(self._parked) > MAX_SESSIONS:
                self._peer.let_go(self._parked.pop(0))
        else:
            self._peer.let_go(name)


def _links(assignment: Assignment) -> int:
    """Number of links that a shard has to others of its plan."""
    sizes = tuple(len(stage.shards) for stage in assignment.plan.stages)
    return len(neighbours(sizes, (assignment.stage, assignment.rank)))
