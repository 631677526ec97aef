"""Where pictures are read: on a device that the plan leaves out, if one has room; and how long it
takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edge.host.free_memory import format_size
from edge.memory.tower_memory import tower_use
from edge.models.towers.tower import Tower
from edge.partition import ComputeRates
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.weights.formats import WeightFormat
from edge.weights.tower import tower_format, tower_layout


def reading_order(peers: Sequence[PeerInfo], planned: Collection[str]) -> list[PeerInfo]:
    """The devices in the order in which they are asked to read pictures: those that the plan leaves
    out come first, then those with the most free memory."""
    able = (each for each in peers if not each.is_leaving)
    return sorted(able, key=lambda each: (each.id in planned, -each.free_now_bytes))


def tile_seconds(tower: Tower, model_format: WeightFormat, rates: ComputeRates) -> float:
    """Predicted seconds for the largest tile, by what products and attention of the model took."""
    patches = tower.max_patches
    usual = model_format.recipe.usual.packed_bytes_per_weight
    matrices = tower_layout(tower).matrices
    weights = sum(matrix.num_rows * len(matrix.columns) for matrix in matrices)
    heads = sum(each.num_heads for each in tower.encoder.attentions.values())
    attention_s = rates.attention_step_s(patches) * patches * heads
    return rates.weights_s(patches, shared=False) * usual * weights + attention_s


def place_in_words(
    tower: Tower, model_format: WeightFormat, proposal: Proposal, peers: Sequence[PeerInfo]
) -> str:
    """For the user: what reads pictures beside a plan, and what that takes."""
    planned = proposal.plan.devices
    need = tower_use(tower, tower_format(tower, model_format)).total
    for peer in reading_order(peers, planned):
        taken = sum(row.memory.total for row in proposal.rows if row.device == peer.id)
        if peer.free_now_bytes - taken < need:
            continue
        is_apart = peer.id not in planned
        where = "which has no part in the plan" if is_apart else "beside a part of the plan"
        said = f"pictures are read on {peer.name}, {where}, with {format_size(need)} of its memory"
        rates = proposal.cluster.device(peer.id).rates
        if rates is not None:
            said += f", in {tile_seconds(tower, model_format, rates):.2g} s for the largest"
        return said
    return f"no device has {format_size(need)} free for what reads pictures, which are refused"
