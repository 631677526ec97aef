"""A shard's graphs on the adapter, for steps of each number of requests, with its weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.onnx.lowering import lower
from edge.backends.onnx.products import FLOAT_MATRICES
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.segments import GraphSegment
from edge.backends.onnx.step_buffers import StepShape
from edge.backends.shard_arrays import ShardArrays
from edge.backends.webgpu.attention_probe import LONG_STEP
from edge.backends.webgpu.device import Device
from edge.errors import EdgeError
from edge.kernels.matmul.onnx import matmul_weight
from edge.kernels.onnx_graph import WEBGPU, FedTensor, Provider, Weight
from edge.models.spec import ModelSpec
from edge.offload import numpy_dtype
from edge.weights.formats import WeightFormat

_MOST_SIZES = 8
"""Numbers of requests whose sessions are kept. A session holds no weights."""

_TRANSPOSED = tuple(f".{suffix}" for suffix in FLOAT_MATRICES)


class DeviceGraphs:
    """The graphs of a shard. All share its matrices, which are inputs on the adapter."""

    def __init__(
        self,
        spec: ModelSpec,
        arrays: ShardArrays,
        weight_format: WeightFormat,
        device: Device,
        *,
        cut_layers: bool,
        embedding: EmbeddingRows | None,
    ) -> None:
        """embedding: the rows on disk that the first stage reads."""
        self.embedding = embedding
        self._device = device
        self._weights = DeviceWeights(arrays, device)
        self._sizes: OrderedDict[tuple[int, Provider], _Sized] = OrderedDict()
        self._can_capture = True
        """False once a graph had nodes that are not recorded."""
        self._lower: Callable[[int, Provider], tuple[GraphSegment, ...]] = (
            lambda requests, provider: lower(
                spec,
                arrays.layout,
                self._weights.declared,
                weight_format,
                cut_layers=cut_layers,
                provider=provider,
                requests=requests,
            )
        )
        self.segments = self._lower(1, WEBGPU)
        """The graphs for one request. Others are cut alike."""
        for segment in self.segments:
            for name in segment.inputs:
                self._weights.bring(name)

    def bound_to_weights(
        self, index: int, shape: StepShape, *, captures: bool
    ) -> tuple[GraphSegment, ort.InferenceSession, Any, bool]:
        """A graph for steps of this shape, its session, a new binding that has its weights, and
        whether its runs are recorded. captures: they may be."""
        provider = self._device.long_steps if shape.tokens >= LONG_STEP else WEBGPU
        key = shape.batch, provider
        sized = self._sizes.get(key)
        if sized is None:
            sized = self._sizes[key] = _Sized(self._lower(*key), self._device)
            if len(self._sizes) > _MOST_SIZES:
                self._sizes.popitem(last=False)
        self._sizes.move_to_end(key)
        segment = sized.segments[index]
        captures &= self._can_capture
        try:
            session = sized.session(index, captures=captures)
        except EdgeError:
            raise
        except Exception:  # onnxruntime raises plain exceptions
            if not captures:
                raise
            self._can_capture = captures = False
            session = sized.session(index, captures=False)
        binding = session.io_binding()
        for name in segment.inputs:
            weight = self._weights.on_device.get(name)
            if weight is not None:
                binding.bind_ortvalue_input(name, weight)
        return segment, session, binding, captures

    def check(self) -> None:
        """Does nothing: weights are on the adapter, and rows of the embedding are checked when they
        are read."""

    def begin(self, index: int) -> None:
        """Does nothing: all weights are on the adapter."""

    def end(self, index: int) -> None:
        """Does nothing, as `begin`."""

    def close(self) -> None:
        self._sizes.clear()
        self._weights.on_device.clear()
        if self.embedding is not None:
            self.embedding.close()


class _Sized:
    """The graphs for one number of requests, with sessions that are made at their first use."""

    def __init__(self, segments: tuple[GraphSegment, ...], device: Device) -> None:
        self.segments = segments
        self._device = device
        self._sessions: dict[tuple[int, bool], ort.InferenceSession] = {}

    def session(self, index: int, *, captures: bool) -> ort.InferenceSession:
        key = index, captures
        if key not in self._sessions:
            model = self.segments[index].model
            self._sessions[key] = self._device.session(model, captures=captures)
        return self._sessions[key]


class DeviceWeights:
    """A shard's matrices on the adapter. Vectors are constants of the graphs."""

    def __init__(self, arrays: ShardArrays, device: Device) -> None:
        self._arrays = arrays
        self._device = device
        self._vectors = {each.name: arrays.read(each.name) for each in arrays.layout.vectors}
        """Read now, because the file may be gone when graphs of another size are made."""
        self.on_device: dict[str, ort.OrtValue] = {}

    def declared(self, name: str) -> Weight:
        """A tensor as graphs declare it."""
        if name in self._vectors:
            return self._vectors[name]
        entry = self._arrays.entry(name)
        shape = entry.shape[::-1] if name.endswith(_TRANSPOSED) else entry.shape
        return FedTensor(dtype=numpy_dtype(entry.dtype), shape=shape)

    def bring(self, name: str) -> None:
        """Copy a matrix to the adapter, if this is the name of one."""
        if name not in self._arrays or name in self.on_device:
            return
        found: NDArray[Any] = self._arrays.read(name)
        if name.endswith(_TRANSPOSED):
            found = matmul_weight(found.astype(np.float32), WEBGPU)
        self.on_device[name] = self._device.put(found)
