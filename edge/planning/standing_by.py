"""Shards that spare devices would take over after a loss, and keep ready. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from edge.partition import Plan, Workload
from edge.planning.losses import Loss
from edge.planning.proposal import Proposal
from edge.protocol.topology import Seat


def seats(plan: Plan) -> list[tuple[str, Seat]]:
    """Device ids with their seats, in plan order."""
    return [
        (shard.device, (stage, rank))
        for stage, each in enumerate(plan.stages)
        for rank, shard in enumerate(each.shards)
    ]


def taken_over(before: Plan, repaired: Plan) -> list[tuple[str, Seat]]:
    """Seats of the repaired plan on devices that had no part before, with the devices' ids."""
    return [(id, seat) for id, seat in seats(repaired) if id not in before.devices]


def ready_bytes(proposal: Proposal, losses: Sequence[Loss]) -> dict[str, int]:
    """Bytes of weights that spare devices keep in memory, by id, for the loss of one device.

    `losses` are those of the proposal.
    """
    workload = Workload(prompt_tokens=1, output_tokens=0)
    kept = {}
    for loss in losses:
        if loss.repair is None:
            continue
        plan = loss.repair.plan
        for device, (stage, rank) in taken_over(proposal.plan, plan):
            place, share = plan.place(stage), plan.stages[stage].shards[rank]
            use = share.memory(place, proposal.model, workload)
            kept[device, place, share] = use.on(proposal.cluster.device(device)).weight_bytes
    found: dict[str, int] = {}
    for (device, *_what), num_bytes in kept.items():
        found[device] = found.get(device, 0) + num_bytes
    return found
