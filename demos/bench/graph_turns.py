"""The times of a loaded graph: of one input, and between the results of a stream."""

from __future__ import annotations

import time

import edge
from edge.demos.bench.graph_kinds import Kind

_INPUTS_AHEAD = 8
"""Different inputs; as many as there are under way at most."""
_LEAST, _MOST = 8, 40
"""Results of a stream that are timed."""


def latencies_s(graph: edge.Graph, kind: Kind, runs: int) -> list[float]:
    """Seconds of single inputs, one after the other."""
    inputs = kind.inputs(runs)
    found = []
    for _ in range(runs):
        began_s = time.perf_counter()
        graph.run(inputs)
        found.append(time.perf_counter() - began_s)
    return found


def interval_s(graph: edge.Graph, kind: Kind, seconds: float) -> float:
    """Seconds between two results of a stream that takes about so long, once it flows."""
    ahead = graph.window + 2  # the first ones come late
    count = min(_MOST, max(_LEAST, round(seconds / graph.estimate.interval_s)))
    inputs = [kind.inputs(seed) for seed in range(_INPUTS_AHEAD)]
    each_input = (inputs[number % _INPUTS_AHEAD] for number in range(ahead + count))
    ends_s = [time.perf_counter() for _result in graph.stream(each_input)]
    return (ends_s[-1] - ends_s[-1 - count]) / count
