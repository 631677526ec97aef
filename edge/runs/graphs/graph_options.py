"""How a graph is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge.partition import GraphPlan, Objective

MOST_SEQUENCES = 4
"""Sequences of a graph with state at once. Memory for their states is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How a graph is loaded; see `AsyncCluster.load_graph`."""

    plan: GraphPlan | None = None
    objective: Objective = "latency"
    run_limit_s: float = 60.0
    state: Mapping[str, str] = field(default_factory=dict)
    """Outputs, and the inputs whose next values they are."""
    held: frozenset[str] = frozenset()
    """Inputs that are sent once for many runs."""
    sequences: int = MOST_SEQUENCES
