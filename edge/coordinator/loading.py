"""Ships and loads: from a checkpoint and a plan to a model that runs. Computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.concurrency.blocking import StopFlag, run_blocking
from edge.coordinator.beginnings import Beginnings
from edge.coordinator.kept_kv import held_layers
from edge.coordinator.kv_residency import Residency
from edge.coordinator.loaded_model import LoadedModel
from edge.coordinator.requests import OnEnd
from edge.coordinator.scheduler import Scheduler
from edge.coordinator.shipping import describe_shard, ship
from edge.errors import CapacityError, RequestError
from edge.memory.model_sizes import model_facts
from edge.memory.step_memory import LOGIT_CHUNK_BYTES, held_tokens
from edge.models.spec import ModelSpec
from edge.partition import Plan
from edge.planning.kv_limits import longest_tokens
from edge.planning.load_options import LoadOptions
from edge.progress import OnProgress, Progress
from edge.protocol.assignment import Assignment, Copies
from edge.protocol.client import PeerClient
from edge.protocol.lease import Lease
from edge.protocol.messages import Open
from edge.protocol.peer_info import PeerInfo, gather_all, places
from edge.protocol.step import MOST_KEPT, SHORTEST_STEP, StepLimits
from edge.protocol.step_times import ExpectedStep
from edge.protocol.topology import Seat
from edge.protocol.wire_rules import WireRules
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import KvDtype, WeightFormat, weight_format
from edge.weights.layout import shard_layout
from edge.weights.matrix_kind import WeightSource


class ShareRefusedError(CapacityError):
    """A device has no room for what it was to take, in memory or on disk, though the plan says that
    it has. It did not go away."""

    def __init__(self, device: str, why: CapacityError) -> None:
        super().__init__(str(why))
        self.device = device
        """Its id."""


async def load_model(
    checkpoint: Checkpoint,
    peers: Sequence[PeerInfo],
    plan: Plan,
    options: LoadOptions,
    *,
    limits: StepLimits,
    wire_rules: WireRules,
    cache_root: Path,
    on_progress: OnProgress,
    on_end: OnEnd,
    lease: Lease,
    copies_kv: Copies = "none",
    expected: Mapping[str, ExpectedStep] | None = None,
) -> LoadedModel:
    """Ship what the peers lack, load, link. On any failure nothing stays behind.

    Below `cache_root` the rounded checkpoint and the hashes of its pieces are kept. `on_end` is
    told when the model ends, also by closing it. `lease`: what earlier terms of it have open on
    these peers ends first. copies_kv: of what they send copies of the keys and
    values. expected: what the steps of these peers should take, as far as that is known.
    Raises ShareRefusedError where one of them has less room than was planned with.
    """
    weight_format = options.weight_format(checkpoint)
    spec = weight_format.graded(checkpoint.spec)
    if spec.has_states:
        copies_kv = "none"  # those of tokens say nothing without the state behind them
    model = LoadedModel(
        plan,
        _scheduler(spec, limits, plan, options.kv_dtype),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        on_end=on_end,
        copies_kv=copies_kv,
        kv_is_rounded=options.kv_dtype != "float32",
    )
    loading = _Loading(
        model=model,
        checkpoint=checkpoint,
        spec=spec,
        weight_format=weight_format,
        peers={peer.id: peer for peer in peers},
        options=options,
        limits=limits,
        wire_rules=wire_rules,
        cache_root=cache_root,
        lease=lease,
        copies_kv=copies_kv,
        expected=expected or {},
        tell=on_progress,
    )
    try:
        await loading.run()
    except Exception:
        await model.aclose()
        raise
    except BaseException:  # Ctrl-C: whoever pressed it does not want to wait for slow peers
        await model.abort()
        raise
    return model


def _scheduler(spec: ModelSpec, limits: StepLimits, plan: Plan, kv_dtype: KvDtype) -> Scheduler:
    chunk = limits.chunk_tokens

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
        # And states are of all tokens of a request, so no part of it begins another.
        matches_on_disk=bool(limits.disk_tokens) and not (limits.observes or spec.has_states),
        beginnings=(
            None
            if limits.observes or spec.has_states or chunk < SHORTEST_STEP
            else Beginnings(chunk_tokens=chunk)
        ),
    )


@dataclass(slots=True, kw_only=True)
class _Loading:
    """One `load_model`: what every shard's way onto its peer needs to know."""

    model: LoadedModel
    checkpoint: Checkpoint
    spec: ModelSpec
    weight_format: WeightFormat
    peers: Mapping[str, PeerInfo]
    options: LoadOptions
    limits: StepLimits
    wire_rules: WireRules
    cache_root: Path
    lease: Lease
    copies_kv: Copies
    expected: Mapping[str, ExpectedStep]
    tell: OnProgress
    rows_agree: bool = True
    batches_agree: bool = True
    """Both of all shards so far."""
    stop: StopFlag = field(default_factory=StopFlag)

    def _on_progress(self, event: Progress) -> None:
        """Also how the threads that quantise and hash learn that nobody waits any more."""
        self.stop.check()
        self.tell(event)

    async def run(self) -> None:
        devices = {
            (stage, rank): self.peers[shard.device]
            for stage, each in enumerate(self.model.plan.stages)
            for rank, shard in enumerate(each.shards)
        }
        where = places(devices)
        source = await run_blocking(
            lambda: self.checkpoint.source(
                self.weight_format,
                cache_root=self.cache_root / "quantized",
                on_progress=self._on_progress,
            ),
            stop=self.stop.set,
            discard=WeightSource.close,
        )
        try:
            await self._unless_it_fails(
                gather_all(self._taken(seat, peer, source) for seat, peer in devices.items())
            )
        finally:
            source.close()
        rules = (*self.wire_rules.sums, *self.wire_rules.hops)
        # What travels in another form may do so by how much there is of it.
        if any(each.format != "float32" for each in rules):
            self.rows_agree = self.batches_agree = False
        if self.limits.batch_invariant and not self.batches_agree:
            raise RequestError(
                "with batch_invariant no bit of an answer may depend on others, but a back end of "
                "the plan, or what activations travel in, does not promise that; use CPU peers and "
                "the wire float32, or leave it out"
            )
        await self._unless_it_fails(
            self.model.start(where, rows_agree=self.rows_agree, batches_agree=self.batches_agree)
        )

    async def _taken(self, seat: Seat, peer: PeerInfo, source: WeightSource) -> None:
        """`_place`; who has no room is named to the program, too."""
        try:
            await self._place(seat, peer, source)
        except CapacityError as error:
            raise ShareRefusedError(peer.id, error) from error

    async def _place(self, seat: Seat, peer: PeerInfo, source: WeightSource) -> None:
        """Bring one shard onto its peer."""
        model, options = self.model, self.options
        stage, rank = seat
        layout = shard_layout(self.spec, model.plan, stage=stage, rank=rank)
        model.held[seat] = held_layers(layout, options.kv_dtype)
        shipment = await run_blocking(
            lambda: describe_shard(
                layout,
                source,
                self.weight_format,
                fingerprint=self.checkpoint.store.fingerprint,
                cache_root=self.cache_root / "manifests",
                on_progress=lambda done, total: self._on_progress(
                    Progress(phase="hash", peer=peer.name, done=done, total=total)
                ),
            ),
            stop=self.stop.set,
        )

        def connect() -> Awaitable[PeerClient]:
            return peer.connect(on_event=model.on_event)

        model.manifests[seat] = shipment.manifest.digest
        client, sent_bytes = await ship(
            shipment, connect, peer=peer.name, on_progress=self._on_progress
        )
        model.adopt(seat, client)
        model.sent_bytes[peer.name] = model.sent_bytes.get(peer.name, 0) + sent_bytes
        matrices = self.weight_format.recipe.all_stored(layout.matrices)
        read_bytes = round(sum(each.packed_bytes for each in matrices))
        model.token_weight_bytes[peer.name] = (
            model.token_weight_bytes.get(peer.name, 0) + read_bytes
        )
        assignment = Assignment(
            session=model.session,
            model=self.spec,
            plan=model.plan,
            stage=stage,
            rank=rank,
            weight_format=self.weight_format,
            manifest_digest=shipment.manifest.digest,
            weights_digest=self.checkpoint.store.fingerprint,
            limits=self.limits,
            kv_dtype=options.kv_dtype,
            wire_rules=self.wire_rules,
            copies_kv=self.copies_kv,
        )
        self._on_progress(Progress(phase="load", peer=peer.name, done=0, total=1))
        secret = peer.prefix_secret(is_shared=options.share_prefixes)
        opened = await client.call(
            Open(
                assignment=assignment,
                lease=self.lease,
                prefix_secret=secret,
                expected=self.expected.get(peer.id),
            )
        )
        self.rows_agree &= opened.rows_agree
        self.batches_agree &= opened.batches_agree
        self._on_progress(Progress(phase="load", peer=peer.name, done=1, total=1))

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
