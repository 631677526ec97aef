"""A proposal for a running model after a device is lost, or when devices have joined or changed
their pace.

Nothing is measured, because answers are waiting or under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from edge import partition
from edge.concurrency.blocking import run_blocking
from edge.errors import CapacityError
from edge.host.cache_paths import cache_root
from edge.partition import (
    Choice,
    ClusterSpec,
    DeviceSpec,
    LeftOut,
    Move,
    Plan,
    Repair,
    Seat,
    UnderWay,
    Workload,
)
from edge.planning.able_peers import able_peers, needs_of
from edge.planning.choosing import by_id
from edge.planning.cluster_profile import measured_cluster
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.overhead import Overhead, step_buffers
from edge.planning.proposal import Proposal, errors_for_users
from edge.planning.proving import wrong_peers
from edge.planning.wire_format_choice import choose_wire_rules
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint

PROVES_WITHIN_S = 3.0
"""Seconds for which a repair waits for the proof of a device that has joined since the load."""


async def repaired_proposal(
    checkpoint: Checkpoint,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    *,
    before: Proposal,
    lost: Collection[str],
    workload: Workload | None = None,
    cached: Mapping[str, Collection[Seat]] | None = None,
    send_bytes_per_s: Mapping[str, float] | None = None,
) -> Proposal:
    """The plan to go on with when the devices `lost` (ids) of the plan of `before` are lost.

    peers: those that answer now. Facts of `before` are used as they are; for devices of the plan
    that includes their memory, because the model itself may fill a part of it. Other peers have the
    rates that are remembered. options: those of the load. workload: the tokens still to compute, by
    default another answer; KV memory stays as it was. `cached` and `send_bytes_per_s` are those of
    `partition.repair`, whose result is in `repair` of the proposal.

    A plan of the same shape keeps its wire formats. With `stream="auto"`, layers are read from disk
    where no other plan fits. Raises CapacityError with the memory that devices lack, or where no
    peer that is left has kernels for the model; PlanError where no peer is left.
    """
    weight_format = options.weight_format(checkpoint)
    keeps_windows = before.limits.windows > 0
    needs = needs_of(checkpoint.spec, weight_format, options.kv_dtype, keeps_windows=keeps_windows)
    # Mostly all have proved themselves before, and none is asked.
    asked = [peer for peer in peers if peer.id not in lost and not peer.lacking(needs)]
    wrong = await wrong_peers(
        asked, weight_format, cache_root=cache_root(), limit_s=PROVES_WITHIN_S
    )
    able, sentences = able_peers(peers, needs, wrong)
    there = [peer for peer in able if peer.id not in lost]
    if sentences and not there:
        raise CapacityError(f"no remaining device can compute this model: {'; '.join(sentences)}")
    repairing = _Repairing(
        checkpoint=checkpoint,
        peers=there,
        options=options,
        before=before,
        known=await _known(checkpoint, there, options, before),
    )
    return await run_blocking(
        lambda: repairing.proposal(
            lost, workload or before.workload, cached or {}, send_bytes_per_s or {}
        )
    )


async def moved_proposal(
    checkpoint: Checkpoint,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    *,
    before: Proposal,
    measured: ClusterSpec,
    under_way: UnderWay,
    is_healthy_again: bool = False,
) -> tuple[Move, Proposal | None]:
    """Whether the running plan of `before` is replaced now that some of `peers` have joined, or its
    facts have changed; and the proposal of the better plan, if one exists.

    peers: all that answer now. measured: their facts; rates and links that `before` has win.
    options: those of the load; where they have a plan by hand, no other plan is taken.
    is_healthy_again: see `partition.join`.
    """
    moving = _Repairing(
        checkpoint=checkpoint,
        peers=peers,
        options=options,
        before=before,
        known=_merged(before.cluster, measured),
    )
    return await run_blocking(
        lambda: moving.move(
            under_way,
            same_bits=_alike(peers, before.plan),
            is_healthy_again=is_healthy_again,
        )
    )


def _alike(peers: Sequence[PeerInfo], plan: Plan) -> frozenset[str]:
    """Ids of peers that compute the same bits as all devices of the plan. Empty where the plan's
    devices differ."""
    kinds = {peer.id: peer.arithmetic for peer in peers}
    planned = {kinds.get(id) for id in plan.devices}
    return frozenset(id for id, kind in kinds.items() if planned == {kind})


def _merged(before: ClusterSpec, measured: ClusterSpec) -> ClusterSpec:
    """The devices of `measured`, with the rates and links of `before` where it has them."""
    known = {device.id: device for device in before.devices if device.rates is not None}
    ids = {device.id for device in measured.devices}
    links = {
        (link.source, link.target): link
        for link in (*measured.links, *before.links)
        if {link.source, link.target} <= ids
    }
    return ClusterSpec(
        devices=tuple(
            device
            if (then := known.get(device.id)) is None
            else replace(device, rates=then.rates, slowed=then.slowed)
            for device in measured.devices
        ),
        links=tuple(links.values()),
        crowds=measured.crowds or before.crowds,
    )


async def _known(
    checkpoint: Checkpoint, peers: Sequence[PeerInfo], options: LoadOptions, before: Proposal
) -> ClusterSpec:
    """The facts of these peers: from `before`, and for new peers those that are remembered."""
    planned = {device.id: device for device in before.cluster.devices}
    ids = {peer.id for peer in peers}
    left = before.cluster.without(*(planned.keys() - ids))
    if ids <= planned.keys():
        return left
    weight_format = options.weight_format(checkpoint)
    remembered = await measured_cluster(
        peers,
        weight_format.graded(checkpoint.spec),
        weight_format,
        cache_root=cache_root(),
        only_remembered=True,
    )
    found = {(link.source, link.target) for link in left.links}
    return ClusterSpec(
        devices=tuple(planned.get(device.id, device) for device in remembered.devices),
        links=(
            *left.links,
            *(link for link in remembered.links if (link.source, link.target) not in found),
        ),
        crowds=remembered.crowds or left.crowds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repairing:
    """The facts of one repair, or of one move."""

    checkpoint: Checkpoint
    peers: Sequence[PeerInfo]
    """The peers that answer."""
    options: LoadOptions
    before: Proposal
    known: ClusterSpec
    """Measured facts of the peers."""

    def proposal(
        self,
        lost: Collection[str],
        workload: Workload,
        cached: Mapping[str, Collection[Seat]],
        send_bytes_per_s: Mapping[str, float],
    ) -> Proposal:
        before, wanted = self.before, self.options.plan
        workload = replace(workload, reserved_tokens=before.workload.cached_tokens)

        def repaired(*, stream: bool) -> Proposal:
            taken = self._taken(stream=stream)
            cluster = self._cluster(taken)
            repair = partition.repair(
                before.plan,
                before.model,
                cluster,
                lost,
                workload,
                cached=cached,
                send_bytes_per_s=send_bytes_per_s,
                parallel=None if isinstance(wanted, Plan) else wanted,
                chunk_tokens=before.limits.chunk_tokens,
                stream=stream,
                keeps_shape=self.options.keeps_shape,
                further_seat_bytes=max(taken.values(), default=0),
            )
            return self._proposed(repair, cluster, taken)

        streams = before.streaming is not None or self.options.stream == "on"
        may_stream = streams or self.options.stream == "auto"
        said = replace(self.options, plan="auto") if isinstance(wanted, Plan) else self.options
        cluster = self._cluster(self._taken(stream=may_stream))
        with errors_for_users(self.checkpoint, cluster, said, self._sizes(stream=may_stream)):
            if may_stream and not streams:
                with contextlib.suppress(partition.CapacityError):
                    return repaired(stream=False)
            return repaired(stream=may_stream)

    def move(
        self, under_way: UnderWay, *, same_bits: Collection[str], is_healthy_again: bool
    ) -> tuple[Move, Proposal | None]:
        before, wanted = self.before, self.options.plan

        def moved(*, stream: bool) -> tuple[Move, Proposal | None]:
            taken = self._taken(stream=stream)
            cluster = self._cluster(taken)
            move = partition.join(
                before.plan,
                before.model,
                cluster,
                before.workload,
                under_way,
                wanted=by_id(wanted, cluster) if isinstance(wanted, Plan) else None,
                same_bits=same_bits,
                is_healthy_again=is_healthy_again,
                parallel="auto" if isinstance(wanted, Plan) else wanted,
                chunk_tokens=before.limits.chunk_tokens,
                stream=stream,
                further_seat_bytes=max(taken.values(), default=0),
            )
            if move.to is None:
                return move, None
            return move, self._proposed(move.to, cluster, taken)

        always = self.options.stream == "on"
        sizes = self._sizes(stream=always)
        with errors_for_users(self.checkpoint, self._cluster({}), self.options, sizes):
            if always:
                return moved(stream=True)
            move, proposal = moved(stream=False)
            if move.when == "stay" and before.streaming is not None:  # perhaps it reads less then
                return moved(stream=True)
            return move, proposal

    def _proposed(self, repair: Repair, cluster: ClusterSpec, taken: Mapping[str, int]) -> Proposal:
        before, predicted = self.before, repair.predicted
        if predicted is not None:
            predicted = partition.estimate(
                repair.plan,
                before.model,
                cluster,
                before.workload,
                chunk_tokens=before.limits.chunk_tokens,
            )
        wire_rules = before.wire_rules
        if not repair.same_shape:
            wire_rules = choose_wire_rules(
                self.options.wire,
                repair.plan,
                links=cluster.links,
                weight_format=self.options.weight_format(self.checkpoint),
            )
        solo = before.choice.solo
        return replace(
            before,
            choice=Choice(
                plan=repair.plan,
                predicted=predicted,
                solo=solo if solo and any(each.id == solo.device for each in self.peers) else None,
                left_out=tuple(
                    LeftOut(
                        device=device.id,
                        name=device.name,
                        reason="the model goes on without it",
                    )
                    for device in cluster.devices
                    if device.id not in repair.plan.devices
                ),
                runners_up=(),
            ),
            cluster=cluster,
            wire_rules=wire_rules,
            repair=repair,
            overhead=Overhead.of(self.peers, taken),
        )

    def _cluster(self, taken: Mapping[str, int]) -> ClusterSpec:
        """The devices that are left, with memory for weights and KV caches: without the `taken`
        bytes of a step on each."""
        memory = {
            peer.id: peer.device(buffer_bytes=taken.get(peer.id, 0)).memory_bytes
            for peer in self.peers
        }
        unused = {each.id: each.unused_buffer_bytes for each in self.before.cluster.devices}
        for device in self.before.cluster.devices:
            if device.id in self.before.plan.devices:
                had = self.before.overhead.get(device.id)
                more = 0
                if had is not None:
                    more = max(0, taken.get(device.id, 0) - had.buffer_bytes)
                memory[device.id] = max(0, device.memory_bytes - more)

        def with_memory(device: DeviceSpec) -> DeviceSpec:
            return replace(
                device,
                memory_bytes=memory[device.id],
                unused_buffer_bytes=unused.get(device.id, 0),
            )

        return replace(self.known, devices=tuple(map(with_memory, self.known.devices)))

    def _sizes(self, *, stream: bool) -> LoadSizes:
        limits = self.before.limits
        return LoadSizes(
            limits=limits,
            kv_tokens=limits.cached_tokens,
            answers=self.before.workload,
            stream=stream,
        )

    def _taken(self, *, stream: bool) -> dict[str, int]:
        """Bytes of a step's buffers by device."""
        return step_buffers(
            self.checkpoint.spec,
            self.before.limits,
            self.peers,
            stream=stream,
            kv_dtype=self.options.kv_dtype,
        )
