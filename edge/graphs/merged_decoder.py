"""Two exports of one decoder as one graph: its first step, and the steps with caches.

An exporter writes `decoder_model.onnx` and `decoder_with_past_model.onnx`, each with all weights.
Here they become the branches of an If with weights in common, as in `decoder_model_merged.onnx`:
one process has them once, and the caches stay in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from edge.errors import CheckpointError
from edge.graphs.nodes import subgraphs
from edge.graphs.onnx_file import OnnxFile, WeightPlace

CACHE_SWITCH = "use_cache_branch"
"""The input that says whether caches are there."""


def merged_decoder(first: OnnxFile, later: OnnxFile) -> OnnxFile:
    """One graph of both. Outputs are those of the first step; those that later steps lack are empty
    there. Raises CheckpointError if the two do not belong together."""
    model = ModelProto()
    model.ir_version = max(first.model.ir_version, later.model.ir_version)
    opsets: dict[str, int] = {}
    for file in (first, later):
        for each in file.model.opset_import:
            if opsets.setdefault(each.domain, each.version) != each.version:
                raise CheckpointError(
                    f"{first.path.name} and {later.path.name} use different opsets",
                    remedy="export both at once",
                )
    model.opset_import.extend(helper.make_opsetid(*each) for each in opsets.items())
    graph = model.graph
    graph.name = "decoder"
    given = {each.name: each for each in first.inputs}
    for each in later.inputs:
        if each.name in given and each.dtype != given[each.name].dtype:
            raise CheckpointError(
                f"the input {each.name!r:.80} of {later.path.name} has another type than in "
                f"{first.path.name}",
                remedy="export both at once",
            )
    names = set[str]()
    for value in (*first.model.graph.input, *later.model.graph.input):
        known = value.name in first.initialisers or value.name in later.initialisers
        if value.name not in names and not known:
            names.add(value.name)
            graph.input.append(value)
    graph.input.append(helper.make_tensor_value_info(CACHE_SWITCH, TensorProto.BOOL, [1]))
    graph.output.extend(first.model.graph.output)
    weights = _Weights(graph)
    wanted = list(first.model.graph.output)
    then_branch = _branch(later, wanted, "later", weights)
    else_branch = _branch(first, wanted, "first", weights)
    graph.node.append(
        helper.make_node(
            "If",
            [CACHE_SWITCH],
            [each.name for each in wanted],
            name="decoder",
            then_branch=then_branch,
            else_branch=else_branch,
        )
    )
    return OnnxFile(first.path, model, weights.places)


class _Weights:
    """The weights of both files, each once. Small ones stay apart: they cost nothing."""

    def __init__(self, graph: GraphProto) -> None:
        self.places: dict[str, WeightPlace] = {}
        self._graph = graph
        self._known: dict[tuple[bytes, int, tuple[int, ...]], str] = {}

    def add(self, file: OnnxFile, name: str) -> str:
        """The new name of a weight."""
        tensor = file.initialisers[name]
        new = f"weight {len(self._graph.initializer)}"
        if file.is_apart(name):
            digest = hashlib.sha256(file.read_weight(name).data).digest()
            key = digest, tensor.data_type, tuple(tensor.dims)
            if key in self._known:
                return self._known[key]
            self._known[key] = new
        added = self._graph.initializer.add()
        added.CopyFrom(tensor)
        added.name = new
        if (place := file.place(name)) is not None:
            self.places[new] = place
        return new


def _branch(
    file: OnnxFile, wanted: list[ValueInfoProto], prefix: str, weights: _Weights
) -> GraphProto:
    names = {name: weights.add(file, name) for name in file.initialisers}
    for node in file.nodes:
        names |= {name: f"{prefix} {name}" for name in node.output if name}
    branch = GraphProto()
    branch.name = prefix
    for node in file.nodes:
        added = branch.node.add()
        added.CopyFrom(node)
        _rename(added, names)
    made = {each.name for each in file.model.graph.output}
    for value in wanted:
        output = branch.output.add()
        output.name = names[value.name] if value.name in made else f"{prefix} {value.name}"
        kind = value.type.tensor_type.elem_type
        output.type.tensor_type.elem_type = kind
        if value.name not in made:
            rank = len(value.type.tensor_type.shape.dim)
            empty = helper.make_tensor("empty", kind, [0] * rank, b"", raw=True)
            branch.node.append(helper.make_node("Constant", [], [output.name], value=empty))
    return branch


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for body in subgraphs(node):
        for inner in body.node:
            _rename(inner, names)
        for value in body.output:
            value.name = names.get(value.name, value.name)
