"""Places for streamed experts: a graph, and memory for the weights of any expert of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.runtime import ort
from edge.backends.ort.prepacking import LooseSession


class ExpertPlace:
    """A session, and the memory into which an expert's weights are read."""

    def __init__(self, loose: LooseSession) -> None:
        self.session = loose.session
        self.memory = loose.parts
        self._binding = loose.session.io_binding()

    def run(
        self,
        x: NDArray[np.float32],
        biases: Mapping[str, NDArray[np.float32]],
        results: NDArray[np.float32],
        options: ort.RunOptions,
    ) -> None:
        """Fill results [rows, hidden] from x [rows, hidden]. biases: by input of the graph."""
        self._input("x", x[np.newaxis])
        for name, bias in biases.items():
            self._input(name, bias)
        shape = (1, *results.shape)
        at = results.ctypes.data
        self._binding.bind_output("results", "cpu", 0, np.float32, shape, at)
        self.session.run_with_iobinding(self._binding, options)

    def _input(self, name: str, array: NDArray[Any]) -> None:
        at = array.ctypes.data
        self._binding.bind_input(name, "cpu", 0, np.float32, array.shape, at)
