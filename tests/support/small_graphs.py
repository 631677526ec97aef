"""Small ONNX graphs of several kinds, with random weights, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge.backends.onnx.runtime import ort
from edge.graphs.parts import GRAPH_NAME, WEIGHTS_FILE, GraphPart, TensorKind
from edge.graphs.tensors import dtype_name

Arrays = Mapping[str, NDArray[Any]]
OPSET = 17


class Builder:
    """Nodes and weights of a graph under construction."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def add(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        """Append a node with one output; the name of the output."""
        name = out or f"t{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, inputs, [name], name=f"{kind} {len(self.nodes)}", **attributes)
        )
        return name

    def weight(self, *shape: int, scale: float = 0.2) -> str:
        return self.constant(self._random.normal(0, scale, shape).astype(np.float32))

    def constant(self, value: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def model(
        self, inputs: Mapping[str, tuple[int, Sequence[Any]]], outputs: Mapping[str, int]
    ) -> ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "small",
            [helper.make_tensor_value_info(n, t, shape) for n, (t, shape) in inputs.items()],
            [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()],
            self.weights,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", 3)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def cnn(width: int = 8, size: int = 16, depth: int = 3) -> ModelProto:
    """Convolutions with biases, one residual each, and a classifier."""
    b = Builder()
    x = b.add("Conv", "x", b.weight(width, 3, 3, 3), b.weight(width), pads=[1, 1, 1, 1])
    for _ in range(depth):
        y = b.add("Conv", x, b.weight(width, width, 3, 3), b.weight(width), pads=[1, 1, 1, 1])
        y = b.add("Relu", y)
        x = b.add("Add", x, y)
    x = b.add("GlobalAveragePool", x)
    x = b.add("Flatten", x)
    b.add("Gemm", x, b.weight(width, 4), b.weight(4), out="y")
    return b.model({"x": (FLOAT, ["n", 3, size, size])}, {"y": FLOAT})


def pixels(*, is_global: bool = False) -> ModelProto:
    """Pictures whose sides are multiples of 4: halved twice and doubled again, and the features at
    a quarter of the size.

    is_global: each pixel depends on all.
    """
    b = Builder(5)
    around = [1, 1, 1, 1]
    x = b.add("Relu", b.add("Conv", "x", b.weight(4, 3, 3, 3), pads=around))
    down = b.add("Conv", x, b.weight(8, 4, 3, 3), strides=[2, 2], pads=around)
    down = b.add("MaxPool", down, kernel_shape=[2, 2], strides=[2, 2])
    if is_global:
        down = b.add("Sub", down, b.add("GlobalAveragePool", down))
    b.add("Identity", down, out="features")
    up = b.add("ConvTranspose", down, b.weight(8, 4, 4, 4), strides=[4, 4])
    b.add("Mul", b.add("Add", x, up), b.weight(4, 1, 1), out="y")
    return b.model({"x": (FLOAT, [1, 3, "h", "w"])}, {"y": FLOAT, "features": FLOAT})


def encoder(width: int = 16, heads: int = 2, layers: int = 2) -> ModelProto:
    """A transformer encoder over token ids, with shapes computed by nodes."""
    b = Builder(1)
    x = b.add("Gather", b.weight(50, width), "ids")
    shape = b.add("Shape", "ids")
    split = b.add("Concat", shape, b.constant(np.array([heads, width // heads], np.int64)), axis=0)
    joined = b.add("Concat", shape, b.constant(np.array([width], np.int64)), axis=0)
    for _ in range(layers):
        n = b.add("LayerNormalization", x, b.weight(width), b.weight(width))
        q, k, v = (
            b.add(
                "Transpose",
                b.add("Reshape", b.add("MatMul", n, b.weight(width, width)), split),
                perm=[0, 2, 3, 1] if which == 1 else [0, 2, 1, 3],
            )
            for which in range(3)
        )
        scores = b.add("Mul", b.add("MatMul", q, k), b.constant(np.float32(0.35)))
        mixed = b.add("MatMul", b.add("Softmax", scores, axis=-1), v)
        mixed = b.add("Reshape", b.add("Transpose", mixed, perm=[0, 2, 1, 3]), joined)
        x = b.add("Add", x, b.add("MatMul", mixed, b.weight(width, width)))
        n = b.add("LayerNormalization", x, b.weight(width), b.weight(width))
        f = b.add("MatMul", n, b.weight(width, 2 * width))
        f = b.add("Mul", f, b.add("Sigmoid", f))
        x = b.add("Add", x, b.add("MatMul", f, b.weight(2 * width, width)))
    b.add("Identity", x, out="y")
    return b.model({"ids": (INT64, ["n", "t"])}, {"y": FLOAT})


def branches(width: int = 8) -> ModelProto:
    """A stem, two branches of unlike length, and two results."""
    b = Builder(2)
    stem = b.add("Tanh", b.add("MatMul", "x", b.weight(width, width)))
    left = right = stem
    for _ in range(3):
        left = b.add("Tanh", b.add("MatMul", left, b.weight(width, width)))
    for _ in range(2):
        right = b.add("Sin", b.add("MatMul", right, b.weight(width, width)))
    b.add("Concat", left, right, axis=1, out="both")
    b.add("ArgMax", right, axis=1, out="best")
    return b.model({"x": (FLOAT, ["n", width])}, {"both": FLOAT, "best": INT64})


def rnn(width: int = 8) -> ModelProto:
    """A GRU and an LSTM whose optional outputs are left out."""
    b = Builder(3)
    g = b.add("GRU", "x", b.weight(1, 3 * width, width), b.weight(1, 3 * width, width),
              hidden_size=width)  # fmt: skip
    g = b.add("Squeeze", g, b.constant(np.array([1], np.int64)))
    name = f"t{len(b.nodes)}"
    weights = b.weight(1, 4 * width, width), b.weight(1, 4 * width, width)
    b.nodes.append(helper.make_node("LSTM", [g, *weights], ["", name, ""], hidden_size=width))
    b.add("Squeeze", name, b.constant(np.array([0], np.int64)), out="y")
    return b.model({"x": (FLOAT, ["t", "n", width])}, {"y": FLOAT})


def quantised(width: int = 16, layers: int = 3) -> ModelProto:
    """Products between DequantizeLinear and QuantizeLinear, in 8 bits."""
    b = Builder(4)
    random = np.random.default_rng(4)
    scale, zero = b.constant(np.float32(0.05)), b.constant(np.uint8(128))
    w_scale, w_zero = b.constant(np.float32(0.02)), b.constant(np.int8(0))
    x = b.add("QuantizeLinear", "x", scale, zero)
    for _ in range(layers):
        weight = b.constant(random.integers(-100, 100, (width, width)).astype(np.int8))
        w = b.add("DequantizeLinear", weight, w_scale, w_zero)
        y = b.add("MatMul", b.add("DequantizeLinear", x, scale, zero), w)
        x = b.add("QuantizeLinear", y, scale, zero)
    b.add("DequantizeLinear", x, scale, zero, out="y")
    return b.model({"x": (FLOAT, ["n", width])}, {"y": FLOAT})


def control_flow() -> ModelProto:
    """An If whose bodies use tensors and weights from outside, behind it a Loop."""
    b = Builder(5)
    x = b.add("MatMul", "x", b.weight(4, 4))
    big = b.add("Greater", b.add("ReduceSum", x, keepdims=0), b.constant(np.float32(0)))
    w = b.weight(4)

    def body(kind: str, name: str) -> onnx.GraphProto:
        node = helper.make_node(kind, [x, w], [name])
        return helper.make_graph(
            [node], kind, [], [helper.make_tensor_value_info(name, FLOAT, None)]
        )

    x = b.add("If", big, then_branch=body("Add", "more"), else_branch=body("Mul", "less"))
    inside = helper.make_graph(
        [
            helper.make_node("Add", ["state", w], ["next"]),
            helper.make_node("Identity", ["going"], ["goes on"]),
        ],
        "loop",
        [
            helper.make_tensor_value_info("number", INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("goes on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, None),
        ],
    )
    x = b.add("Loop", "count", "", x, body=inside)
    b.add("MatMul", x, b.weight(4, 4), out="y")
    return b.model({"x": (FLOAT, [1, 4]), "count": (INT64, [])}, {"y": FLOAT})


def tree() -> ModelProto:
    """A scaler, a decision tree with labels as strings, and a count of letters of nothing else."""
    b = Builder(6)
    x = b.add("Scaler", "x", domain="ai.onnx.ml", offset=[0.0, 0.1], scale=[1.0, 2.0])
    b.nodes.append(
        helper.make_node(
            "TreeEnsembleClassifier", [x], ["label", "scores"], domain="ai.onnx.ml",
            nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[0, 0, 0],
            nodes_values=[0.5, 0.0, 0.0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
            nodes_missing_value_tracks_true=[0, 0, 0], nodes_hitrates=[1.0, 1.0, 1.0],
            class_treeids=[0, 0], class_nodeids=[1, 2], class_ids=[0, 1],
            class_weights=[1.0, 1.0], classlabels_strings=["low", "high"], post_transform="NONE",
        )
    )  # fmt: skip
    b.add("Mul", "scores", b.constant(np.float32(2)), out="doubled")
    b.add("Identity", "label", out="name")
    return b.model({"x": (FLOAT, ["n", 2])}, {"name": TensorProto.STRING, "doubled": FLOAT})


def half(width: int = 8) -> ModelProto:
    """Float16, a mask of bools and strings that pass through."""
    b = Builder(7)
    x = b.add("Cast", "x", to=TensorProto.FLOAT16)
    w = b.constant(np.random.default_rng(7).normal(0, 0.3, (width, width)).astype(np.float16))
    x = b.add("MatMul", x, w)
    keep = b.add("And", b.add("Greater", x, b.constant(np.float16(0))), "mask")
    x = b.add("Where", keep, x, b.constant(np.float16(-1)))
    b.add("Cast", x, to=FLOAT, out="y")
    b.add("Identity", "words", out="said")
    return b.model(
        {
            "x": (FLOAT, ["n", width]),
            "mask": (TensorProto.BOOL, ["n", width]),
            "words": (TensorProto.STRING, ["k"]),
        },
        {"y": FLOAT, "said": TensorProto.STRING},
    )


def stateful(width: int = 8, layers: int = 2) -> ModelProto:
    """Recurrent layers, each with a state, and a row of the first one's result by an input."""
    b = Builder(9)
    x, kinds = "x", {"x": (FLOAT, ["n", width]), "row": (INT64, [])}
    for layer in range(layers):
        old, new = f"state_{layer}", f"new_state_{layer}"
        x = b.add("MatMul", x, b.weight(width, width, scale=0.5))
        x = b.add("Add", x, b.add("MatMul", old, b.weight(width, width, scale=0.5)))
        x = b.add("Tanh", x, out=new)
        kinds[old] = (FLOAT, ["n", width])
        x = b.add("Tanh", b.add("MatMul", x, b.weight(width, width)))
    picked = b.add("Gather", b.weight(3, width), "row")
    b.add("Add", b.add("MatMul", x, b.weight(width, width)), picked, out="y")
    return b.model(kinds, {"y": FLOAT, **{f"new_state_{n}": FLOAT for n in range(layers)}})


