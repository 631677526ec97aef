"""ONNX files from outside: read, or refused by a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge.errors import CheckpointError
from edge.graphs import onnx_checks
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import ONNX_TYPES, OUTSIDE_FROM_BYTES
from edge.graphs.parts import cut_part
from edge.runs.graphs.inputs import checked
from tests.support.small_graphs import (
    KINDS,
    Builder,
    branches,
    cnn,
    control_flow,
    encoder,
    seen_kinds,
    tree,
    written,
)


def test_inputs_outputs_and_weights_are_told(tmp_path: Path) -> None:
    file = open_onnx(written(cnn(), tmp_path))
    assert [(each.name, str(each)) for each in file.inputs] == [("x", "float32 [n, 3, 16, 16]")]
    assert [each.name for each in file.outputs] == ["y"]
    assert file.total_weight_bytes == sum(
        4 * int(np.prod(each.dims)) for each in file.model.graph.initializer
    )


def test_weights_beside_the_file_are_read_where_they_lie(tmp_path: Path) -> None:
    inside = open_onnx(written(cnn(), tmp_path))
    beside = open_onnx(written(cnn(), tmp_path, external=True))
    names = [name for name in beside.initialisers if beside.is_apart(name)]
    assert len(names) == len(beside.initialisers)
    for name in names:
        expected = onnx.numpy_helper.to_array(inside.initialisers[name])
        assert beside.read_weight(name).tobytes() == expected.tobytes()


def test_large_constants_of_nodes_are_weights_of_the_parts_that_use_them(tmp_path: Path) -> None:
    model = cnn()
    expected = open_onnx(written(model, tmp_path))
    graph, small = model.graph, 0
    nodes = list(graph.node)
    del graph.node[:]
    for weight in graph.initializer:
        small += expected.weight_bytes(weight.name) < OUTSIDE_FROM_BYTES
        graph.node.append(helper.make_node("Constant", [], [weight.name], value=weight))
    del graph.initializer[:]
    graph.node.extend(nodes)
    file = open_onnx(written(model, tmp_path))
    large = {name for name in expected.initialisers if expected.is_apart(name)}
    assert file.initialisers.keys() == large
    assert [each.op_type for each in file.nodes].count("Constant") == small > 0
    atoms = Atoms(file)
    parts = [cut_part(file, atoms, each, {}) for each in (range(1), range(1, len(atoms)))]
    sent = [{each.name for each in part.manifest.tensors} & large for part in parts]
    assert sent[0] | sent[1] == large
    assert not sent[0] & sent[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no graph"),
        (b"GGUF\3\0\0\0" + bytes(100), "not an ONNX file"),
        (b"\x08\x08", "no graph"),
        (b"PK\3\4" + bytes(100), "not an ONNX file"),
        (b"\x08\x08\x3a\x02\xff\xff", "damaged"),
        (b"\x08\x08\x3a\x02\x0a\x01", "byte 4 begins no field of a graph"),
        (b"\x08\x08" * 10_001, "more than 10,000 outermost fields"),
        (b"\x3a\xd2\x86\x03" + b"\x0a\0" * 25_001, "more than 25,000 nodes"),
        (b"\x3a\xd2\x86\x03" + b"\x2a\0" * 25_001, "more than 25,000 weights"),
        (b"\x3a\0\xca\x01\0", "functions of its own"),
    ],
)
def test_other_files_are_refused(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before protobuf makes objects of their fields."""
    monkeypatch.setattr(onnx_checks, "MOST_NODES", 25_000)
    monkeypatch.setattr(onnx_checks, "_MOST_OTHER_FIELDS", 25_000)
    if b"\xff" not in content:
        monkeypatch.delattr(onnx_checks, "ModelProto")
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        open_onnx(path)


