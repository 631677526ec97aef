"""What the loss of each device of a plan would do."""

from __future__ import annotations

from dataclasses import dataclass

from edge import partition
from edge.partition import DeviceSpec, PartitionError, Plan, Repair
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal


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
    return [loss_of(id, proposal, options) for id in proposal.plan.devices]


def loss_of(device_id: str, proposal: Proposal, options: LoadOptions) -> Loss:
    """The same of one device."""
    device = proposal.cluster.device(device_id)
    refused: PartitionError | None = None
    for stream in {"off": (False,), "auto": (False, True), "on": (True,)}[options.stream]:
        try:
            repair = partition.repair(
                proposal.plan,
                proposal.model,
                proposal.cluster,
                {device.id},
                proposal.workload,
                parallel=None if isinstance(options.plan, Plan) else options.plan,
                chunk_tokens=proposal.chunk_tokens,
                stream=stream,
                keeps_shape=options.keeps_shape,
            )
        except PartitionError as error:
            refused = error
        else:
            return Loss(device=device, repair=repair, refused=None)
    return Loss(device=device, repair=None, refused=refused)