def early(width: int = 8, depth: int = 3) -> ModelProto:
    """A trunk, and a confidence behind its first layer that is last in the file."""
    b = Builder(10)
    first = x = b.add("Tanh", b.add("MatMul", "x", b.weight(width, width, scale=1.0)))
    for _ in range(depth):
        x = b.add("Tanh", b.add("MatMul", x, b.weight(width, width)))
    b.add("MatMul", x, b.weight(width, 4), out="logits")
    b.add("MatMul", first, b.weight(width, 4, scale=1.0), out="early_logits")
    b.add("ReduceMax", b.add("Softmax", "early_logits", axis=-1), axes=[-1], keepdims=0,
          out="confidence")  # fmt: skip
    return b.model(
        {"x": (FLOAT, ["n", width])},
        {"logits": FLOAT, "early_logits": FLOAT, "confidence": FLOAT},
    )


def _floats(*shape: int) -> Callable[[int], NDArray[np.float32]]:
    return lambda seed: np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def _inputs(**makers: Any) -> Callable[[int], Arrays]:
    return lambda seed: {
        name: make(seed) if callable(make) else make for name, make in makers.items()
    }


KINDS: Mapping[str, tuple[Callable[[], ModelProto], Callable[[int], Arrays]]] = {
    "cnn": (cnn, _inputs(x=_floats(2, 3, 16, 16))),
    "encoder": (
        encoder,
        _inputs(ids=lambda seed: np.random.default_rng(seed).integers(0, 50, (2, 5))),
    ),
    "branches": (branches, _inputs(x=_floats(3, 8))),
    "rnn": (rnn, _inputs(x=_floats(4, 2, 8))),
    "quantised": (quantised, _inputs(x=_floats(3, 16))),
    "control flow": (control_flow, _inputs(x=_floats(1, 4), count=np.array(3, np.int64))),
    "tree": (tree, _inputs(x=_floats(5, 2))),
    "half": (
        half,
        _inputs(
            x=_floats(2, 8),
            mask=lambda seed: np.random.default_rng(seed).random((2, 8)) > 0.5,
            words=np.array(["ä", "", "two words"], object),
        ),
    ),
}
"""By name: what makes the graph, and inputs for a seed."""


