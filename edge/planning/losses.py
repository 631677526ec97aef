"""The consequence of losing each device of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from edge import partition
from edge.partition import DeviceSpec, Parallel, PartitionError, Plan, Repair
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal

_STREAMS = {"off": (False,), "auto": (False, True), "on": (True,)}
"""Values of `stream` that are tried, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One device of a plan, and the repair of the plan without it."""

    device: DeviceSpec
    repair: Repair | None
    """None where no plan is left; `refused` then says why."""
    refused: PartitionError | None


def losses(proposal: Proposal, options: LoadOptions) -> list[Loss]:
    """The losses of single devices, in plan order. `options` are those of the proposal.

    Devices are assumed to have no weights of lost seats on disk.
    """
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
    """The loss of one device."""
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
