"""Inputs and outputs of graphs, bound to the adapter's memory and to the host's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.runtime import ort
from edge.backends.onnx.segments import GraphSegment, rotation_names
from edge.backends.onnx.side_inputs import SideInputs
from edge.backends.onnx.step_buffers import StepBuffers, StepShape
from edge.backends.webgpu.device import Device
from edge.backends.webgpu.graphs import DeviceGraphs
from edge.backends.webgpu.kv_cache import DeviceCache
from edge.memory.step_memory import most_rows
from edge.models.spec import ModelSpec
from edge.protocol.step import StepLimits
from edge.weights.layout import ShardLayout

_MAX_SHAPES = 16
"""Shapes of steps whose bindings are kept."""

_PASSED = {"hidden_out": "hidden", "partial_out": "partial"}
"""Outputs that the next graph reads, by its inputs."""


class BoundGraph:
    """One graph with its inputs and outputs for steps of one shape."""

    def __init__(
        self,
        session: ort.InferenceSession,
        binding: Any,
        segment: GraphSegment,
        *,
        from_host: Mapping[str, NDArray[Any]],
        states: list[int],
    ) -> None:
        """from_host: inputs that are copied to the adapter in each run. states: numbers of the
        states that it writes."""
        self.states = states
        self._session = session
        self._binding = binding
        self._from_host = from_host
        self._inputs = [each for each in segment.inputs if each.startswith("past_")]
        self._outputs = [each for each in segment.outputs if each.startswith("present_")]
        self._bound: dict[str, ort.OrtValue] = {}
        """Arrays of caches that are bound now."""

    def run(self, caches: Mapping[str, ort.OrtValue], options: ort.RunOptions) -> None:
        """caches: keys, values and states, by input and output."""
        for names, bind in (
            (self._inputs, self._binding.bind_ortvalue_input),
            (self._outputs, self._binding.bind_ortvalue_output),
        ):
            for name in names:
                array = caches[name]
                if self._bound.get(name) is not array:
                    bind(name, array)
                    self._bound[name] = array
        # An input in host memory is copied when it is bound, and not when the graph runs.
        for name, array in self._from_host.items():
            self._binding.bind_cpu_input(name, array)
        self._session.run_with_iobinding(self._binding, options)


class Bindings:
    """The bound graphs of a shard, by the shape of steps. The least recently used shapes are
    dropped."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        limits: StepLimits,
        graphs: DeviceGraphs,
        device: Device,
        cache: DeviceCache,
    ) -> None:
        self._graphs = graphs
        self._device = device
        self._cache = cache
        self._tables = {
            name: device.put(table)
            for number, rotation in enumerate(layout.rotations)
            for name, table in zip(
                rotation_names(number), rotation.tables(limits.context_tokens), strict=True
            )
        }
        self._most = most_rows(limits) * spec.hidden_size
        self._parts = spec.partial_parts
        self._passed: dict[tuple[str, int, int], ort.OrtValue] = {}
        """Buffers between graphs, by input, half, and whether the graph's number is odd."""
        self._by_shape: OrderedDict[StepShape, dict[int, BoundGraph]] = OrderedDict()

    def clear(self) -> None:
        self._by_shape.clear()

    def of(
        self, index: int, shape: StepShape, buffers: StepBuffers, side: SideInputs
    ) -> BoundGraph:
        """A graph, bound for steps of this shape."""
        bound = self._by_shape.setdefault(shape, {})
        self._by_shape.move_to_end(shape)
        if len(self._by_shape) > _MAX_SHAPES:
            self._by_shape.popitem(last=False)
        if index not in bound:
            bound[index] = self._bind(index, shape, buffers, side)
        return bound[index]

    def _bind(
        self, index: int, shape: StepShape, buffers: StepBuffers, side: SideInputs
    ) -> BoundGraph:
        segment, session, binding = self._graphs.bound_to_weights(index, shape)
        segments = self._graphs.segments
        arrays: dict[str, NDArray[Any]] = {
            **buffers.arrays(
                shape,
                index,
                parts_before=segments[index - 1].partial_parts if index else 1,
                parts=segment.partial_parts,
            ),
            **buffers.arrays_of_requests(shape),
            **side.arrays(shape),
        }
        for name, table in self._tables.items():
            if name in segment.inputs:
                binding.bind_ortvalue_input(name, table)
        from_host: dict[str, NDArray[Any]] = {}
        for name in segment.inputs:
            if name in _PASSED.values() and self._is_passed(index - 1, name):
                array = arrays[name]
                place = self._buffer(name, shape.half, index)
                binding.bind_input(
                    name, place.device_name(), 0, np.float32, array.shape, place.data_ptr()
                )
            elif name in arrays and name not in self._tables:
                from_host[name] = arrays[name]
        for name in segment.outputs:
            if name.startswith("present_"):
                continue
            array = arrays[name]
            device, address = "cpu", array.ctypes.data
            if name in _PASSED and self._is_passed(index, _PASSED[name]):
                place = self._buffer(_PASSED[name], shape.half, index + 1)
                device, address = place.device_name(), place.data_ptr()
            binding.bind_output(name, device, 0, np.float32, array.shape, address)
        return BoundGraph(
            session,
            binding,
            segment,
            from_host=from_host,
            states=self._cache.states_written(segment.outputs),
        )

    def _is_passed(self, index: int, name: str) -> bool:
        """Whether the graph's output of this name stays on the adapter for the next one."""
        if not 0 <= index < len(self._graphs.segments) - 1:
            return False
        reduce = self._graphs.segments[index].reduce
        return reduce is None if name == "partial" else reduce != "hidden"

    def _buffer(self, name: str, half: int, index: int) -> ort.OrtValue:
        """The buffer from which graph `index` reads this input."""
        key = name, half, index % 2
        if key not in self._passed:
            parts = self._parts if name == "partial" else 1
            self._passed[key] = self._device.empty([self._most * parts], np.float32)
        return self._passed[key]
