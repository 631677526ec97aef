"""Whether graphs of a folder compute, cut at every place, what they compute uncut.

A graph's kind is the name of its folder. `graph_exports.py` fills such a folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.runtime import ort
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import OnnxFile
from edge.graphs.parts import (
    GRAPH_NAME,
    INSIDE,
    WEIGHTS_FILE,
    GraphPart,
    TensorKind,
    cut_part,
    feasible_cuts,
)
from edge.graphs.tensors import pack, unpack
from edge.peer.graph_process import PartSession
from edge.runs.graphs.agreement import compare, tolerance_of
from edge.runs.graphs.inputs import checked, made_up_sample
from edge.runs.graphs.measuring import infer_unseen, kind_of, see_kinds

Arrays = Mapping[str, NDArray[Any]]

_FAILURES_SHOWN = 3
_COLUMNS = "{:<17}{:<26}{:>6}{:>6}{:>7}{:>6}{:>7}{:>9}  {}"
_HEAD = ("kind", "graph", "nodes", "atoms", "places", "cuts", "exact", "largest", "failures")


@dataclass(slots=True)
class Tried:
    """What cuts of one graph gave."""

    nodes: int
    atoms: int
    places: int
    cuts: int = 0
    exact: int = 0
    """Cuts whose results are those of the uncut graph to the last bit."""
    largest: float = 0.0
    """The largest difference, as a share of the largest value of its tensor."""
    failures: list[str] = field(default_factory=list)


def sample_of(path: Path, file: OnnxFile) -> dict[str, NDArray[Any]]:
    """The inputs in the .npz beside a graph, else made-up ones."""
    beside = path.with_suffix(".npz")
    if not beside.is_file():
        return made_up_sample(file.inputs)
    with np.load(beside) as stored:
        arrays = {name: stored[name] for name in stored.files}
    # Strings are stored as an array of characters, which numpy reads without pickle.
    texts = {
        name: array.astype(object) for name, array in arrays.items() if array.dtype.kind == "U"
    }
    return checked(file.inputs, arrays | texts)


def write_part(part: GraphPart, path: Path) -> int:
    """Write a part as a peer keeps it: weights, then the graph. Returns where the graph lies."""
    contents = {name: array for _names, read in part.groups for name, array in read().items()}
    places = {entry.name: entry.offset for entry in part.manifest.tensors}
    with path.open("wb") as stored:
        for name, place in places.items():
            stored.seek(place)
            stored.write(contents[name].data)
    return places[GRAPH_NAME]


@dataclass(slots=True)
class Computer:
    """Computes a graph and its parts as the process of a peer does, in this one."""

    path: Path
    file: OnnxFile
    atoms: Atoms
    folder: Path
    kinds: dict[str, TensorKind] = field(default_factory=dict)

    def uncut(self, sample: Arrays) -> Arrays:
        """Results of the file itself, or of one part of all where its weights lie elsewhere."""
        if any(map(self.file.place, self.file.initialisers)):
            return self.part(range(len(self.atoms)), sample)
        return _run(self._loaded(self.path, 0, self.path.stat().st_size), sample)

    def part(self, numbers: Iterable[int], known: Arrays) -> Arrays:
        """What a part of these atoms gives."""
        part = cut_part(self.file, self.atoms, list(numbers), self.kinds)
        return _run(self._open(part), {name: known[name] for name in part.inputs})

    def see_kinds(self, sample: Arrays) -> None:
        """Learn the kinds of all tensors from a run of the graph as it is written."""
        self.kinds = {name: kind_of(array) for name, array in sample.items()}
        part = cut_part(self.file, self.atoms, range(len(self.atoms)), self.kinds)
        loaded = self._open(part, plain=True)
        results = _run(loaded, {name: sample[name] for name in part.inputs})
        node_bytes = [0] * len(self.file.nodes)
        seen, types = loaded.end_profile(), loaded.types()
        see_kinds(self.file, seen, types, self.kinds, node_bytes, "this process")
        self.kinds |= {name: kind_of(array) for name, array in results.items()}
        infer_unseen(self.file, self.atoms, self.kinds, node_bytes)

    def _open(self, part: GraphPart, *, plain: bool = False) -> PartSession:
        path = self.folder / WEIGHTS_FILE
        begin = write_part(part, path)
        return self._loaded(path, begin, path.stat().st_size - begin, plain)

    def _loaded(self, path: Path, offset: int, nbytes: int, plain: bool = False) -> PartSession:
        asked = {"path": str(path), "offset": offset, "nbytes": nbytes, "inside": INSIDE}
        return PartSession({**asked, "profile": plain, "plain": plain}, self.folder)


def _run(loaded: PartSession, inputs: Arrays) -> Arrays:
    return unpack(b"".join(loaded.run(memoryview(pack(inputs)))))[0]


def try_cuts(path: Path, folder: Path, every: int = 1) -> Tried:
    """Cut a graph in 2 at each place, and in 3 there and in the middle of the rest.

    folder: where parts are kept. every: of so many places one is tried. Raises the errors of
    `open_onnx`, and those of ONNX Runtime for the uncut graph.
    """
    file = open_onnx(path)
    atoms = Atoms(file)
    computer = Computer(path, file, atoms, folder)
    sample = sample_of(path, file)
    computer.see_kinds(sample)
    expected = computer.uncut(sample)
    places = feasible_cuts(atoms, computer.kinds)
    tried = Tried(nodes=len(file.nodes), atoms=len(atoms), places=len(places))
    agree = partial(compare, tolerance=tolerance_of(file, computer.kinds))
    first: Arrays = {}
    for number, place in list(enumerate(places))[::every]:
        rest = places[number + 1 :]
        thirds = [(place, rest[len(rest) // 2])] if rest else []
        for cuts in ((place,), *thirds):
            tried.cuts += 1
            try:
                if len(cuts) == 1:
                    first = computer.part(range(place), sample)
                known = {**sample, **first}
                for begin, end in zip(cuts, (*cuts[1:], len(atoms)), strict=True):
                    known |= computer.part(range(begin, end), known)
                agreement = agree({name: known[name] for name in expected}, expected)
            except Exception as error:  # ONNX Runtime raises many
                tried.failures.append(f"at {cuts}: {type(error).__name__}: {error}")
                continue
            tried.exact += agreement.exact
            tried.largest = max(tried.largest, agreement.difference)
            if agreement.problem is not None and not atoms.is_random:
                tried.failures.append(f"at {cuts}: {agreement.problem}")
    return tried


@click.command()
@click.option(
    "--graphs",
    required=True,
    type=click.Path(exists=True, path_type=Path, file_okay=False),
    help="The folder: KIND/NAME.onnx, with inputs in KIND/NAME.npz.",
)
@click.option("--only", default="", help="Take those whose path has this text.")
@click.option("--every", default=1, show_default=True, help="Try one of so many places.")
def graph_corpus(graphs: Path, only: str, every: int) -> None:
    """Cut every graph of a folder in 2 and in 3 at every place, and compare with the uncut one."""
    ort.set_global_thread_pool_sizes(1, 1)
    click.echo(_COLUMNS.format(*_HEAD))
    bad: list[str] = []
    for path in (each for each in sorted(graphs.rglob("*.onnx")) if only in str(each)):
        with tempfile.TemporaryDirectory() as name:
            try:
                tried = try_cuts(path, Path(name), every)
            except Exception as error:  # ONNX Runtime raises many
                click.echo(f"{path.parent.name}/{path.stem}: {error}")
                bad.append(path.stem)
                continue
        figures = (tried.nodes, tried.atoms, tried.places, tried.cuts, tried.exact)
        line = (*figures, f"{tried.largest:.1e}", len(tried.failures))
        click.echo(_COLUMNS.format(path.parent.name, path.stem, *line))
        for failure in tried.failures[:_FAILURES_SHOWN]:
            click.echo(f"    {failure:.300}")
        bad += [path.stem] if tried.failures else []
    if bad:
        raise SystemExit(f"cut otherwise than uncut, or refused: {', '.join(bad)}")
