"""A graph cut at every place computes what the uncut graph does."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, helper

from edge.errors import PlanError
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.parts import crossing, cut_part, feasible_cuts
from tests.support.small_graphs import (
    FLOAT,
    KINDS,
    Arrays,
    Builder,
    agree,
    branches,
    cnn,
    computed,
    control_flow,
    encoder,
    quantised,
    run_part,
    seen_kinds,
    written,
)


def check_cuts(name: str, folder: Path, parts: int, *, every: int = 1) -> None:
    make, inputs_of = KINDS[name]
    model, inputs = make(), inputs_of(1)
    file = open_onnx(written(model, folder))
    atoms = Atoms(file)
    kinds = seen_kinds(model, inputs)
    expected = computed(model, inputs)
    places = feasible_cuts(atoms, kinds)
    assert places
    for cuts in list(combinations(places, parts - 1))[::every]:
        known = dict(inputs)
        for first, last in zip((0, *cuts), (*cuts, len(atoms)), strict=True):
            part = cut_part(file, atoms, range(first, last), kinds)
            known |= run_part(part, known, folder)
        agree(known, expected, rtol=2e-3 if name == "half" else 1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_two_parts_are_as_good_as_one(name: str, tmp_path: Path) -> None:
    check_cuts(name, tmp_path, 2, every=5 if name == "encoder" else 1)


@pytest.mark.parametrize("name", ["branches", "control flow", "half"])
def test_three_parts_are_as_good_as_one(name: str, tmp_path: Path) -> None:
    check_cuts(name, tmp_path, 3, every=4)


def check_every_cut(model: ModelProto, sample: Arrays, inputs: Arrays, folder: Path) -> None:
    """Cut in 2 for a sample, and computed for other inputs."""
    kinds = seen_kinds(model, sample)
    file = open_onnx(written(model, folder))
    atoms = Atoms(file)
    places = feasible_cuts(atoms, kinds)
    assert len(places) == len(atoms) - 1
    for place in places:
        known = dict(inputs)
        for numbers in (range(place), range(place, len(atoms))):
            known |= run_part(cut_part(file, atoms, numbers, kinds), known, folder)
        agree({each.name: known[each.name] for each in file.outputs}, computed(model, inputs))


@pytest.mark.parametrize("batch", ["n", 6])
def test_sizes_of_an_old_export_do_not_bind_the_parts(batch: str | int, tmp_path: Path) -> None:
    model, inputs = cnn(), KINDS["cnn"][1](0)
    many = {"x": np.concatenate([inputs["x"]] * 3)}
    kinds = seen_kinds(model, inputs)
    for name in ("t0", "t4", "t9"):
        sizes = [1, *kinds[name].shape[1:]]
        model.graph.value_info.append(helper.make_tensor_value_info(name, FLOAT, sizes))
    size = model.graph.input[0].type.tensor_type.shape.dim[0]
    if isinstance(batch, int):
        size.dim_value = batch
    check_every_cut(model, inputs if batch == "n" else many, many, tmp_path)


def test_shapes_of_another_part_have_the_length_that_follows(tmp_path: Path) -> None:
    """A Reshape to them gives a tensor of a known rank, whose own shape has a known length."""
    b = Builder()
    x = b.add("Cos", "x")
    shape = b.add("Shape", x)
    flat = b.add("Reshape", b.add("Sin", x), b.constant(np.array([-1], np.int64)))
    back = b.add("Reshape", b.add("Cos", flat), shape)
    zero, two, four = (b.constant(np.array([n], np.int64)) for n in (0, 2, 4))
    first = b.add("Slice", b.add("Shape", back), zero, two)
    last = b.add("Mul", b.add("Slice", shape, two, four), two)
    sizes = b.add("Concat", first, last, axis=0)
    b.add("Resize", back, "", "", sizes, out="y")
    model = b.model({"x": (FLOAT, ["n", 2, "h", "w"])}, {"y": FLOAT})
    small, large = ({"x": np.ones((1, 2, n, n), np.float32)} for n in (3, 5))
    check_every_cut(model, small, large, tmp_path)


def test_a_graph_of_an_old_opset_is_cut(tmp_path: Path) -> None:
    """With weights among its inputs, and a Clip whose limits are attributes."""
    b = Builder()
    x = b.add("MatMul", "x", b.weight(8, 64))
    x = b.add("Clip", x, min=-0.5, max=0.5)
    b.add("MatMul", x, b.weight(64, 4), out="y")
    model = b.model({"x": (FLOAT, ["n", 8])}, {"y": FLOAT})
    model.ir_version, model.opset_import[0].version = 3, 7
    for weight in model.graph.initializer:
        model.graph.input.append(
            helper.make_tensor_value_info(weight.name, FLOAT, list(weight.dims))
        )
    inputs = {"x": np.random.default_rng(0).normal(0, 1, (3, 8)).astype(np.float32)}
    assert [each.name for each in open_onnx(written(model, tmp_path)).inputs] == ["x"]
    check_every_cut(model, inputs, inputs, tmp_path)


def test_random_nodes_are_found_in_bodies(tmp_path: Path) -> None:
    model = control_flow()
    assert not Atoms(open_onnx(written(model, tmp_path))).is_random
    body = model.graph.node[3].attribute[0].g
    body.node.append(helper.make_node("RandomNormal", [], ["noise"], shape=[1]))
    assert Atoms(open_onnx(written(model, tmp_path))).is_random


def test_a_part_has_only_its_own_weights(tmp_path: Path) -> None:
    file = open_onnx(written(cnn(width=32), tmp_path))
    atoms = Atoms(file)
    kinds = seen_kinds(cnn(width=32), KINDS["cnn"][1](0))
    parts = [cut_part(file, atoms, each, kinds) for each in (range(3), range(3, len(atoms)))]
    assert sum(part.weight_bytes for part in parts) == file.total_weight_bytes
    assert all(part.manifest.total_bytes > part.weight_bytes for part in parts)


def test_external_weights_come_out_of_their_file(tmp_path: Path) -> None:
    inputs = KINDS["cnn"][1](2)
    file = open_onnx(written(cnn(), tmp_path, external=True))
    atoms = Atoms(file)
    part = cut_part(file, atoms, range(len(atoms)), {})
    agree(run_part(part, inputs, tmp_path), computed(cnn(), inputs))


def kinds_of_nodes(atoms: Atoms, number: int, model: object) -> list[str]:
    return [model.graph.node[index].op_type for index in atoms[number].nodes]  # type: ignore[attr-defined]


def test_shape_arithmetic_stays_together(tmp_path: Path) -> None:
    file = open_onnx(written(encoder(), tmp_path))
    assert kinds_of_nodes(Atoms(file), 1, file.model) == ["Shape", "Concat", "Concat"]


def test_quantised_values_cross_and_not_their_floats(tmp_path: Path) -> None:
    file = open_onnx(written(quantised(), tmp_path))
    atoms, kinds = Atoms(file), seen_kinds(quantised(), KINDS["quantised"][1](0))
    for place in feasible_cuts(atoms, kinds):
        assert [kinds[name].dtype for name in crossing(atoms, place)] == ["uint8"]
        part = cut_part(file, atoms, range(place, len(atoms)), kinds)
        assert [kinds[name].dtype for name in part.inputs] == ["uint8"]


def test_control_flow_takes_what_its_bodies_use(tmp_path: Path) -> None:
    file = open_onnx(written(control_flow(), tmp_path))
    atoms = Atoms(file)
    number = next(n for n in range(len(atoms)) if "If" in kinds_of_nodes(atoms, n, file.model))
    assert "t0" in atoms[number].inputs
    assert "w2" in atoms[number].weights


def test_atoms_are_in_topological_order(tmp_path: Path) -> None:
    for make, _inputs in KINDS.values():
        file = open_onnx(written(make(), tmp_path))
        known = {each.name for each in file.inputs}
        for atom in Atoms(file):
            assert known.issuperset(atom.inputs)
            known.update(atom.outputs)


def test_a_tensor_of_an_unknown_type_cannot_cross(tmp_path: Path) -> None:
    model = branches()
    for node in model.graph.node[:3]:  # of which ONNX knows nothing
        node.op_type, node.domain = "FusedMatMul", "com.microsoft"
    file = open_onnx(written(model, tmp_path))
    atoms = Atoms(file)
    assert feasible_cuts(atoms, {}) == []
    with pytest.raises(PlanError, match="cannot travel"):
        cut_part(file, atoms, range(3, len(atoms)), {})
