"""The nodes of a graph: their order, the bodies inside them and the tensors that they read."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from edge.errors import printable


def put_in_order(graph: GraphProto) -> None:
    """Put each node behind those whose results it uses, as ONNX demands and some converters forget.

    ONNX Runtime computes such graphs. Nodes keep their order where they can; so do all if there is
    a cycle.
    """
    makers = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    needed = [{makers[name] for name in inputs_of(node) if name in makers} for node in graph.node]
    if all(max(each, default=-1) < at for at, each in enumerate(needed)):
        return
    users: dict[int, list[int]] = {}
    for at, each in enumerate(needed):
        for maker in each:
            users.setdefault(maker, []).append(at)
    missing = list(map(len, needed))
    ready = [at for at, count in enumerate(missing) if not count]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for user in users.get(order[-1], ()):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    if len(order) == len(needed):
        keep_nodes(graph, order)


def keep_nodes(graph: GraphProto, numbers: Iterable[int]) -> None:
    """Leave a graph these of its nodes, in this order."""
    kept = GraphProto()
    kept.node.extend(graph.node[at] for at in numbers)
    del graph.node[:]
    graph.node.extend(kept.node)


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that are attributes of a node: bodies of If, Loop and Scan."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def constants(node: NodeProto) -> Iterator[TensorProto]:
    """The tensors that are attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            yield attribute.t
        elif attribute.type == AttributeProto.TENSORS:
            yield from attribute.tensors


def inputs_of(node: NodeProto) -> list[str]:
    """The tensors that a node reads, with those that its bodies take from outside."""
    found = [name for name in node.input if name]
    for inner in subgraphs(node):
        found += captured(inner)
    return list(dict.fromkeys(found))


def captured(graph: GraphProto) -> list[str]:
    """The tensors that a body takes from around it."""
    own = {each.name for each in (*graph.input, *graph.initializer)}
    found: list[str] = []
    for node in graph.node:
        found += [name for name in inputs_of(node) if name not in own]
        own.update(node.output)
    found += [each.name for each in graph.output if each.name not in own]
    return list(dict.fromkeys(found))


def named(text: str) -> str:
    """A name from a file, as errors show it."""
    return repr(printable(text, 80))


def node_name(node: NodeProto) -> str:
    """A node's name, or its operator, as errors show it."""
    return named(node.name or node.op_type)
