"""Ships and loads: from a checkpoint and a plan to a model that runs. Computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.answers.answer import OnEnd
from edge.answers.copies import held_layers
from edge.errors import CapacityError, RequestError
from edge.memory.model_sizes import model_facts
from edge.memory.step_memory import LOGIT_CHUNK_BYTES, has_states, held_tokens
from edge.models.spec import ModelSpec
from edge.partition import Plan
from edge.planning.kv_limits import longest_tokens
from edge.protocol.peer_info import PeerInfo, gather_all, places
from edge.protocol.step import MOST_KEPT, SHORTEST_STEP, StepLimits
from edge.protocol.topology import Seat
from edge.runs.delivery import Delivered, Delivery
from edge.runs.run import PlanRun
from edge.scheduling.decide import Scheduler
from edge.scheduling.prefixes import PrefixCacheIndex
from edge.scheduling.residency import Residency
from edge.scheduling.saved_states import SavedStates
from edge.weights.formats import KvDtype, weight_format
from edge.weights.matrix_kind import WeightSource
from edge.weights.token_reads import packed_bytes_of_token


class ShareRefusedError(CapacityError):
    """A device has no room for what it was to take, in memory or on disk, though the plan says that
    it has. It did not go away."""

    def __init__(self, device: str, why: CapacityError) -> None:
        super().__init__(str(why))
        self.device = device
        """Its id."""


async def load_model(
    bringing: Delivery,
    peers: Sequence[PeerInfo],
    *,
    on_end: OnEnd,
    brought: Mapping[Seat, Delivered] | None = None,
) -> PlanRun:
    """Ship what the peers lack, load, link. On any failure nothing stays behind.

    peers: those of the plan, and perhaps others. `on_end` is told when the model ends, also by
    closing it. `brought`: what its peers have, if that is every shard; the clients are the model's
    from now on. What earlier terms of its lease have open on these peers ends first. Raises
    ShareRefusedError where one of them has less room than was planned with.
    """
    kv_dtype = bringing.options.kv_dtype
    model = PlanRun(
        bringing.plan,
        _scheduler(bringing.spec, bringing.limits, bringing.plan, kv_dtype),
        vocab_size=bringing.spec.vocab_size,
        hidden_size=bringing.spec.hidden_size,
        on_end=on_end,
        copies_kv=bringing.copies_kv,
        kv_is_rounded=kv_dtype != "float32",
    )
    for seat, each in (brought or {}).items():
        model.adopt(seat, each.client)
    loading = _Loading(model=model, bringing=bringing, peers={peer.id: peer for peer in peers})
    try:
        await loading.run(brought)
    except Exception:
        await model.aclose()
        raise
    except BaseException:  # Ctrl-C: whoever pressed it does not want to wait for slow peers
        await model.abort()
        raise
    return model


def _scheduler(spec: ModelSpec, limits: StepLimits, plan: Plan, kv_dtype: KvDtype) -> Scheduler:
    chunk, is_whole = limits.chunk_tokens, has_states(spec, kv_dtype)
    # States and remainders are of all tokens so far: a beginning is of use where they were saved.
    saved = SavedStates(limits.saved_states) if is_whole and limits.saved_states else None

    def rows_at_once(width: int) -> int:
        return max(1, min(chunk, LOGIT_CHUNK_BYTES // (4 * width)))

    facts = model_facts(
        spec,
        weight_format(spec, "float32"),
        name=plan.model,
        embedding_itemsize=4,
        kv_dtype=kv_dtype,
    )
    return Scheduler(
        chunk_tokens=chunk,
        logit_chunk_tokens=rows_at_once(spec.vocab_size),
        state_chunk_tokens=rows_at_once(spec.hidden_size),
        residency=Residency(
            memory_tokens=limits.cached_tokens,
            disk_tokens=limits.disk_tokens,
            longest_tokens=longest_tokens(limits.cached_tokens, plan, facts),
            requests=limits.requests,
            held=lambda tokens: held_tokens(tokens, spec, limits, kv_dtype),
            most_kept=MOST_KEPT,
        ),
        stages=len(plan.stages),
        # What is found again is not computed, so nothing of it would be observed.
        prefixes=(
            None
            if limits.observes or (is_whole and saved is None) or chunk < SHORTEST_STEP
            else PrefixCacheIndex(
                chunk_tokens=chunk,
                is_strict=limits.batch_invariant,
                last_saved=None if saved is None else saved.last,
            )
        ),
        saved=saved,
        asks_peers=not is_whole,  # states are saved for as long as the session lasts
    )


@dataclass(slots=True, kw_only=True)
class _Loading:
    """One `load_model`."""

    model: PlanRun
    bringing: Delivery
    peers: Mapping[str, PeerInfo]
    rows_agree: bool = True
    batches_agree: bool = True
    """Both of all shards so far."""

    async def run(self, brought: Mapping[Seat, Delivered] | None) -> None:
        devices = {
            (stage, rank): self.peers[shard.device]
            for stage, each in enumerate(self.model.plan.stages)
            for rank, shard in enumerate(each.shards)
        }
        where = places(devices)
        if brought is not None:
            await self._unless_it_fails(
                gather_all(
                    self._or_refused(peer, self._open(seat, peer, brought[seat]))
                    for seat, peer in devices.items()
                )
            )
        else:
            async with self.bringing.source() as source:
                await self._unless_it_fails(
                    gather_all(
                        self._or_refused(peer, self._place(seat, peer, source))
                        for seat, peer in devices.items()
                    )
                )
        wire_rules = self.bringing.wire_rules
        # What travels in another form may do so by how much there is of it.
        if any(each.format != "float32" for each in (*wire_rules.sums, *wire_rules.hops)):
            self.rows_agree = self.batches_agree = False
        if self.bringing.limits.batch_invariant and not self.batches_agree:
            raise RequestError(
                "with batch_invariant no bit of an answer may depend on others, but a back end of "
                "the plan, or what activations travel in, does not promise that; use CPU peers and "
                "the wire float32, or leave it out"
            )
        await self._unless_it_fails(
            self.model.start(where, rows_agree=self.rows_agree, batches_agree=self.batches_agree)
        )

    async def _or_refused(self, peer: PeerInfo, work: Awaitable[None]) -> None:
        """Who has no room is named to the program, too."""
        try:
            await work
        except CapacityError as error:
            raise ShareRefusedError(peer.id, error) from error

    async def _place(self, seat: Seat, peer: PeerInfo, source: WeightSource) -> None:
        """Bring one shard onto its peer."""
        brought = await self.bringing.bring(seat, peer, source)
        self.model.adopt(seat, brought.client)
        await self._open(seat, peer, brought)

    async def _open(self, seat: Seat, peer: PeerInfo, brought: Delivered) -> None:
        model, bringing = self.model, self.bringing
        layout = bringing.layout(seat)
        model.held[seat] = held_layers(layout, bringing.options.kv_dtype)
        model.manifests[seat] = brought.manifest_digest
        model.sent_bytes[peer.name] = model.sent_bytes.get(peer.name, 0) + brought.sent_bytes
        read_bytes = packed_bytes_of_token(layout, bringing.weight_format.recipe)
        model.token_weight_bytes[peer.name] = (
            model.token_weight_bytes.get(peer.name, 0) + read_bytes
        )
        opened = await bringing.open(model.session, seat, peer, brought)
        self.rows_agree &= opened.rows_agree
        self.batches_agree &= opened.batches_agree

    async def _unless_it_fails(self, work: Coroutine[Any, Any, None]) -> None:
        """A peer that is lost ends the load at once, whatever the others are still busy with."""
        doing = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self.model.failed.wait())
        try:
            await asyncio.wait([doing, failed], return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            for task in (doing, failed):
                task.cancel()
            await asyncio.gather(doing, failed, return_exceptions=True)
        if self.model.failure is not None:
            raise self.model.failure
