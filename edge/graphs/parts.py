"""Parts: some atoms of a graph as an ONNX model of their own, with only their weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper

from edge.errors import PlanError
from edge.graphs.atoms import Atoms
from edge.graphs.nodes import subgraphs
from edge.graphs.onnx_file import OLDEST_OPSET, ONNX_TYPES, OnnxFile
from edge.offload import Manifest, ManifestBuilder

GRAPH_NAME = "graph"
"""The name of a part's graph in its manifest."""

WEIGHTS_FILE = "weights"
"""The file in which a peer keeps a part."""

INSIDE = "inside"
"""How the names of nodes in the bodies of control flow begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKind:
    """What a run has shown of a tensor between nodes."""

    dtype: str
    """A numpy name, "string", or another word for a type that cannot travel."""
    shape: tuple[int, ...]
    nbytes: int

    @property
    def travels(self) -> bool:
        return self.dtype in ONNX_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPart:
    """A part of a graph, and what crosses its border."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    manifest: Manifest
    """Its weights, and behind them its graph, in one file."""
    groups: Sequence[tuple[tuple[str, ...], Callable[[], dict[str, NDArray[Any]]]]]
    """Names in the manifest, and functions that read them."""
    node_names: Mapping[str, str]
    """By the name of a node in the part: how the file names it."""
    weight_bytes: int


def cut_part(
    file: OnnxFile,
    atoms: Atoms,
    numbers: Collection[int],
    kinds: Mapping[str, TensorKind],
) -> GraphPart:
    """The part of these atoms, which gives all that other atoms or the caller use.

    kinds: of the tensors that come from other parts. Reads every weight of the part once, to hash
    it. Raises PlanError if a tensor that comes in cannot travel, CheckpointError if a file has
    changed.
    """
    chosen = sorted(set(numbers))
    nodes = sorted(index for number in chosen for index in atoms[number].nodes)
    nodes = sorted((*nodes, *atoms.copies_for(nodes)))
    inside = {name for index in nodes for name in file.nodes[index].output}
    inputs = tuple(dict.fromkeys(n for c in chosen for n in atoms[c].inputs if n not in inside))
    inner, results = set(chosen), {each.name for each in file.model.graph.output}
    given = [
        name
        for number in chosen
        for name in atoms[number].outputs
        if name in results or not inner.issuperset(atoms.users.get(name, ()))
    ]
    weights = atoms.weights_for(nodes)
    model = ModelProto()
    model.ir_version = file.model.ir_version
    model.opset_import.extend(file.model.opset_import)
    graph = model.graph
    graph.name = "part"
    node_names = {}
    inner_numbers = itertools.count()
    for index in nodes:
        node = graph.node.add()
        node.CopyFrom(file.nodes[index])
        node.name = part_node_name(index)
        for body in subgraphs(node):
            _rename_inside(body, inner_numbers)
        node_names[node.name] = file.nodes[index].name or f"{node.op_type} {index}"
    for name in inputs:
        graph.input.append(_value_info(file, name, kinds))
    for name in given:
        _add_output(graph, file, name, kinds)
    wanted = {n for index in nodes for n in file.nodes[index].output} - set(given)
    graph.value_info.extend(e for n, e in file.known_values.items() if n in wanted)
    builder = ManifestBuilder()
    groups: list[tuple[tuple[str, ...], Callable[[], dict[str, NDArray[Any]]]]] = []

    def read(stored: str, name: str) -> dict[str, NDArray[Any]]:
        return {stored: file.read_weight(name)}

    for name in weights:
        tensor = graph.initializer.add()
        if not file.is_apart(name):
            tensor.CopyFrom(file.initialisers[name])
            continue
        original = file.initialisers[name]
        stored = f"weight {len(groups)}"
        entry = builder.add(stored, file.read_weight(name))
        groups.append(((stored,), partial(read, stored, name)))
        tensor.name, tensor.data_type = name, original.data_type
        tensor.dims.extend(original.dims)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", WEIGHTS_FILE), ("offset", entry.offset), ("length", entry.nbytes)
        ):  # fmt: skip
            told = tensor.external_data.add()
            told.key, told.value = key, str(value)
    content = np.frombuffer(model.SerializeToString(), np.uint8)
    builder.add(GRAPH_NAME, content)
    groups.append(((GRAPH_NAME,), lambda: {GRAPH_NAME: content}))
    return GraphPart(
        inputs=inputs,
        outputs=tuple(given),
        manifest=builder.build(),
        groups=groups,
        node_names=node_names,
        weight_bytes=sum(map(file.weight_bytes, weights)),
    )


