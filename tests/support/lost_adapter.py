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
_run = bindings.BoundGraph.run


def _lost(self: bindings.BoundGraph, caches: Mapping[str, Any], options: Any) -> None:
    begins = Path(os.environ["LOST_FROM"])
    if begins.exists():
        begins.unlink()
        os.write(2, _AS_DAWN_SAYS_IT)
        return  # nothing is computed, and nothing is raised
    _run(self, caches, options)


if __name__ == "__main__":
    bindings.BoundGraph.run = _lost  # type: ignore[method-assign]
    main()
