"""Inputs and outputs of graphs, bound to buffers once, so that steps copy and allocate nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from edge.backends.onnx.side_inputs import SideInputs
from edge.backends.onnx.step_buffers import StepBuffers, StepShape
from edge.backends.ort.expert_runs import ExpertRuns
from edge.backends.ort.kv_cache import OrtCache
from edge.backends.ort.open_graphs import OpenGraphs

_MAX_BINDINGS = 16
"""Sets of bindings kept, one for each shape of step; making one takes 10 µs a value."""


class Bindings:
    """A program's bindings by the shape of steps, void once graphs, caches or buffers change."""

    def __init__(self, buffers: StepBuffers, side_inputs: SideInputs) -> None:
        self._buffers = buffers
        self._side_inputs = side_inputs
        self._by_shape: OrderedDict[StepShape, dict[int, Any]] = OrderedDict()

    def clear(self) -> None:
        self._by_shape.clear()

    def of(self, shape: StepShape) -> dict[int, Any]:
        """Bindings of the segments, by index; made at their first use.

        The least recently used shapes are dropped; decoding repeats a single one.
        """
        bindings = self._by_shape.get(shape)
        if bindings is None:
            bindings = self._by_shape[shape] = {}
            if len(self._by_shape) > _MAX_BINDINGS:
                self._by_shape.popitem(last=False)
        self._by_shape.move_to_end(shape)
        return bindings

    def bind(
        self,
        index: int,
        shape: StepShape,
        graphs: OpenGraphs,
        cache: OrtCache,
        experts: ExpertRuns | None,
    ) -> Any:
        """Bind every input and output of segment `index`."""
        segment = graphs.segments[index]
        binding = graphs.sessions[index].io_binding()
        arrays = {
            **self._buffers.arrays(
                shape,
                index,
                parts_before=graphs.segments[index - 1].partial_parts if index else 1,
                parts=segment.partial_parts,
            ),
            **self._side_inputs.arrays(shape),
            **cache.bound(shape.slot, shape.requests),
        }
        if segment.streamed is not None and graphs.streamed is not None:
            layer = segment.streamed.layer
            arrays |= {
                name.removesuffix(f"_{layer}"): array
                for name, array in arrays.items()
                if name.endswith(f"_{layer}")
            }
            arrays |= graphs.streamed.vectors(index)
            if experts is not None:
                arrays |= experts.arrays(segment, shape)
        for name in segment.inputs:
            array = arrays[name]
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name in segment.outputs:
            array = arrays[name]
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding
