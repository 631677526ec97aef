"""ONNX Runtime's memory arena, shared by all graphs of this process.

It grows on demand and keeps its blocks. It cannot extend a block, so steps of growing length would
take the sum of all their sizes.
"""

from __future__ import annotations

import numpy as np

from edge.backends.onnx.runtime import ort
from edge.kernels.onnx_graph import OnnxGraph
from edge.protocol.step import MOST_DRAFTED
from edge.system.heap import release_freed_memory

_FEW_ROWS = 2 + MOST_DRAFTED
"""Rows below which the blocks of all step sizes together are small. Steps with guesses are among
them, and their sizes change all the time."""


def make_arena() -> None:
    """Register the arena with the process. Called before the first session is made."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    # Grow by the requested size and not by powers of two, to stay within the peer's memory.
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(0, 1, -1, -1))


class Arena:
    """One program's use of the process's arena."""

    def __init__(self, options: ort.SessionOptions) -> None:
        """options: of the program's sessions, which name the arena."""
        graph = OnnxGraph("give_back")
        nothing = graph.input("nothing", np.float32, [1])
        graph.output(graph.node("Identity", nothing), "same", np.float32, [1])
        self._session = ort.InferenceSession(
            graph.build(), options, providers=["CPUExecutionProvider"]
        )
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._nothing = np.zeros(1, np.float32)
        self._rows = 0

    def before_step(self, rows: int) -> None:
        """Free unused blocks if the last step had another size. Steps of equal size, as in
        decoding, use their blocks again."""
        if rows != self._rows and max(rows, self._rows) >= _FEW_ROWS:
            self.give_back()
        self._rows = rows

    def give_back(self) -> None:
        """Return unused blocks to the system. Takes 1 to 10 ms."""
        self._session.run(None, {"nothing": self._nothing}, self._options)
        release_freed_memory()
