"""Loads a checkpoint by a plan on its peers, and starts the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.answers.answer import OnEnd
from edge.errors import CapacityError, RequestError
from edge.memory.model_sizes import model_facts
from edge.memory.step_memory import LOGIT_CHUNK_BYTES, has_states, held_tokens, rewinds
from edge.memory.windows import cut_end, kv_memory
from edge.planning.kv_limits import longest_tokens
from edge.protocol.peer_info import PeerInfo, gather_all, places
from edge.protocol.step import MOST_DRAFTED, MOST_KEPT, SHORTEST_STEP
from edge.protocol.topology import Seat
from edge.runs.delivery import Delivered, DeliveredWeights, Delivery
from edge.runs.resolved import ResolvedLoad
from edge.runs.run import PlanRun
from edge.scheduling.prefixes import PrefixCacheIndex
from edge.scheduling.residency import Residency
from edge.scheduling.saved_states import SavedStates
from edge.scheduling.state import SchedulingLimits, SchedulingState
from edge.weights.cache_layout import held_layers
from edge.weights.formats import weight_format
from edge.weights.layout import gets_pictures
from edge.weights.token_reads import packed_bytes_of_token


class ShareRefusedError(CapacityError):
    """A device lacks the memory or disk for its part, contrary to the plan. It is not lost."""

    def __init__(self, device: str, why: CapacityError) -> None:
        super().__init__(str(why))
        self.device = device
        """Id of the device."""


async def load_model(
    delivery: Delivery,
    peers: Sequence[PeerInfo],
    *,
    on_end: OnEnd,
    delivered: Mapping[Seat, Delivered] | None = None,
) -> PlanRun:
    """Send the missing weights, load the shards, link them. A failure leaves nothing behind.

    Sessions of earlier terms of the lease on these peers end first. Raises ShareRefusedError if a
    peer has less room than was planned with.

    peers: those of the plan, and perhaps others. on_end: called when the run ends, also if it is
    closed. delivered: all shards, if the peers have them already; the run then owns their clients.
    """
    load = delivery.load
    run = PlanRun(
        load.plan,
        vocab_size=load.spec.vocab_size,
        hidden_size=load.spec.hidden_size,
        on_end=on_end,
        copies=load.copies,
        kv_is_rounded=load.kv_dtype != "float32",
        exchange_facts=load.exchange_facts,
    )
    if load.spot_check:
        infos = {peer.name: peer for peer in peers}
        run.check_now_and_then(load.weight_format, load.spot_check, infos)
    for seat, each in (delivered or {}).items():
        run.adopt(seat, each.client)
    loading = _Loading(run=run, delivery=delivery, peers={peer.id: peer for peer in peers})
    try:
        await loading.run_through(delivered)
    except Exception:
        await run.aclose()
        raise
    except BaseException:  # Ctrl-C: its user does not want to wait for slow peers
        await run.abort()
        raise
    return run


def scheduling_state(
    load: ResolvedLoad, *, rows_agree: bool, batches_agree: bool, mixes: bool
) -> SchedulingState:
    """An empty state for a run of this load. rows_agree, batches_agree, mixes: see
    SchedulingLimits."""
    spec, limits, kv_dtype = load.spec, load.limits, load.kv_dtype
    chunk, is_whole = limits.chunk_tokens, has_states(spec, kv_dtype)
    # States and unrounded tokens cover all tokens so far, and windows have only the newest, so only
    # saved positions can be reused.
    saved = SavedStates(limits.saved_states) if is_whole and limits.saved_states else None

    def rows_at_once(width: int) -> int:
        return max(1, min(chunk, LOGIT_CHUNK_BYTES // (4 * width)))

    memory = kv_memory(spec, limits, kv_dtype)

    def held(tokens: int) -> int:
        of_pages = held_tokens(tokens, spec, limits, kv_dtype)
        return of_pages if memory is None else memory[1](tokens, of_pages)

    facts = model_facts(
        spec,
        weight_format(spec, "float32"),
        name=load.plan.model,
        embedding_itemsize=4,
        kv_dtype=kv_dtype,
    )
    prefixes = None
    # An observed load computes every token, so that its inputs are counted.
    if not limits.observes and not (is_whole and saved is None) and chunk >= SHORTEST_STEP:
        prefixes = PrefixCacheIndex(
            chunk_tokens=chunk,
            is_strict=limits.batch_invariant,
            last_saved=None if saved is None else saved.last,
        )
    return SchedulingState.new(
        SchedulingLimits(
            stages=len(load.plan.stages),
            chunk_tokens=chunk,
            logit_chunk_tokens=rows_at_once(spec.vocab_size),
            state_chunk_tokens=rows_at_once(spec.hidden_size),
            rows_agree=rows_agree,
            batches_agree=batches_agree,
            mixes=mixes,
            drafts=_most_drafted(load) if rows_agree else 0,
            rewinds=rewinds(spec, kv_dtype),
            cut_end=cut_end(spec),
            memory_tokens=limits.cached_tokens,
        ),
        Residency(
            memory_tokens=limits.cached_tokens,
            disk_tokens=limits.disk_tokens,
            longest_tokens=longest_tokens(limits.cached_tokens, load.plan, facts),
            requests=limits.requests,
            held=held,
            memory=None if memory is None else memory[0],
            most_kept=MOST_KEPT,
        ),
        prefixes,
        saved,
    )


def _most_drafted(load: ResolvedLoad) -> int:
    """The longest draft that a step has room for; odd, as drafts are. Wrong guesses would count for
    a load that observes its inputs, and an answer that shares steps is not drafted for, so its last
    bits would depend on other requests."""
    limits = load.limits
    if limits.observes or limits.batch_invariant:
        return 0
    logits = LOGIT_CHUNK_BYTES // (4 * load.spec.vocab_size)
    rows = min(limits.chunk_tokens, max(limits.requests, logits), 1 + MOST_DRAFTED)
    return max(0, rows // 2 * 2 - 1)


@dataclass(slots=True, kw_only=True)
class _Loading:
    """The state of one call of `load_model`."""

    run: PlanRun
    delivery: Delivery
    peers: Mapping[str, PeerInfo]
    rows_agree: bool = True
    batches_agree: bool = True
    mixes: bool = True
    """Whether these hold of all shards so far; see `Opened`."""

    async def run_through(self, delivered: Mapping[Seat, Delivered] | None) -> None:
        devices = {
            (stage, rank): self.peers[shard.device]
            for stage, each in enumerate(self.run.plan.stages)
            for rank, shard in enumerate(each.shards)
        }
        where = places(devices)
        if delivered is not None:
            await self._unless_it_fails(
                gather_all(
                    self._or_refused(peer, self._open(seat, peer, delivered[seat]))
                    for seat, peer in devices.items()
                )
            )
        else:
            async with self.delivery.source() as source:
                await self._unless_it_fails(
                    gather_all(
                        self._or_refused(peer, self._place(seat, peer, source))
                        for seat, peer in devices.items()
                    )
                )
        if self.delivery.load.wire_rules.rounds:
            self.rows_agree = self.batches_agree = self.mixes = False
        if self.delivery.load.limits.batch_invariant and not self.batches_agree:
            raise RequestError(
                "batch_invariant needs CPU peers and float32 on the wire; this plan has another "
                "back end or wire format; change these, or leave batch_invariant out"
            )
        state = scheduling_state(
            self.delivery.load,
            rows_agree=self.rows_agree,
            batches_agree=self.batches_agree,
            mixes=self.mixes,
        )
        await self._unless_it_fails(self.run.start(where, state))

    async def _or_refused(self, peer: PeerInfo, work: Awaitable[None]) -> None:
        """Do this work; turn a CapacityError into a ShareRefusedError with the device."""
        try:
            await work
        except CapacityError as error:
            raise ShareRefusedError(peer.id, error) from error

    async def _place(self, seat: Seat, peer: PeerInfo, source: DeliveredWeights) -> None:
        """Deliver one shard to its peer and open it."""
        delivered = await self.delivery.deliver(seat, peer, source)
        self.run.adopt(seat, delivered.client)
        await self._open(seat, peer, delivered)

    async def _open(self, seat: Seat, peer: PeerInfo, delivered: Delivered) -> None:
        run, delivery = self.run, self.delivery
        layout = delivery.load.layout(seat)
        run.held[seat] = held_layers(layout, delivery.load.kv_dtype)
        if gets_pictures(delivery.load.spec, layout, seat[1]):
            run.picture_seats.append(seat)
        run.manifests[seat] = delivered.manifest_digest
        run.sent_bytes[peer.name] = run.sent_bytes.get(peer.name, 0) + delivered.sent_bytes
        read_bytes = packed_bytes_of_token(layout, delivery.load.weight_format.recipe)
        run.token_weight_bytes[peer.name] = run.token_weight_bytes.get(peer.name, 0) + read_bytes
        opened = await delivery.open(run.session, seat, peer, delivered)
        self.rows_agree &= opened.rows_agree
        self.batches_agree &= opened.batches_agree
        self.mixes &= opened.mixes and opened.rows_agree

    async def _unless_it_fails(self, work: Coroutine[Any, Any, object]) -> None:
        """Do this work, but end at once if a peer is lost, even if others are still busy."""
        doing = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self.run.failed.wait())
        try:
            await asyncio.wait([doing, failed], return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            for task in (doing, failed):
                task.cancel()
            await asyncio.gather(doing, failed, return_exceptions=True)
        if self.run.failure is not None:
            raise self.run.failure
