"""A graph under construction, and its names for the parts of a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge.kernels.onnx_graph import OnnxGraph, Provider, Weight


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's tensors in a graph, without the layer's number if it is streamed."""

    streamed: int | None = None
    prefix: str = ""
    """A prefix within the layer that is left out, too."""

    def local(self, name: str) -> str:
        if self.streamed is None:
            return name
        local = name.removeprefix(f"layers.{self.streamed}.").removesuffix(f"_{self.streamed}")
        return local.removeprefix(self.prefix)


class OpenSegment:
    """The graph of a segment before it is closed, with its inputs and outputs."""

    def __init__(self, number: int, names: LayerNames, provider: Provider) -> None:
        self.graph = OnnxGraph(f"segment_{number}", provider)
        self.names = names
        self.outputs: list[str] = []
        self.vectors: dict[str, str] = {}
        """Names of the vectors of a streamed layer, by input."""
        self.cache_layer: int | None = None

    def input(self, name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> str:
        return self.graph.input(self.names.local(name), dtype, shape)

    def output(
        self, value: str, name: str, dtype: type[np.generic], shape: Sequence[int | str]
    ) -> None:
        self.output_of_all(value, self.names.local(name), dtype, shape)

    def output_of_all(
        self, value: str, name: str, dtype: type[np.generic], shape: Sequence[int | str]
    ) -> None:
        """Add an output whose name is the same in all layers."""
        self.graph.output(value, name, dtype, shape)
        self.outputs.append(name)

    def weight(self, name: str, tensor: Weight) -> str:
        return self.graph.weight(self.names.local(name), tensor)

    def vector_input(self, name: str, shape: Sequence[int]) -> str:
        """Add an input for a vector of a streamed layer, or of the layer before it."""
        local = self.names.local(name)
        if local.startswith("layers."):  # a vector of the layer before, whose number is left out
            local = f"before.{local.rsplit('.', 1)[-1]}"
        self.graph.input(local, np.float32, shape)
        self.vectors[local] = name
        return local

    @contextlib.contextmanager
    def within(self, branch: OnnxGraph, *, prefix: str = "") -> Iterator[None]:
        """Put nodes into a branch of the graph, or into another graph, whose names of a streamed
        layer's weights lack this prefix."""
        outer, names = self.graph, self.names
        self.graph, self.names = branch, replace(names, prefix=prefix)
        try:
            yield
        finally:
            self.graph, self.names = outer, names
