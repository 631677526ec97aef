"""How a graph is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.partition import GraphPlan, Objective

MOST_SEQUENCES = 4
"""Sequences of a graph with state at once. Memory for their states is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExit:
    """When an input ends early."""

    output: str
    least: float

    def is_met(self, array: NDArray[Any]) -> bool:
        """Whether all values are large enough. NaN is not."""
        return bool(array.size) and bool(np.all(array >= self.least))

    def share(self, array: NDArray[Any]) -> float:
        """The share of values that are."""
        return float(np.mean(array >= self.least)) if array.size else 0.0


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
    exit_when: EarlyExit | None = None
