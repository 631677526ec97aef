"""Operators in one graph, fed with cases as a session is fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.kernels.cases import Array, Case
from edge.kernels.onnx_graph import CPU, OnnxGraph, Provider

_TOKENS = 1
"""The axis of tokens, where arrays have one."""


class Expected(NamedTuple):
    """The expected output of one run, and its tolerance in the caller's measure."""

    operator: str
    values: Array
    allowed: float
    typical: float = 0.0
    """The usual size of a value, where the largest may be small by chance."""


class CaseGraph:
    """A graph with several operators, and one case of each for every run.

    Runs differ in their numbers of tokens.
    """

    def __init__(self, runs: int = 1, provider: Provider = CPU) -> None:
        self.graph = OnnxGraph("cases", provider)
        self.expected: list[dict[str, Expected]] = [{} for _ in range(runs)]
        """By output, for each run."""
        self.feeds: list[dict[str, NDArray[Any]]] = [{} for _ in range(runs)]
        """Inputs of each run, for a session."""
        self._of_tokens: set[str] = set()
        """Inputs with an axis of tokens."""

    def input(self, name: str, *arrays: NDArray[Any]) -> str:
        """An input, and its array in each run."""
        shape = _shape(arrays)
        if "tokens" in shape:
            self._of_tokens.add(name)
        for feeds, array in zip(self.feeds, arrays, strict=True):
            feeds[name] = array
        return self.graph.input(name, arrays[0].dtype, shape)

    def add(
        self,
        operator: str,
        face: Callable[..., Any],
        *cases: Case,
        allowed: float = 0.0,
        typical: float = 0.0,
        results: int | None = None,
    ) -> list[str]:
        """An operator, and the names of its outputs. results: how many are compared; None: all."""
        key, first = f"{len(self.expected[0])}", cases[0]
        inputs = [
            self.input(f"{key}.x{number}", *arrays)
            for number, arrays in enumerate(zip(*(case.inputs for case in cases), strict=True))
        ]
        weights = [
            None if weight is None else self.graph.weight(f"{key}.w{number}", weight)
            for number, weight in enumerate(first.weights)
        ]
        found = face(self.graph, *inputs, *weights, **first.options)
        values = list(found if isinstance(found, tuple) else (found,))[:results]
        of_runs = [case.expected()[:results] for case in cases]
        names = []
        for value, *wanted in zip(values, *of_runs, strict=True):
            names.append(f"result_{len(self.expected[0])}")
            self.graph.output(value, names[-1], np.float32, _shape(wanted))
            for expected, values_of_run in zip(self.expected, wanted, strict=True):
                expected[names[-1]] = Expected(operator, values_of_run, allowed, typical)
        return names

    def cut(self, tokens: int) -> dict[str, NDArray[Any]]:
        """What the last run is fed with, but only the first tokens of it."""
        return {
            name: array[:, :tokens] if name in self._of_tokens else array
            for name, array in self.feeds[-1].items()
        }


def _shape(arrays: Sequence[NDArray[Any]]) -> list[int | str]:
    """The shape of arrays that may differ in their number of tokens."""
    shape: list[int | str] = list(arrays[0].shape)
    if any(each.shape != arrays[0].shape for each in arrays):
        shape[_TOKENS] = "tokens"
    return shape
