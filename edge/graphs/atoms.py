"""Atoms: runs of nodes of a graph that stay together in every cut.

Constants, and what follows from constants alone, belong to no atom: each part has its own copy. So
has an activation's DequantizeLinear, so that a cut sends the quantised values, and each side has
the whole pattern that ONNX Runtime computes in integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnx import NodeProto

from edge.errors import CheckpointError
from edge.graphs.nodes import inputs_of, subgraphs
from edge.graphs.onnx_file import OnnxFile

_OF_PRODUCER = frozenset(
    (
        "BatchNormalization", "Clip", "Dropout", "Elu", "HardSigmoid", "HardSwish", "Identity",
        "LeakyRelu", "PRelu", "QuantizeLinear", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh",
    )
)  # fmt: skip
"""Nodes that ONNX Runtime computes together with the one before."""

_WITH_CONSTANT = frozenset(("Add", "Div", "Mul", "Sub"))
"""Nodes that stay with the one before if their other input is a constant: biases and scales."""

_RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
     "RandomUniformLike")
)  # fmt: skip

_MOST_COPIES = 5_000_000
"""Copies of constant nodes in all atoms together, so that no file takes hours."""

_SHAPES = frozenset(("Shape", "Size"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """Nodes that stay together."""

    nodes: tuple[int, ...]
    """Their places in the file, ascending."""
    inputs: tuple[str, ...]
    """Tensors of other atoms, and inputs of the graph."""
    outputs: tuple[str, ...]
    """Tensors that other atoms or the caller use."""
    weights: tuple[str, ...]
    """Initialisers that the nodes need, with those of copied nodes."""
    weight_bytes: int

    @property
    def first_node(self) -> int:
        return self.nodes[0]


def _is_random(node: NodeProto) -> bool:
    """Whether a node, or one in its bodies, may give another result for the same input."""
    return node.op_type in _RANDOM or any(
        _is_random(inner) for body in subgraphs(node) for inner in body.node
    )


class Atoms:
    """The atoms of a file in topological order: each uses only earlier ones."""

    def __init__(self, file: OnnxFile, exit_output: str | None = None) -> None:
        """exit_output: a result of the graph; what it needs comes first then."""
        self._file = file
        graph = file.model.graph
        self._inputs = [inputs_of(node) for node in graph.node]
        self._producers = {
            name: index for index, node in enumerate(graph.node) for name in node.output if name
        }
        self._results = frozenset(each.name for each in graph.output)
        self.is_random = any(map(_is_random, graph.node))
        """Whether two runs of the same input may differ."""
        self._constants = self._constant_nodes()
        self._copied = self._constants | frozenset(
            index
            for index, node in enumerate(graph.node)
            if node.op_type == "DequantizeLinear"
            and self._results.isdisjoint(node.output)
            and all(map(self._is_constant, node.input[1:]))
            and not any(map(self._is_dequantized, node.input[:1]))
        )
        self._atoms = self._grouped()
        self.exit_at: int | None = None
        """The place behind all that the exit output needs."""
        if exit_output is not None:
            self._put_first(exit_output)

    def __getitem__(self, number: int) -> Atom:
        return self._atoms[number]

    def __iter__(self) -> Iterator[Atom]:
        return iter(self._atoms)

    def __len__(self) -> int:
        return len(self._atoms)

    @cached_property
    def of_node(self) -> Mapping[int, int]:
        """The atom of each node that is in one."""
        return {node: number for number, atom in enumerate(self._atoms) for node in atom.nodes}

    @cached_property
    def users(self) -> Mapping[str, tuple[int, ...]]:
        """The atoms that use each tensor."""
        found: dict[str, list[int]] = {}
        for number, atom in enumerate(self._atoms):
            for name in atom.inputs:
                found.setdefault(name, []).append(number)
        return {name: tuple(each) for name, each in found.items()}

    def _put_first(self, output: str) -> None:
        makers = {name: n for n, atom in enumerate(self._atoms) for name in atom.outputs}
        needed, wanted = set[int](), [makers[output]] if output in makers else []
        while wanted:
            if (number := wanted.pop()) not in needed:
                needed.add(number)
                wanted += [makers[name] for name in self._atoms[number].inputs if name in makers]
        order = sorted(range(len(self._atoms)), key=lambda number: (number not in needed, number))
        self._atoms = [self._atoms[number] for number in order]
        self.exit_at = len(needed)

    def copies_for(self, nodes: Sequence[int]) -> list[int]:
        """The copied nodes that these nodes need, directly or by others."""
        found: set[int] = set()
        wanted = list(nodes)
        while wanted:
            for name in self._inputs[wanted.pop()]:
                producer = self._producers.get(name)
                if producer is not None and producer in self._copied and producer not in found:
                    found.add(producer)
                    wanted.append(producer)
        return sorted(found)

    def weights_for(self, nodes: Sequence[int]) -> list[str]:
        """Initialisers that nodes read."""
        known = self._file.initialisers
        return list(dict.fromkeys(n for i in nodes for n in self._inputs[i] if n in known))

    def _is_constant(self, name: str) -> bool:
        return name in self._file.initialisers or self._producers.get(name) in self._constants

    def _is_dequantized(self, name: str) -> bool:
        producer = self._producers.get(name)
        return producer is not None and self._file.nodes[producer].op_type == "DequantizeLinear"

    def _constant_nodes(self) -> frozenset[int]:
        """Nodes whose results follow from the file alone. Random and control flow nodes count as
        changing, and so do nodes that give a result of the graph."""
        found: set[int] = set()
        known = set(self._file.initialisers)
        for index, node in enumerate(self._file.nodes):
            if node.op_type in _RANDOM or any(True for _ in subgraphs(node)):
                continue
            if self._results.isdisjoint(node.output) and known.issuperset(self._inputs[index]):
                found.add(index)
                known.update(node.output)
        return frozenset(found)

    def _sources(self, index: int) -> list[str]:
        """The tensors that a node needs from other atoms, through copied nodes."""
        found: dict[str, None] = {}
        wanted = list(reversed(self._inputs[index]))
        seen: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name in seen or self._is_constant(name):
                continue
            seen.add(name)
            producer = self._producers.get(name)
            if producer is not None and producer in self._copied:
                wanted += reversed(self._inputs[producer])
            else:
                found[name] = None
        return list(found)

    def _grouped(self) -> list[Atom]:
        """Join a node with the latest atom that it needs, where they stay together.

        All else that the node needs is in earlier atoms, so the order stays topological.
        """
        nodes = self._file.nodes
        groups: list[list[int]] = []
        of_node: dict[int, int] = {}
        sources: dict[int, list[str]] = {}
        shape_values: set[str] = set()
        for index, node in enumerate(nodes):
            if index in self._copied:
                continue
            sources[index] = self._sources(index)
            of_shapes = node.op_type in _SHAPES or (
                bool(sources[index]) and shape_values.issuperset(sources[index])
            )
            if of_shapes:
                shape_values.update(node.output)
            before = [of_node[self._producers[n]] for n in sources[index] if n in self._producers]
            if before and (of_shapes or self._stays(node, sources[index])):
                of_node[index] = max(before)
                groups[max(before)].append(index)
            else:
                of_node[index] = len(groups)
                groups.append([index])
        used: dict[str, set[int]] = {}
        for index, names in sources.items():
            for name in names:
                used.setdefault(name, set()).add(of_node[index])
        atoms, copies = [], 0
        for group in groups:
            copied = self.copies_for(group)
            copies += len(copied)
            if copies > _MOST_COPIES:
                raise CheckpointError(
                    f"{self._file.path} computes too many constants for too many nodes",
                    remedy="fold its constants, as by onnxruntime's offline optimisation",
                )
            atoms.append(self._atom(group, copied, sources, of_node, used))
        return atoms

    def _stays(self, node: NodeProto, sources: Sequence[str]) -> bool:
        if len(sources) != 1:
            return False
        if node.op_type in _OF_PRODUCER or node.op_type == "DequantizeLinear":
            return True
        return node.op_type in _WITH_CONSTANT and any(map(self._is_constant, node.input))

    def _atom(
        self,
        group: Sequence[int],
        copied: Sequence[int],
        sources: Mapping[int, list[str]],
        of_node: Mapping[int, int],
        used: Mapping[str, set[int]],
    ) -> Atom:
        own = of_node[group[0]]
        inputs = dict.fromkeys(
            name
            for index in group
            for name in sources[index]
            if name not in self._producers or of_node[self._producers[name]] != own
        )
        made = [name for index in group for name in self._file.nodes[index].output if name]
        outputs = tuple(n for n in made if n in self._results or used.get(n, {own}) != {own})
        weights = self.weights_for((*group, *copied))
        return Atom(
            nodes=tuple(group),
            inputs=tuple(inputs),
            outputs=outputs,
            weights=tuple(weights),
            weight_bytes=sum(map(self._file.weight_bytes, weights)),
        )
