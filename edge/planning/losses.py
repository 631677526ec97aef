"""What the loss of each device of a plan would do."""

from __future__ import annotations

from dataclasses import dataclass

from edge import partition
from edge.partition import DeviceSpec, Parallel, PartitionError, Plan, Repair
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal

_STREAMS = {"off": (False,), "auto": (False, True), "on": (True,)}
"""Whether layers may come from disk, in the order in which that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One device of a plan, and what would come of the plan without it."""

    device: DeviceSpec
    repair: Repair | None
    """None: no plan is left, as `refused` says."""
    refused: PartitionError | None


def losses(proposal: Proposal, options: LoadOptions) -> list[Loss]:
    """In plan order; `options` are those of the proposal. Nothing is known of what devices have
    cached."""
    return [_loss_of(id, proposal, options) for id in proposal.plan.devices]


def can_lose(device_id: str, proposal: Proposal, options: LoadOptions) -> bool:
    """Whether a plan in memory is left without this device; which one is not computed."""
    return partition.can_repair(
        proposal.plan,
        proposal.model,
        proposal.cluster,
        {device_id},
        proposal.workload,
        parallel=_parallel(options),
        chunk_tokens=proposal.limits.chunk_tokens,
        stream=False,
        keeps_shape=options.keeps_shape,
    )


def _loss_of(device_id: str, proposal: Proposal, options: LoadOptions) -> Loss:
    """What the loss of one device would do."""
    device = proposal.cluster.device(device_id)
    refused: PartitionError | None = None
    for stream in _STREAMS[options.stream]:
        try:
            repair = partition.repair(
                proposal.plan,
                proposal.model,
                proposal.cluster,
                {device.id},
                proposal.workload,
                parallel=_parallel(options),
                chunk_tokens=proposal.limits.chunk_tokens,
                stream=stream,
                keeps_shape=options.keeps_shape,
            )
        except PartitionError as error:
            refused = error
        else:
            return Loss(device=device, repair=repair, refused=None)
    return Loss(device=device, repair=None, refused=refused)


def _parallel(options: LoadOptions) -> Parallel | None:
    return None if isinstance(options.plan, Plan) else options.plan
