"""What the sums of a stage cost, also where they overlap with computing.

A split stage computes a long chunk in two halves: while the sum of one half is exchanged, the other
half is computed. Between two sums is a segment of half a layer. The two halves are jobs of a flow
shop with two machines, processor and link (Johnson, 1954). So each segment takes as long as the
slower of them, and a sum adds only the time by which it is longer than the segment.
"""

from collections.abc import Sequence

from edge.partition.cost.message_times import Network
from edge.partition.cost.pace import Phase
from edge.partition.plan.facts import DeviceSpec, ModelFacts

SHOWN_BYTE_S = 2e-9
"""Seconds per byte that an overlapped sum still adds, because sending, receiving and adding use the
processor, too. Measured over two devices of one core: 256 tokens of a 1.1 B model (45 sums of 2
MiB) took 1.47 s, of which 1.31 s were predicted for everything but sums: 1.7 ns per byte."""


def stage_sum_s(
    network: Network, model: ModelFacts, devices: Sequence[DeviceSpec], phase: Phase
) -> float:
    """Seconds that one sum adds to a step of a stage on these devices, all with rates."""
    nbytes = phase.rows * model.wire_row_bytes
    crowd_s = network.crowds.sum_s(devices, phase.rows)
    sum_s = network.sum_s([device.id for device in devices], nbytes)
    if not phase.in_halves or len(devices) < 2:
        return max(0.0, sum_s + crowd_s)
    shown_s = max(sum_s - segment_s(model, devices, phase), nbytes * SHOWN_BYTE_S)
    return max(0.0, min(sum_s, shown_s) + crowd_s)


def segment_s(model: ModelFacts, devices: Sequence[DeviceSpec], phase: Phase) -> float:
    """Seconds of half an average layer, divided among these devices by their speeds; fixed times
    are averaged."""
    counted = model.count(range(model.num_layers))
    whole = sum(count * (each.weight_bytes - each.layer_bytes) for each, count in counted)
    nbytes = whole / model.num_layers
    speed = fixed_s = 0.0
    for device in devices:
        assert device.rates is not None
        speed += 1 / device.rates.slice_weights_s(phase.rows)
        fixed_s += sum(device.rates.slice_fixed_s(phase.rows)) / 2 + device.rates.run_s
    return nbytes / 2 / speed + fixed_s / len(devices)
