"""CPU peers: a shard as ONNX Runtime sessions over buffers made once.

Nothing is copied or allocated per step: every input and output is bound to a long-lived numpy
buffer, and the present KV is bound onto the past KV, so attention appends in place.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.base import ShardWeights, Step, StepLimits
from edge.backends.ort_graphs import GraphSegment, lower
from edge.backends.process_memory import (
    keep_allocations_together,
    release_freed_memory,
    use_huge_pages,
)
from edge.errors import RequestError
from edge.formats import WeightFormat
from edge.layout import ShardLayout
from edge.models.spec import ModelSpec
from kernels.attention.onnx import cache_head_size
from kernels.onnx_graph import ExternalTensor
from kernels.rope.reference import rope_tables
from offload import KVPool, Manifest, numpy_dtype
from transport import Collective

# Else importing it writes a device id into the user's home and reports to its maker. Nothing leaves
# a user's devices unless the user sends it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

_MAX_BINDINGS = 16
"""Sets of bindings kept, one for each shape of step; making one takes 10 µs a value."""

_process = threading.Lock()
_process_threads: int | None = None


def open_backend(*, threads: int) -> OrtBackend:
    return OrtBackend(threads=threads)


class OrtBackend:
    """ONNX Runtime's CPU provider with one thread pool and one arena for the whole process.

    Sessions with pools of their own destroy each other: 45 sessions of two threads each ran a
    1.1 B model at 1.8 tok/s, sharing one pool at 44.6.
    """

    name = "ort"

    def __init__(self, *, threads: int) -> None:
        self._threads = threads

    def why_not(self) -> str | None:
        if "CPUExecutionProvider" not in ort.get_available_providers():
            return "this onnxruntime has no CPU provider; install the onnxruntime package"
        return None

    def load(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        weights: ShardWeights,
        weight_format: WeightFormat,
        *,
        limits: StepLimits,
    ) -> OrtProgram:
        _prepare_process(self._threads)
        segments = lower(spec, layout, _places(weights.manifest, weights.path.name), weight_format)
        sessions = tuple(
            _open_session(segment, folder=str(weights.path.parent)) for segment in segments
        )
        release_freed_memory()
        use_huge_pages()
        return OrtProgram(
            spec,
            layout,
            segments,
            sessions,
            weight_bytes=weights.manifest.total_bytes,
            limits=limits,
        )


def _prepare_process(threads: int) -> None:
    """The pool and the arena belong to the process: made before the first session, then fixed."""
    global _process_threads  # noqa: PLW0603 - mirrors state that onnxruntime keeps globally
    with _process:
        if _process_threads is None:
            keep_allocations_together()
            ort.set_default_logger_severity(3)
            ort.set_global_thread_pool_sizes(threads, 1)
            memory = ort.OrtMemoryInfo(
                "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
            )
            # Grow by what is asked, not by powers of two: a peer's memory is a promise.
            ort.create_and_register_allocator(memory, ort.OrtArenaCfg(0, 1, -1, -1))
            _process_threads = threads
        elif _process_threads != threads:
            raise RequestError(
                f"this process already computes with {_process_threads} threads; "
                f"start another process to use {threads}"
            )


def _open_session(segment: GraphSegment, *, folder: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return ort.InferenceSession(segment.model, options, providers=["CPUExecutionProvider"])


def _places(manifest: Manifest, location: str) -> Callable[[str], ExternalTensor]:
    entries = {entry.name: entry for entry in manifest.tensors}

    def place(name: str) -> ExternalTensor:
        entry = entries[name]
        return ExternalTensor(
            location=location,
            offset=entry.offset,
            nbytes=entry.nbytes,
            dtype=numpy_dtype(entry.dtype),
            shape=entry.shape,
        )

    return place


class OrtProgram:
    """One shard's sessions, their shared buffers, and the KV of its requests."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        segments: tuple[GraphSegment, ...],
        sessions: tuple[ort.InferenceSession, ...],
        *,
        weight_bytes: int,
        limits: StepLimits,
    ) -> None:
        self.weight_bytes = weight_bytes
        self._spec = spec
        self._layout = layout
        self._segments = segments
        self._sessions = sessions
        self._limits = limits
        self._cache = KVPool(
            num_layers=len(layout.layers),
            slots=limits.requests,
            num_kv_heads=layout.num_kv_heads,
            context_tokens=limits.context_tokens,
            head_size=cache_head_size(spec.head_size),
        )
        frequencies = np.asarray(spec.inverse_frequencies, dtype=np.float32)
        self._cos, self._sin = rope_tables(frequencies, length=limits.context_tokens)
        most = max(limits.chunk_tokens, limits.requests)
        # Each segment reads one pair and writes the other, so no node sees its input change.
        self._hidden = _pair(most * spec.hidden_size)
        self._partial = _pair(most * spec.hidden_size)
        self._tokens = np.zeros(most, np.int64)
        self._positions = np.zeros(most, np.int64)
        self._rows = np.zeros(limits.chunk_tokens, np.int64)
        self._lengths = np.zeros(limits.requests, np.int32)
        self._total = np.zeros((), np.int32)
        self._logits = np.zeros(limits.requests * len(layout.vocab), np.float32)
        self._bindings: OrderedDict[_Shape, list[Any]] = OrderedDict()

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        return self._view(self._hidden[0], step.batch, step.num_tokens)

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        self._check(step)
        self._check_room(step)
        shape = self._prepare(step)
        if hidden is not None and hidden.ctypes.data != self._hidden[0].ctypes.data:
            self.receive_buffer(step)[...] = hidden
        bindings = self._bindings_for(shape)
        for index, segment in enumerate(self._segments):
            self._sessions[index].run_with_iobinding(bindings[index])
            if segment.reduce is not None:
                written = self._hidden if segment.reduce == "hidden" else self._partial
                array = self._view(written[(index + 1) % 2], shape.batch, shape.tokens)
                if segment.partial_is_zero:
                    array.fill(0)
                collective.all_reduce(array)
        for offset, entry in enumerate(step.entries):
            self._cache.wrote(shape.slot + offset, entry.end)
        if self._layout.is_last_stage:
            return self._logits_view(shape)[:, : step.logit_rows]
        return self._view(self._hidden[len(self._segments) % 2], shape.batch, shape.tokens)

    def release(self, request: str) -> None:
        self._cache.release(request)

    def close(self) -> None:
        self._bindings.clear()
        self._sessions = ()
        self._cache.close()
        release_freed_memory()

    def _check(self, step: Step) -> None:
        limits = self._limits
        if step.num_tokens > limits.chunk_tokens or step.batch > limits.requests:
            raise RequestError(
                f"a step of {step.batch} requests with {step.num_tokens} tokens each; this shard "
                f"takes up to {limits.requests} requests or {limits.chunk_tokens} tokens"
            )
        for entry in step.entries:
            if not 0 <= entry.position <= entry.end <= limits.context_tokens:
                raise RequestError(
                    f"position {entry.end} is past the context of {limits.context_tokens} tokens"
                )
            if not 0 <= min(entry.tokens) <= max(entry.tokens) < self._spec.vocab_size:
                raise RequestError(f"token ids must lie in 0..{self._spec.vocab_size - 1}")

    def _check_room(self, step: Step) -> None:
        tokens = self._cache.num_tokens + sum(len(entry.tokens) for entry in step.entries)
        if tokens > self._limits.cached_tokens:
            raise RequestError(
                f"{tokens} tokens under way; memory is kept for {self._limits.cached_tokens}"
            )

    def _prepare(self, step: Step) -> _Shape:
        """Fill the small inputs; the shape tells which bindings the step takes."""
        try:
            for entry in step.entries:
                self._cache.open(entry.request)
        except KeyError as error:
            raise RequestError(f"too many requests at once: {error.args[0]}") from error
        slot = self._cache.gather([entry.request for entry in step.entries])
        tokens, rows = step.num_tokens, max(step.logit_rows, 1)
        for index, entry in enumerate(step.entries):
            at = slice(index * tokens, (index + 1) * tokens)
            self._tokens[at] = entry.tokens
            self._positions[at] = np.arange(entry.position, entry.end)
            self._lengths[index] = entry.end - 1
        self._rows[:rows] = np.arange(tokens - rows, tokens)
        self._total[()] = max(entry.end for entry in step.entries)
        return _Shape(slot=slot, batch=step.batch, tokens=tokens, rows=rows)

    def _bindings_for(self, shape: _Shape) -> list[Any]:
        """Decode repeats one shape for ever; the least recently used of the others are dropped."""
        needed = shape.batch * shape.rows * len(self._layout.vocab)
        if needed > self._logits.size:
            self._logits = np.zeros(needed, np.float32)
            self._bindings.clear()
        bindings = self._bindings.get(shape)
        if bindings is None:
            bindings = [self._bind(index, shape) for index in range(len(self._segments))]
            self._bindings[shape] = bindings
            if len(self._bindings) > _MAX_BINDINGS:
                self._bindings.popitem(last=False)
        self._bindings.move_to_end(shape)
        return bindings

    def _bind(self, index: int, shape: _Shape) -> Any:
        """Bind every input and output of segment `index` to its buffer, for good."""
        segment = self._segments[index]
        binding = self._sessions[index].io_binding()
        read, write = index % 2, (index + 1) % 2
        batch, tokens = shape.batch, shape.tokens
        arrays: dict[str, NDArray[Any]] = {
            "tokens": self._tokens[: batch * tokens].reshape(batch, tokens),
            "positions": self._positions[: batch * tokens].reshape(batch, tokens),
            "rows": self._rows[: shape.rows],
            "hidden": self._view(self._hidden[read], batch, tokens),
            "partial": self._view(self._partial[read], batch, tokens),
            "hidden_out": self._view(self._hidden[write], batch, tokens),
            "partial_out": self._view(self._partial[write], batch, tokens),
            "logits": self._logits_view(shape),
            "cos": self._cos,
            "sin": self._sin,
            "lengths": self._lengths[:batch],
            "total": self._total,
        }
        for number, layer in enumerate(self._layout.layers):
            if f"past_key_{layer}" in segment.inputs:
                keys, values = self._cache.layer(number, shape.slot, batch)
                # Present is bound onto past: attention appends where the cache lies.
                arrays[f"past_key_{layer}"] = arrays[f"present_key_{layer}"] = keys
                arrays[f"past_value_{layer}"] = arrays[f"present_value_{layer}"] = values
        for name in segment.inputs:
            array = arrays[name]
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name in segment.outputs:
            array = arrays[name]
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding

    def _logits_view(self, shape: _Shape) -> NDArray[np.float32]:
        columns = len(self._layout.vocab)
        flat = self._logits[: shape.batch * shape.rows * columns]
        return flat.reshape(shape.batch, shape.rows, columns)

    def _view(self, flat: NDArray[np.float32], batch: int, tokens: int) -> NDArray[np.float32]:
        size = self._spec.hidden_size
        return flat[: batch * tokens * size].reshape(batch, tokens, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What bindings depend on: the first KV slot, and the sizes of the step."""

    slot: int
    batch: int
    tokens: int
    rows: int


def _pair(size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return np.zeros(size, np.float32), np.zeros(size, np.float32)