def test_a_truncated_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = written(cnn(), tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        open_onnx(path)


@pytest.mark.parametrize("path", ["missing.onnx", "."])
def test_what_is_no_file_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read|not a file"):
        open_onnx(tmp_path / path)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("../model.data", "not in its own folder"),
        ("/etc/passwd", "not in its own folder"),
        ("sub/../../model.data", "not in its own folder"),
        ("link.data", "not in its own folder"),
        ("loop.data", "a loop of links|missing"),
        ("", "not in its own folder"),
        ("other.data", "missing"),
        ("short.data", "needs"),
    ],
)
def test_external_data_must_be_in_the_folder(location: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.data").write_bytes(bytes(100_000))
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "link.data").symlink_to(tmp_path / "model.data")
    (folder / "loop.data").symlink_to(folder / "loop.data")
    (folder / "short.data").write_bytes(b"short")
    path = written(cnn(), folder, external=True)
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for each in tensor.external_data:
            if each.key == "location":
                each.value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=said):
        open_onnx(path)


@pytest.mark.parametrize("value", ["-1", "1e3", "99999999999"])
def test_places_of_external_data_are_checked(value: str, tmp_path: Path) -> None:
    path = written(cnn(), tmp_path, external=True)
    model = onnx.load(str(path), load_external_data=False)
    for each in model.graph.initializer[0].external_data:
        if each.key == "offset":
            each.value = value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=r"no number|needs"):
        open_onnx(path)


@pytest.mark.parametrize("version", [6, 999])
def test_other_opsets_are_refused(version: int, tmp_path: Path) -> None:
    model = branches()
    model.opset_import[0].version = version
    with pytest.raises(CheckpointError, match=f"opset {version}"):
        open_onnx(written(model, tmp_path))


def test_custom_domains_are_refused(tmp_path: Path) -> None:
    model = branches()
    model.graph.node[0].domain = "my.operators"
    with pytest.raises(CheckpointError, match=r"'MatMul' of the domain 'my\.operators'"):
        open_onnx(written(model, tmp_path))


def test_a_shape_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    model = branches()
    model.graph.initializer[0].dims[:] = [1 << 40, 1 << 40]
    with pytest.raises(CheckpointError, match=r"impossible shape|bytes of weights"):
        open_onnx(written(model, tmp_path))


@pytest.mark.parametrize("count", [0, 7, 9])
def test_values_one_by_one_must_be_as_many_as_the_shape_says(count: int, tmp_path: Path) -> None:
    model = branches()
    values = helper.make_tensor("values", TensorProto.FLOAT, [2, 4], [1.0] * 8)
    values.float_data[:] = [1.0] * count
    model.graph.initializer.append(values)
    with pytest.raises(CheckpointError, match=f"'values' has {count} values, and its shape 8"):
        open_onnx(written(model, tmp_path))


def test_negative_sizes_are_free(tmp_path: Path) -> None:
    model = cnn()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    file = open_onnx(written(model, tmp_path))
    assert str(file.inputs[0]) == "float32 [?, 3, 16, 16]"


@pytest.mark.parametrize("name", ["?", "-1", "None"])
def test_free_sizes_of_one_placeholder_may_differ(name: str, tmp_path: Path) -> None:
    model = cnn()
    for place in (0, 2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[place].dim_param = name
    file = open_onnx(written(model, tmp_path))
    assert str(file.inputs[0]) == "float32 [?, 3, ?, ?]"
    checked(file.inputs, {"x": np.zeros((1, 3, 16, 24), np.float32)})


def test_nodes_in_another_order_are_put_behind_what_they_use(tmp_path: Path) -> None:
    model = control_flow()
    body = next(each.g for each in model.graph.node[-2].attribute if each.name == "body")
    for graph in (model.graph, body):
        nodes = list(graph.node)
        graph.ClearField("node")
        graph.node.extend(reversed(nodes))
    file = open_onnx(written(model, tmp_path))
    assert [node.name for node in file.nodes] == [node.name for node in control_flow().graph.node]


def test_nodes_must_not_use_what_none_before_them_can_compute(tmp_path: Path) -> None:
    model = branches()
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]
    with pytest.raises(CheckpointError, match="before it is computed"):
        open_onnx(written(model, tmp_path))


