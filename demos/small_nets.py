"""Small networks for demos: random features, a last layer that is trained here, an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx
from edge.partition import GraphPlan, GraphStage

Floats = NDArray[np.float32]
Array = NDArray[Any]


class Net:
    """Nodes and weights of a graph under construction."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[TensorProto] = []

    def add(self, kind: str, *inputs: str | Array, out: str | None = None, **more: Any) -> str:
        """Append a node; arrays among its inputs become weights. The name of its output."""
        names = [each if isinstance(each, str) else self._weight(each) for each in inputs]
        name = out or f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, names, [name], name=name, **more))
        return name

    def _weight(self, array: Array) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def write(
        self, path: Path, inputs: Mapping[str, Sequence[int | str]], outputs: Sequence[str]
    ) -> Path:
        """The file of the graph, whose inputs and outputs are float32."""
        value, kind = helper.make_tensor_value_info, TensorProto.FLOAT
        graph = helper.make_graph(
            self._nodes,
            path.stem,
            [value(name, kind, shape) for name, shape in inputs.items()],
            [value(name, kind, None) for name in outputs],
            self._weights,
        )
        opsets = [helper.make_opsetid("", 17)]
        model = helper.make_model(graph, ir_version=8, opset_imports=opsets)
        path.write_bytes(model.SerializeToString())
        return path


def trained(features: Floats, wanted: Floats) -> Floats:
    """The last layer [features + 1, outputs] of least squares, ridge 0.01. The last row is added to
    all. features: [examples, features]; wanted: [examples, outputs]."""
    given = with_one(features).astype(np.float64)
    square = given.T @ given + 1e-2 * np.eye(given.shape[1])
    found: Floats = np.linalg.solve(square, given.T @ wanted).astype(np.float32)
    return found


def with_one(features: Floats) -> Floats:
    """The features and a 1: [examples, features + 1]."""
    found: Floats = np.concatenate([features, np.ones((len(features), 1), np.float32)], axis=1)
    return found


def placed(path: Path, stages: Sequence[tuple[str, str | None]]) -> GraphPlan:
    """A plan by hand. stages: a device, and the output behind which its stage ends; None: at the
    end of the graph."""
    atoms = Atoms(open_onnx(path))
    makers = {name: number for number, atom in enumerate(atoms) for name in atom.outputs}
    ends = [0, *(len(atoms) if name is None else makers[name] + 1 for _device, name in stages)]
    return GraphPlan(
        stages=tuple(
            GraphStage(device=device, atoms=range(*ends[number : number + 2]))
            for number, (device, _name) in enumerate(stages)
        )
    )
