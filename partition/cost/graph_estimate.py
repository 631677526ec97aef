"""How long a graph takes by a plan: its latency, and the interval between results."""

from collections import defaultdict

from edge.partition.plan.graph_plan import GraphEstimate, GraphFacts, GraphPlan, StageEstimate

_LEAST_S = 1e-9
"""Least time of one input."""


def estimate_graph(facts: GraphFacts, plan: GraphPlan) -> GraphEstimate:
    """The estimate of a plan that fits to the facts (`GraphPlan.check`).

    A stage begins once its device is free and its inputs have come; it costs its device's latency
    and its tensors in both directions. With many inputs under way, a device computes one while
    tensors of others come and go: its interval is the longest of the three. Stages behind the place
    where inputs end early count by the share of inputs that go on. Copies add their rates, as far
    as the coordinator can send and receive at once; a lone input takes the one with the least
    latency.
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
    busy: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name in plan.devices}
    stages, early_s = [], 0.0
    for stage in plan.stages:
        device = devices[stage.device]
        received, sent = border(facts, stage.atoms)
        compute_s = sum(device.seconds[number] for number in stage.atoms)
        receive_s = sum(facts.tensor_bytes[name] for name in received) / device.bytes_per_s
        send_s = sum(facts.tensor_bytes[name] for name in sent) / device.bytes_per_s
        begin_s = max([free_s[stage.device], *(ready_s.get(name, 0.0) for name in received)])
        end_s = begin_s + device.latency_s + receive_s + compute_s + send_s
        free_s[stage.device] = end_s
        ready_s.update(dict.fromkeys(sent, end_s))
        weight = facts.weight(stage.atoms)
        if weight == 1.0:
            early_s = max(early_s, end_s)
        for place, seconds in enumerate((receive_s, device.overhead_s + compute_s, send_s)):
            busy[stage.device][place] += weight * seconds
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


def border(facts: GraphFacts, atoms: range) -> tuple[list[str], list[str]]:
    """The tensors that a stage receives, and those that it sends."""
    made = {name for number in atoms for name in facts.atoms[number].outputs}
    received = dict.fromkeys(
        name for number in atoms for name in facts.atoms[number].inputs if name not in made
    )
    later = {
        name
        for number in range(atoms.stop, len(facts.atoms))
        for name in facts.atoms[number].inputs
    }
    sent = [
        name
        for number in atoms
        for name in facts.atoms[number].outputs
        if name in facts.results or name in later
    ]
    return list(received), sent
