"""Input statistics of a model, in one file: Gram matrices to round its weights by, or counts of
tokens of its experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.models.spec import ModelSpec
from edge.offload import (
    Closing,
    FolderCache,
    FolderUse,
    SafetensorsFile,
    SafetensorsWriter,
    disk_errors_as_store_errors,
)
from edge.weights.layout import whole_layout
from edge.weights.observation import Observed, ObservedExperts, ObservedRun, observed_runs
from edge.weights.quantized_store import store_errors_as_edge_errors

FILE = "grams.safetensors"
_LIMIT_BYTES = 16 << 30


class InputStatistics(Closing):
    """An open file of input statistics. Close it, or use it as a context manager."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Raises CheckpointError for a file that is damaged, or of another model."""
        self.path = path
        layout = whole_layout(spec)
        runs = observed_runs(layout)
        self._runs: dict[str, list[ObservedRun]] = {}
        for matrix in layout.matrices:
            inputs = (run for run in runs if isinstance(run, ObservedRun))
            of_matrix = [run for run in inputs if run.matrix == matrix.name]
            if matrix.is_observed:
                self._runs |= {role: of_matrix for role, _rows in matrix.parts}
        self._experts = {run.layer: run for run in runs if isinstance(run, ObservedExperts)}
        with store_errors_as_edge_errors():
            self._file = SafetensorsFile(path)
        found = {name: (each.dtype, each.shape) for name, each in self._file.tensors.items()}
        if found != _tensors(runs):
            self._file.close()
            raise CheckpointError(f"{path} has statistics of another model", remedy="remove it")

    def grams(self, role: str) -> list[NDArray[np.float32]]:
        """Gram matrices of a matrix's inputs, one for each run of columns."""
        with store_errors_as_edge_errors():
            return [self._file.read(_name(run), ()) for run in self._runs[role]]

    def expert_uses(self) -> dict[int, NDArray[np.float32]]:
        """The number of tokens for each expert, by layer."""
        with store_errors_as_edge_errors():
            return {layer: self._file.read(_name(run), ()) for layer, run in self._experts.items()}

    def close(self) -> None:
        self._file.close()


def has_statistics(path: Path, spec: ModelSpec) -> bool:
    """Whether the statistics exist and are undamaged. Removes others, to make room.

    Called by the folder's only writer.
    """
    try:
        InputStatistics(path, spec).close()
    except CheckpointError:
        with store_errors_as_edge_errors(), disk_errors_as_store_errors(path):
            path.unlink(missing_ok=True)
        return False
    return True


def statistics_folder(root: Path, name: str, spec: ModelSpec) -> FolderUse:
    """The folder for a model's statistics of this name, in the file `FILE`. May evict others.

    Raises CapacityError for a full disk.
    """
    needed = sum(run.nbytes for run in observed_runs(whole_layout(spec)))
    with store_errors_as_edge_errors():
        folders = FolderCache(root, max(_LIMIT_BYTES, needed))
        with folders.locked():
            use = folders.use(name)
            if not (use.folder / FILE).exists():
                try:
                    folders.make_room(name, needed)
                except BaseException:
                    use.close()
                    raise
        return use


def statistics_writer(path: Path, spec: ModelSpec) -> SafetensorsWriter:
    """A writer for statistics of the model; see `write_observed`."""
    return SafetensorsWriter(path, _tensors(observed_runs(whole_layout(spec))))


def write_observed(writer: SafetensorsWriter, run: Observed, sums: NDArray[np.float32]) -> None:
    writer.write_rows(_name(run), 0, sums)


def _tensors(runs: tuple[Observed, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {_name(run): ("F32", run.shape) for run in runs}


def _name(run: Observed) -> str:
    if isinstance(run, ObservedExperts):
        return f"layers.{run.layer}.experts"
    return f"{run.matrix}.{run.columns.start}"