def test_inputs_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    model = tree()
    model.graph.output.append(
        helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None)
    )
    model.graph.node.append(helper.make_node("SequenceConstruct", ["doubled"], ["list"]))
    with pytest.raises(CheckpointError, match="not a tensor of a type that Edge moves"):
        open_onnx(written(model, tmp_path))


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    """Any bytes give no other error."""
    random = np.random.default_rng(0)
    path = tmp_path / "mutated.onnx"
    refused = 0
    for name, (make, _inputs) in KINDS.items():
        content = make().SerializeToString()
        for _ in range(40):
            mutated = bytearray(content)
            for place in random.integers(0, len(mutated), random.integers(1, 6)):
                mutated[place] = random.integers(0, 256)
            if random.random() < 0.2:
                del mutated[random.integers(0, len(mutated)) :]
            path.write_bytes(mutated)
            try:
                assert len(Atoms(open_onnx(path))) >= 1, name
            except CheckpointError:
                refused += 1
    assert refused > 30


def test_bodies_within_bodies_see_what_is_around_them(tmp_path: Path) -> None:
    model = control_flow()
    body = model.graph.node[3].attribute[0].g
    deep = helper.make_node("If", ["t2"], ["deep"])
    inner = helper.make_graph(
        [helper.make_node("Identity", ["t0"], ["inner"])],
        "inner",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    for name in ("then_branch", "else_branch"):
        deep.attribute.append(helper.make_attribute(name, inner))
    body.node.insert(0, deep)
    assert open_onnx(written(model, tmp_path))
    deep.attribute[0].g.node[0].input[0] = "nowhere"
    body.node[0].CopyFrom(deep)
    with pytest.raises(CheckpointError, match="'nowhere' before it is computed"):
        open_onnx(written(model, tmp_path))


def test_sizes_are_known_where_they_follow_and_names_where_they_are_told(tmp_path: Path) -> None:
    b = Builder()
    x = b.add("MatMul", "x", b.weight(8, 6))
    x = b.add("NonZero", x)
    b.add("Add", b.add("Cast", x, to=TensorProto.FLOAT), b.constant(np.float32(1)), out="y")
    model = b.model({"x": (TensorProto.FLOAT, ["n", 8])}, {"y": TensorProto.FLOAT})
    for name, dtype, sizes in (
        ("t0", TensorProto.FLOAT, [5, 9]), ("t1", TensorProto.INT64, [2, "found"])
    ):  # fmt: skip
        model.graph.value_info.append(helper.make_tensor_value_info(name, dtype, sizes))
    known = open_onnx(written(model, tmp_path)).known_values
    found = {
        name: [dim.dim_value or dim.dim_param for dim in known[name].type.tensor_type.shape.dim]
        for name in ("x", "t0", "t1", "t2")
    }
    assert found == {"x": ["n", 8], "t0": ["n", 6], "t1": [2, "found"], "t2": [2, ""]}


def test_sizes_of_a_run_follow_from_those_that_it_has_shown(tmp_path: Path) -> None:
    file = open_onnx(written(encoder(), tmp_path))
    kinds = seen_kinds(encoder(), KINDS["encoder"][1](0))
    shown = {n: (ONNX_TYPES[kind.dtype], kind.shape) for n, kind in kinds.items()}
    hidden = [node.output[0] for node in file.nodes if node.op_type in ("Softmax", "Sigmoid")]
    assert len(hidden) == 4
    expected = {name: shown.pop(name) for name in hidden}
    ids = (TensorProto.INT64, (2, 5))
    found = file.inferred_sizes({**shown, "ids": ids})
    assert {name: found[name] for name in hidden} == expected