def _rename_inside(body: GraphProto, numbers: Iterator[int]) -> None:
    for node in body.node:
        node.name = f"{INSIDE}{next(numbers)}"
        for inner in subgraphs(node):
            _rename_inside(inner, numbers)


def part_node_name(index: int) -> str:
    """The name of a node in its part, by its place in the file. Fused nodes have it in theirs."""
    return f"edge{index}node"


def crossing(atoms: Atoms, position: int) -> list[str]:
    """The tensors that earlier atoms give later ones, where a cut lies before atom `position`."""
    return [
        name
        for atom in (atoms[number] for number in range(position))
        for name in atom.outputs
        if any(user >= position for user in atoms.users.get(name, ()))
    ]


def feasible_cuts(atoms: Atoms, kinds: Mapping[str, TensorKind]) -> list[int]:
    """The places at which every tensor that crosses is of a type that travels."""
    closed = [0] * (len(atoms) + 1)
    for number, atom in enumerate(atoms):
        for name in atom.outputs:
            kind = kinds.get(name)
            last = max(atoms.users.get(name, (number,)))
            if kind is None or not kind.travels:
                closed[number + 1] += 1
                closed[last + 1 if last > number else number + 1] -= 1
    found, open_now = [], 0
    for position in range(1, len(atoms)):
        open_now += closed[position]
        if not open_now:
            found.append(position)
    return found


def _value_info(file: OnnxFile, name: str, kinds: Mapping[str, TensorKind]) -> Any:
    known = file.known_values.get(name)
    kind = kinds.get(name)
    if known is not None and known.type.tensor_type.elem_type and _may_be(known, kind):
        return known
    if kind is None or not kind.travels:
        raise PlanError(f"the tensor {name!r:.80} cannot travel between devices")
    # The sizes are those of a sample, and may differ with another input.
    return helper.make_tensor_value_info(name, ONNX_TYPES[kind.dtype], [None] * len(kind.shape))


def _may_be(known: ValueInfoProto, kind: TensorKind | None) -> bool:
    """Whether a tensor as a run has shown it is one of those that a description allows."""
    held = known.type.tensor_type
    if kind is None or not held.HasField("shape"):
        return True
    sizes = [each.dim_value if each.HasField("dim_value") else None for each in held.shape.dim]
    return len(sizes) == len(kind.shape) and all(
        size in (None, seen) for size, seen in zip(sizes, kind.shape, strict=True)
    )


def _add_output(graph: Any, file: OnnxFile, name: str, kinds: Mapping[str, TensorKind]) -> None:
    if name in file.known_values or (name in kinds and kinds[name].travels):
        graph.output.append(_value_info(file, name, kinds))
    else:
        graph.output.add().name = name  # ONNX Runtime infers its type


def echo_part() -> GraphPart:
    """A part that gives bytes back unchanged, for measurements."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "echo",
        [value("x", TensorProto.UINT8, [None])],
        [value("y", TensorProto.UINT8, [None])],
    )
    opsets = [helper.make_opsetid("", OLDEST_OPSET)]
    model = helper.make_model(graph, ir_version=8, opset_imports=opsets)
    content = np.frombuffer(model.SerializeToString(), np.uint8)
    builder = ManifestBuilder()
    builder.add(GRAPH_NAME, content)
    return GraphPart(
        inputs=("x",),
        outputs=("y",),
        manifest=builder.build(),
        groups=[((GRAPH_NAME,), lambda: {GRAPH_NAME: content})],
        node_names={},
        weight_bytes=0,
    )
