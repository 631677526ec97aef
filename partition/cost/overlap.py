"""What the sums of a stage cost, also where they hide behind the products of another half.

A split stage computes a long chunk in two halves: while the sum of one half is exchanged, the other
is computed. Between two sums lies a segment: half a layer. The two halves are jobs of a flow shop
of two machines, processor and link, so each segment takes as long as the slower of them (Johnson,
1954), and of a sum only what is longer than the segment shows.
"""

from collections.abc import Sequence

from edge.partition.cost.message_times import Network
from edge.partition.cost.pace import Phase
from edge.partition.plan.facts import DeviceSpec, ModelFacts

SHOWN_BYTE_S = 2e-9
"""Seconds per byte that show of a hidden sum: sending, receiving and adding up take the processor,
too. Over two devices of one core, 256 tokens of a 1.1 B model (45 sums of 2 MiB) took 1.47 s, of
which 1.31 were predicted for everything but sums: 1.7 ns a byte."""


def stage_sum_s(
    network: Network, model: ModelFacts, devices: Sequence[DeviceSpec], phase: Phase
) -> float:
    """What one sum adds to a step of a stage on these devices, each with rates."""
    nbytes = phase.rows * model.wire_row_bytes
    crowd_s = network.crowds.sum_s(devices, phase.rows)
    sum_s = network.sum_s([device.id for device in devices], nbytes)
    if not phase.in_halves or len(devices) < 2:
        return max(0.0, sum_s + crowd_s)
    shown_s = max(sum_s - segment_s(model, devices, phase), nbytes * SHOWN_BYTE_S)
    return max(0.0, min(sum_s, shown_s) + crowd_s)


def segment_s(model: ModelFacts, devices: Sequence[DeviceSpec], phase: Phase) -> float:
    """Half a mean layer on devices that share it as their speeds are, what is fixed in the mean."""
    counted = model.count(range(model.num_layers))
    whole = sum(count * (each.weight_bytes - each.layer_bytes) for each, count in counted)
    nbytes = whole / model.num_layers
    speed = fixed_s = 0.0
    for device in devices:
        assert device.rates is not None
        speed += 1 / device.rates.slice_weights_s(phase.rows)
        fixed_s += sum(device.rates.slice_fixed_s(phase.rows)) / 2 + device.rates.run_s
    return nbytes / 2 / speed + fixed_s / len(devices)
