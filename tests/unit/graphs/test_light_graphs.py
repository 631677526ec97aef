"""Networks that the package `onnx` ships, cut in 2: an old opset, and weights among the inputs.

Their files fill the weights with one number, of which every input gives the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edge.demos.bench.graph_packages import with_random_weights
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.parts import cut_part, feasible_cuts
from tests.support.slow_cases import shown_in_parts
from tests.support.small_graphs import agree, computed, run_part, seen_kinds, written

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
EVERY = 4
IN_PARTS = shown_in_parts("unit/graphs/test_light_graphs.py", "unit/graphs/test_parts.py")
OTHERS = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "vgg19", "zfnet512",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["squeezenet", "shufflenet", *(pytest.param(name, marks=IN_PARTS) for name in OTHERS)],
)
def test_two_parts_give_what_the_network_does(name: str, tmp_path: Path) -> None:
    path = LIGHT / f"light_{name}.onnx"
    if not path.is_file():
        pytest.skip("this release of onnx ships no light networks")
    model = with_random_weights(onnx.load(str(path)))
    file = open_onnx(written(model, tmp_path))
    (given,) = file.inputs
    assert given.shape is not None
    inputs = {given.name: np.random.default_rng(0).random(given.shape, np.float32)}  # type: ignore[arg-type]
    kinds, expected = seen_kinds(model, inputs), computed(model, inputs)
    assert len(np.unique(next(iter(expected.values())))) > 10
    atoms = Atoms(file)
    places = feasible_cuts(atoms, kinds)
    assert places == list(range(1, len(atoms)))
    for place in places[::EVERY]:
        known = dict(inputs)
        for numbers in (range(place), range(place, len(atoms))):
            known |= run_part(cut_part(file, atoms, numbers, kinds), known, tmp_path)
        agree({name: known[name] for name in expected}, expected)
