"""`python -m tests.support.lost_adapter peer`: its graphics adapter is lost, as a driver that
resets loses it, in the first graph after the file in LOST_FROM exists; later ones compute again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.backends.webgpu import bindings
from edge.cli.main import main

_AS_DAWN_SAYS_IT = b"WebGPU device lost (1): VK_ERROR_DEVICE_LOST\n"


def _let_lose(graph: type[bindings.BoundGraph]) -> None:
    run = graph.run

    def lost(self: Any, caches: Mapping[str, Any], options: Any) -> None:
        begins = Path(os.environ["LOST_FROM"])
        if begins.exists():
            begins.unlink()
            os.write(2, _AS_DAWN_SAYS_IT)
            return  # nothing is computed, and nothing is raised
        run(self, caches, options)

    graph.run = lost  # type: ignore[method-assign]


if __name__ == "__main__":
    _let_lose(bindings.BoundGraph)
    _let_lose(bindings.RecordedGraph)
    main()
