"""Inputs and outputs of graphs, bound to the adapter's memory and to the host's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

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

_LARGEST_ERROR = 1e-3
"""The largest difference of a recorded graph, as a share of the largest value."""

_PASSED = {"hidden_out": "hidden", "partial_out": "partial"}
"""Outputs that the next graph reads, by its inputs."""


class Bound(Protocol):
    """A graph that is bound for steps of one shape."""

    @property
    def states(self) -> Sequence[int]:
        """Numbers of the states that it writes."""
        ...

    def run(self, caches: Mapping[str, ort.OrtValue], options: ort.RunOptions) -> None:
        """Run it once. caches: keys, values and states, by input and output."""
        ...

    def holds(self, arrays: Collection[int]) -> bool:
        """Whether one of these arrays of caches, by `id`, is bound."""
        ...

    def release(self) -> None:
        """Free what it holds beside its arrays."""
        ...


class BoundGraph:
    """One graph with its inputs and outputs for steps of one shape."""

    def __init__(
        self,
        session: ort.InferenceSession,
        binding: Any,
        segment: GraphSegment,
        *,
        from_host: Mapping[str, NDArray[Any]],
        states: Sequence[int],
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
        self._bind(caches)
        # An input in host memory is copied when it is bound, and not when the graph runs.
        for name, array in self._from_host.items():
            self._binding.bind_cpu_input(name, array)
        self._session.run_with_iobinding(self._binding, options)

    def _bind(self, caches: Mapping[str, ort.OrtValue]) -> None:
        for names, bind in (
            (self._inputs, self._binding.bind_ortvalue_input),
            (self._outputs, self._binding.bind_ortvalue_output),
        ):
            for name in names:
                array = caches[name]
                if self._bound.get(name) is not array:
                    bind(name, array)
                    self._bound[name] = array

    def holds(self, arrays: Collection[int]) -> bool:
        return any(id(each) in arrays for each in self._bound.values())

    def release(self) -> None:
        """Free what it holds beside its arrays: nothing."""


class RecordedGraph(BoundGraph):
    """A graph whose launches are recorded in its first run, and submitted as a whole later.

    A token is hundreds of short kernels, which the processor launches one by one otherwise (not
    measured on a real adapter). A record has fixed arrays on the adapter, so inputs and outputs
    have arrays there, too.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        binding: Any,
        segment: GraphSegment,
        *,
        from_host: Mapping[str, NDArray[Any]],
        to_host: Mapping[str, NDArray[Any]],
        device: Device,
        number: int,
    ) -> None:
        """to_host: outputs that are copied to the host. number: one that no other graph of the
        session has."""
        super().__init__(session, binding, segment, from_host=from_host, states=[])
        self._number = number
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", str(number))
        self._given = {name: device.put(array) for name, array in from_host.items()}
        self.to_host = to_host
        self._taken = {
            name: (device.empty(array.shape, np.float32), array) for name, array in to_host.items()
        }
        for name, value in self._given.items():
            binding.bind_ortvalue_input(name, value)
        for name, (value, _array) in self._taken.items():
            binding.bind_ortvalue_output(name, value)

    def run(self, caches: Mapping[str, ort.OrtValue], options: ort.RunOptions) -> None:
        if options.terminate:  # a recorded graph is not interrupted
            raise RuntimeError("the step was told to terminate")
        names = (*self._inputs, *self._outputs)
        if any(self._bound.get(name) is not caches[name] for name in names):
            self.release()  # of other arrays
            self._bind(caches)
        for name, value in self._given.items():
            value.update_inplace(self._from_host[name])
        self._session.run_with_iobinding(self._binding, self._options)
        for value, array in self._taken.values():
            array[...] = value.numpy()

    def release(self) -> None:
        """Forget the record."""
        if self._bound:
            self._session.release_captured_graph(self._number)


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
        # A state has two arrays that change places after each step, and a record has fixed ones.
        # Attention with a window is wrong in a record (onnxruntime-ep-webgpu 0.4.0).
        attentions = layout.attentions.values()
        self._may_record = (
            len(graphs.segments) == 1
            and cache.can_cut
            and all(each.window is None and not each.has_sinks for each in attentions)
        )
        self._number = 0
        """The number of the last graph that is recorded."""
        self._most = most_rows(limits) * spec.hidden_size
        self._parts = spec.partial_parts
        self._passed: dict[tuple[str, int, int], ort.OrtValue] = {}
        """Buffers between graphs, by input, half, and whether the graph's number is odd."""
        self._by_shape: OrderedDict[StepShape, dict[int, Bound]] = OrderedDict()

    def clear(self) -> None:
        with self._device.used():
            while self._by_shape:
                _release(self._by_shape.popitem()[1])

    def let_go(self, arrays: Collection[int]) -> None:
        """Drop the bound graphs that hold one of these arrays, by `id`, which are freed next."""
        with self._device.used():
            stale = [
                shape
                for shape, bound in self._by_shape.items()
                if any(graph.holds(arrays) for graph in bound.values())
            ]
            for shape in stale:
                _release(self._by_shape.pop(shape))

    def of(self, index: int, shape: StepShape, buffers: StepBuffers, side: SideInputs) -> Bound:
        """A graph, bound for steps of this shape."""
        bound = self._by_shape.setdefault(shape, {})
        self._by_shape.move_to_end(shape)
        if len(self._by_shape) > _MAX_SHAPES:
            _release(self._by_shape.popitem(last=False)[1])
        if index not in bound:
            records = self._may_record and shape.tokens == 1
            graph = self._bind(index, shape, buffers, side, records=records)
            bound[index] = graph
            if isinstance(graph, RecordedGraph):
                plain = self._bind(index, shape, buffers, side, records=False)
                bound[index] = _Compared(graph, plain, self._without_records)
        return bound[index]

    def _without_records(self) -> None:
        """Record nothing from now on."""
        self._may_record = False
        self.clear()

    def _bind(
        self,
        index: int,
        shape: StepShape,
        buffers: StepBuffers,
        side: SideInputs,
        *,
        records: bool,
    ) -> BoundGraph:
        """records: the launches are recorded if they can be."""
        segments = self._graphs.segments
        segment, session, binding, captures = self._graphs.bound_to_weights(
            index, shape, captures=records
        )
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
        if captures:
            self._number += 1
            outputs = [name for name in segment.outputs if not name.startswith("present_")]
            return RecordedGraph(
                session,
                binding,
                segment,
                from_host=from_host,
                to_host={name: arrays[name] for name in outputs},
                device=self._device,
                number=self._number,
            )
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


