"""A proposal for those who are left, when devices of a running plan are lost.

Nothing is measured: replies are waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from edge import partition
from edge.concurrency.blocking import run_blocking
from edge.host.cache_paths import cache_root
from edge.memory.shard_memory import most_overhead
from edge.partition import Choice, ClusterSpec, DeviceSpec, LeftOut, Plan, Repair, Seat, Workload
from edge.planning.cluster_profile import measured_cluster
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Overhead, Proposal, errors_for_users
from edge.planning.wire_format_choice import choose_wire_rules
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint


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

    peers: those that are there now. What was known of them `before` is taken as it was, for those
    in the plan also their memory, part of which the model itself may fill; of others, what was
    measured at some time. options: as the model was loaded. workload: what is still to do, by
    default another answer; memory is kept for what it was. `cached` and `send_bytes_per_s` are
    those of `partition.repair`, whose result is in `repair` of the proposal.

    A plan of the same shape sends activations in the form they had. With `stream="auto"`, layers
    are read from disk where nothing fits without that. Raises CapacityError with what is missing on
    whom, PlanError where nobody is left.
    """
    there = [peer for peer in peers if peer.id not in lost]
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


async def _known(
    checkpoint: Checkpoint, peers: Sequence[PeerInfo], options: LoadOptions, before: Proposal
) -> ClusterSpec:
    """These peers as they were known before, and of new ones what is remembered."""
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
    """The facts of one repair."""

    checkpoint: Checkpoint
    peers: Sequence[PeerInfo]
    """Those that are left."""
    options: LoadOptions
    before: Proposal
    known: ClusterSpec
    """What was measured of the peers."""

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
                chunk_tokens=before.chunk_tokens,
                stream=stream,
                keeps_shape=self.options.standby == "kv",
                further_seat_bytes=taken,
            )
            return self._proposed(repair, cluster, taken)

        streams = before.streaming is not None or self.options.stream == "on"
        may_stream = streams or self.options.stream == "auto"
        said = replace(
            self.options,
            stream="on" if may_stream else "off",
            plan="auto" if isinstance(wanted, Plan) else wanted,
        )
        cluster = self._cluster(self._taken(stream=may_stream))
        with errors_for_users(self.checkpoint, cluster, said):
            if may_stream and not streams:
                with contextlib.suppress(partition.CapacityError):
                    return repaired(stream=False)
            return repaired(stream=may_stream)

    def _proposed(self, repair: Repair, cluster: ClusterSpec, taken: int) -> Proposal:
        before, predicted = self.before, repair.predicted
        if predicted is not None:
            predicted = partition.estimate(
                repair.plan,
                before.model,
                cluster,
                before.workload,
                chunk_tokens=before.chunk_tokens,
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
                        reason="what was lost is replaced without it",
                    )
                    for device in cluster.devices
                    if device.id not in repair.plan.devices
                ),
                runners_up=(),
            ),
            cluster=cluster,
            wire_rules=wire_rules,
            repair=repair,
            overhead={
                peer.id: Overhead(
                    promised_bytes=peer.memory_bytes,
                    floor_bytes=peer.floor_bytes,
                    buffer_bytes=taken,
                )
                for peer in self.peers
            },
        )

    def _cluster(self, taken: int) -> ClusterSpec:
        """The devices that are left, with their memory for weights and KV caches; a step takes
        `taken` bytes of it."""
        memory = {peer.id: peer.device(buffer_bytes=taken).memory_bytes for peer in self.peers}
        for device in self.before.cluster.devices:
            if device.id in self.before.plan.devices:
                had = self.before.overhead.get(device.id)
                more = max(0, taken - had.buffer_bytes) if had is not None else 0
                memory[device.id] = max(0, device.memory_bytes - more)

        def with_memory(device: DeviceSpec) -> DeviceSpec:
            return replace(device, memory_bytes=memory[device.id])

        return replace(self.known, devices=tuple(map(with_memory, self.known.devices)))

    def _taken(self, *, stream: bool) -> int:
        """What a step takes of a device's memory."""
        return most_overhead(
            self.checkpoint.spec,
            self.options.limits(self.checkpoint.spec),
            may_split=len(self.peers) > 1,
            stream=stream,
            kv_dtype=self.options.kv_dtype,
        )
