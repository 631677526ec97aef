"""`edge` as on a device where the package of Edge's own kernels is not installed."""

from __future__ import annotations

import importlib.metadata
import runpy

from edge.host import block_kernels

_files = importlib.metadata.files


def _files_of_others(name: str) -> object:
    if name == block_kernels.DISTRIBUTION:
        raise importlib.metadata.PackageNotFoundError(name)
    return _files(name)


if __name__ == "__main__":
    importlib.metadata.files = _files_of_others  # type: ignore[assignment]
    runpy.run_module("edge", run_name="__main__")
