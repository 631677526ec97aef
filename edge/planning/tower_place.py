"""Where pictures are read, on one device or several, and how long it takes."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence

from edge.host.free_memory import format_size
from edge.memory.tower_memory import tower_use
from edge.models.towers.part import TowerPart
from edge.models.towers.tower import Tower
from edge.partition import ComputeRates
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.weights.formats import WeightFormat
from edge.weights.tower import tower_format, tower_layout

_GAIN = 2.0
"""A device of the plan reads pictures only if it is so many times as fast as one outside, because
the plan waits meanwhile."""

Rates = Mapping[str, ComputeRates]
"""Rates by the ids of devices; of those that were not measured, none."""


def tower_rates(proposal: Proposal, peers: Sequence[PeerInfo]) -> Rates:
    """The rates at which devices read pictures. Those of GPUs are not known: the processor beside
    them reads, and only the GPU was measured."""
    on_cpu = {peer.id for peer in peers if peer.backend == "ort"}
    devices = proposal.cluster.devices
    return {each.id: each.rates for each in devices if each.rates and each.id in on_cpu}


def reading_order(
    peers: Sequence[PeerInfo],
    planned: Collection[str],
    seconds: Mapping[str, float],
) -> list[PeerInfo]:
    """The devices in the order in which they are asked to read pictures.

    seconds: of the largest tile, by device. The fastest comes first, where the time counts twice on
    a device of the plan. Where not all are known, devices that the plan leaves out come first, then
    those with the most free memory.
    """
    able = [each for each in peers if not each.is_leaving]
    if all(each.id in seconds for each in able):
        gains = {each.id: _GAIN if each.id in planned else 1.0 for each in able}
        return sorted(able, key=lambda each: (seconds[each.id] * gains[each.id], -gains[each.id]))
    return sorted(able, key=lambda each: (each.id in planned, -each.free_now_bytes))


_WITH_NORMS = 1.1
"""Times the seconds of products, with norms and activations; with rotary positions `_WITH_TURNS`.
Measured for towers of 512 and 768, with 1 and 2 threads."""
_WITH_TURNS = 1.25
_FLOAT_PRODUCTS = 1.4
"""Times the seconds of products with rounded matrices that those of float32 take."""


def tile_seconds(
    part: TowerPart, model_format: WeightFormat, rates: ComputeRates, patches: int
) -> float:
    """Predicted seconds of a part for a tile of so many patches, by what products of the model
    took: patches attend to each other in products, too, of float32."""
    tower, layout = part.tower, tower_layout(part)
    usual = model_format.recipe.usual.packed_bytes_per_weight
    seconds = 0.0
    for matrix in layout.matrices:
        count = patches if matrix.name.startswith("layers.") else max(1, patches // tower.side**2)
        weights = matrix.num_rows * len(matrix.columns)
        seconds += rates.weights_s(count, shared=False) * usual * weights
    seconds *= _WITH_NORMS if tower.turns is None else _WITH_TURNS
    weight_s = rates.weights_s(patches, shared=False) * usual
    for layer, each in layout.attentions.items():
        seen = patches
        if tower.window is not None and layer not in tower.whole_layers:
            seen = min(patches, (tower.window * tower.side) ** 2)
        pairs_s = weight_s * 2 * each.head_size * seen * each.num_heads
        seconds += pairs_s * (1.0 if model_format.name == "float32" else _FLOAT_PRODUCTS)
    return seconds


def largest_tile_seconds(
    tower: Tower, model_format: WeightFormat, rates: Rates
) -> dict[str, float]:
    """Predicted seconds of the whole tower for its largest tile, by device."""
    whole = TowerPart.whole(tower)
    return {
        device: tile_seconds(whole, model_format, each, tower.max_patches)
        for device, each in rates.items()
    }


def divided(
    tower: Tower, tower_format: WeightFormat, rooms: Mapping[str, int]
) -> list[tuple[str, TowerPart]] | None:
    """A tower cut over as few devices as can have it; None: it does not fit, or it has deep layers,
    whose outputs only the last part could give.

    rooms: free bytes by device, in the order in which devices are asked: of as few devices, the
    earlier ones are taken.
    """
    if tower.deep_layers:
        return None

    @functools.cache
    def need(first: int, stop: int) -> int:
        return tower_use(TowerPart(tower=tower, layers=range(first, stop)), tower_format).total

    order, num_layers = list(rooms), tower.encoder.num_layers
    if _cuts(num_layers, need, rooms) is None:
        return None
    for count in range(1, len(order) + 1):
        chosen: list[str] = []
        for number, device in enumerate(order):
            later = sorted(order[number + 1 :], key=lambda each: -rooms[each])
            tried = {*chosen, device, *later[: count - len(chosen) - 1]}
            room_of = {each: rooms[each] for each in order if each in tried}
            if (cuts := _cuts(num_layers, need, room_of)) is None:
                continue
            chosen.append(device)
            if len(chosen) == count:
                return [
                    (each, TowerPart(tower=tower, layers=layers)) for each, layers in cuts.items()
                ]
    return None


def _cuts(
    num_layers: int, need: Callable[[int, int], int], rooms: Mapping[str, int]
) -> dict[str, range] | None:
    """Layers for each device, as many as have room; None: not all have. need: bytes of layers from
    a first one up to another."""
    cuts: dict[str, range] = {}
    first = 0
    for device, room in rooms.items():
        stop = num_layers
        if need(first, stop) > room:
            stops = range(first + 1, num_layers)
            stop = first + bisect_right(stops, room, key=functools.partial(need, first))
        if stop > first:
            cuts[device] = range(first, stop)
        first = stop
        if first == num_layers:
            return cuts
    return None


def place_in_words(
    tower: Tower, model_format: WeightFormat, proposal: Proposal, peers: Sequence[PeerInfo]
) -> str:
    """For the user: what reads pictures beside a plan, and what that takes."""
    planned, kept_format = proposal.plan.devices, tower_format(tower, model_format)
    need = tower_use(TowerPart.whole(tower), kept_format).total
    rates = tower_rates(proposal, peers)
    seconds = largest_tile_seconds(tower, model_format, rates)
    rooms, names = dict[str, int](), {peer.id: peer.name for peer in peers}
    for peer in reading_order(peers, planned, seconds):
        taken = sum(row.memory.total for row in proposal.rows if row.device == peer.id)
        rooms[peer.id] = peer.free_now_bytes - taken
        if rooms[peer.id] < need:
            continue
        is_apart = peer.id not in planned
        where = "which has no part in the plan" if is_apart else "beside a part of the plan"
        said = f"pictures are read on {peer.name}, {where}, with {format_size(need)} of its memory"
        return said + _takes(seconds.get(peer.id))
    parts = divided(tower, kept_format, rooms)
    if parts is None:
        return f"no device has {format_size(need)} free for what reads pictures, which are refused"
    each = ", ".join(
        f"{names[device]} with {format_size(tower_use(part, kept_format).total)} for "
        f"{len(part.layers)} of {tower.encoder.num_layers} layers"
        for device, part in parts
    )
    said = f"what reads pictures fits on no single device and is cut over {len(parts)}: {each}"
    return said + _takes(parts_seconds(parts, model_format, rates, tower.max_patches))


def parts_seconds(
    parts: Sequence[tuple[str, TowerPart]], model_format: WeightFormat, rates: Rates, patches: int
) -> float | None:
    """Predicted seconds of parts on devices for a tile of so many patches, without the network;
    None where a rate is not known."""
    return total_s(
        [
            tile_seconds(part, model_format, rates[device], patches) if device in rates else None
            for device, part in parts
        ]
    )


def total_s(each: Sequence[float | None]) -> float | None:
    """The sum of predicted seconds; None if one of them is not known."""
    known = [one for one in each if one is not None]
    return sum(known) if len(known) == len(each) else None


def _takes(seconds: float | None) -> str:
    return "" if seconds is None else f", in {seconds:.2g} s for the largest"
