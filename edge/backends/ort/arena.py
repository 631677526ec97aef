"""ONNX Runtime's memory arena, shared by every graph of this process.

It grows on demand and keeps its blocks. A block that is a little too small is of no use, so steps
that become longer one by one would take the sum of all their sizes.
"""

from __future__ import annotations

import numpy as np

from edge.backends.ort.runtime import ort
from edge.host.huge_pages import release_freed_memory
from edge.kernels.onnx_graph import OnnxGraph

_FEW_ROWS = 8
"""Steps below this take so little that all their sizes together do no harm."""


def make_arena() -> None:
    """Register it with the process, before the first session."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    # Grow by what is asked, not by powers of two: a peer's memory is a promise.
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(0, 1, -1, -1))


class Arena:
    """One program's use of the arena, which is the process's."""

    def __init__(self, options: ort.SessionOptions) -> None:
        """`options` are those of every session: they name the arena."""
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
        """Free blocks of a step of another size before this one. Steps of equal size, as in
        decoding, find their blocks again."""
        if rows != self._rows and max(rows, self._rows) >= _FEW_ROWS:
            self.give_back()
        self._rows = rows

    def give_back(self) -> None:
        """To the system, all that no graph uses just now. Takes 1 to 10 ms."""
        self._session.run(None, {"nothing": self._nothing}, self._options)
        release_freed_memory()