class _Compared:
    """A recorded graph whose first run is compared with the graph that is not recorded."""

    states: Sequence[int] = ()

    def __init__(
        self, recorded: RecordedGraph, plain: BoundGraph, refuse: Callable[[], None]
    ) -> None:
        """refuse: called if they differ."""
        self._recorded = recorded
        self._plain: BoundGraph | None = plain
        self._refuse = refuse

    def run(self, caches: Mapping[str, ort.OrtValue], options: ort.RunOptions) -> None:
        plain, self._plain = self._plain, None
        if plain is None:
            self._recorded.run(caches, options)
            return
        # Both write the same keys and values to the same places.
        plain.run(caches, options)
        expected = {name: array.copy() for name, array in self._recorded.to_host.items()}
        self._recorded.run(caches, options)
        for name, array in self._recorded.to_host.items():
            largest = float(np.abs(expected[name]).max(initial=1e-9))
            if not np.abs(array - expected[name]).max(initial=0.0) <= _LARGEST_ERROR * largest:
                self._refuse()
                for each, found in expected.items():
                    self._recorded.to_host[each][...] = found
                return

    def holds(self, arrays: Collection[int]) -> bool:
        return self._recorded.holds(arrays)

    def release(self) -> None:
        self._recorded.release()


def _release(graphs: Mapping[int, Bound]) -> None:
    for graph in graphs.values():
        graph.release()