def written(model: ModelProto, folder: Path, *, external: bool = False) -> Path:
    """The graph's file; external: with weights in a file beside it."""
    path = folder / "model.onnx"
    if external:
        onnx.save_model(
            model, str(path), save_as_external_data=True, location="model.data", size_threshold=0
        )
    else:
        path.write_bytes(model.SerializeToString())
    return path


def computed(model: ModelProto, inputs: Arrays) -> Arrays:
    """What ONNX Runtime gives for the whole graph."""
    session = _session(model.SerializeToString())
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(inputs)), strict=True))


def seen_kinds(model: ModelProto, inputs: Arrays) -> dict[str, TensorKind]:
    """The kinds of all tensors of a run."""
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    given = {each.name for each in model.graph.output}
    for node in model.graph.node:
        opened.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in node.output if name and name not in given
        )
    return {name: kind_of(array) for name, array in computed(opened, inputs).items()}


def kind_of(array: NDArray[Any]) -> TensorKind:
    return TensorKind(dtype=dtype_name(array), shape=array.shape, nbytes=array.nbytes)


def run_part(part: GraphPart, inputs: Arrays, folder: Path) -> Arrays:
    """What a part gives, from the file in which a peer keeps it."""
    path = folder / WEIGHTS_FILE
    contents = {name: array for _names, read in part.groups for name, array in read().items()}
    with path.open("wb") as file:
        for entry in part.manifest.tensors:
            file.seek(entry.offset)
            file.write(contents[entry.name].tobytes())
    options = ort.SessionOptions()
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    session = _session(contents[GRAPH_NAME].tobytes(), options)
    names = [each.name for each in session.get_outputs()]
    wanted = {name: inputs[name] for name in part.inputs}
    return dict(zip(names, session.run(None, wanted), strict=True))


def _session(model: bytes, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    options = options or ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def agree(found: Arrays, expected: Arrays, rtol: float = 1e-5) -> None:
    """Equal names and types; integers and strings equal, floats within rounding."""
    assert found.keys() >= expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        if array.dtype.kind == "f":
            np.testing.assert_allclose(found[name], array, rtol=rtol, atol=rtol / 10)
        else:
            np.testing.assert_array_equal(found[name], array)
