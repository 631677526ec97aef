"""How long a graph takes by a plan: its latency, and the interval between results."""

from collections import defaultdict

from edge.partition.plan.graph_plan import (
    GraphDevice,
    GraphEstimate,
    GraphFacts,
    GraphPlan,
    StageEstimate,
)

_WAYS = 3
"""Things of a device that all its stages share; the last of `intervals` is each stage's own."""

_LEAST_S = 1e-9
"""Least time of one input."""


def estimate_graph(facts: GraphFacts, plan: GraphPlan) -> GraphEstimate:
    """The estimate of a plan that fits to the facts (`GraphPlan.check`).

    A stage begins once its device is free and its inputs have come; it costs its device's latency
    and its tensors in both directions. With many inputs under way, a device computes one while
    tensors of others come and go: its interval is the longest of the three, or that of a stage
    through which no more inputs go at once. Stages behind the place where inputs end early count by
    the share of inputs that go on. Copies add their rates, as far as the coordinator can send and
    receive at once; a lone input takes the one with the least latency.
    """
    if plan.copies:
        copies = tuple(estimate_graph(facts, each) for each in plan.each_copy)
        rates = [1 / max(each.interval_s, _LEAST_S) for each in copies]
        # All tensors pass the coordinator's port, which is busy for as long as each is on its way.
        busy_s = [
            sum(
                rate * sum(getattr(stage, way) for stage in each.stages)
                for rate, each in zip(rates, copies, strict=True)
            )
            for way in ("receive_s", "send_s")
        ]
        return GraphEstimate(
            latency_s=min(each.latency_s for each in copies),
            interval_s=max(1.0, *busy_s) / sum(rates),
            stages=tuple(stage for each in copies for stage in each.stages),
            copies=copies,
        )
    devices = {device.name: device for device in facts.devices}
    ready_s: dict[str, float] = {}
    free_s: dict[str, float] = defaultdict(float)
    busy: dict[str, list[float]] = {name: [0.0] * (_WAYS + 1) for name in plan.devices}
    stages, early_s = [], 0.0
    for stage in plan.stages:
        device = devices[stage.device]
        received, sent = facts.border(stage.atoms)
        compute_s = sum(device.seconds[number] for number in stage.atoms)
        came, gone = (sum(facts.tensor_bytes[name] for name in names) for names in (received, sent))
        receive_s, send_s = came / device.bytes_per_s, gone / device.bytes_per_s
        begin_s = max([free_s[stage.device], *(ready_s.get(name, 0.0) for name in received)])
        end_s = begin_s + device.latency_s + receive_s + compute_s + send_s
        free_s[stage.device] = end_s
        ready_s.update(dict.fromkeys(sent, end_s))
        weight = facts.weight(stage.atoms)
        if weight == 1.0:
            early_s = max(early_s, end_s)
        for place, seconds in enumerate(intervals(facts, device, compute_s, came, gone)):
            known = busy[stage.device][place]
            more = weight * seconds
            busy[stage.device][place] = max(known, more) if place == _WAYS else known + more
        stages.append(
            StageEstimate(
                device=stage.device,
                compute_s=compute_s,
                receive_s=receive_s,
                send_s=send_s,
                memory_bytes=facts.memory(stage.atoms),
            )
        )
    return GraphEstimate(
        latency_s=facts.exit_share * early_s + (1 - facts.exit_share) * max(free_s.values()),
        interval_s=max(max(each) for each in busy.values()),
        stages=tuple(stages),
    )


def intervals(
    facts: GraphFacts, device: GraphDevice, compute_s: float, received: int, sent: int
) -> tuple[float, float, float, float]:
    """What a stage takes of its device for each input: to receive, to compute and to send; and the
    least interval by the whole time of an input, as only some are under way at once."""
    receive_s, send_s = received / device.bytes_per_s, sent / device.bytes_per_s
    busy_s = device.overhead_s + compute_s + device.handling_s_per_byte * (received + sent)
    whole_s = device.latency_s + receive_s + compute_s + send_s
    return receive_s, busy_s, send_s, whole_s / facts.at_once
