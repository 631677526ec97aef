"""CPU peers: a shard as ONNX Runtime sessions over buffers made once.

Nothing is copied or allocated per step: every input and output is bound to a long-lived numpy
buffer, and the present KV is bound onto the past KV, so attention appends in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge.backends.base import ShardWeights, Step
from edge.backends.ort_graphs import GraphSegment, lower
from edge.errors import RequestError
from edge.formats import WeightFormat
from edge.layout import ShardLayout
from edge.models.spec import ModelSpec
from kernels.attention.onnx import cache_head_size
from kernels.onnx_graph import ExternalTensor
from kernels.rope.reference import rope_tables
from offload import Manifest, numpy_dtype
from transport import Collective

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
        context_tokens: int,
        chunk_tokens: int,
    ) -> OrtProgram:
        _prepare_process(self._threads)
        segments = lower(spec, layout, _places(weights.manifest, weights.path.name), weight_format)
        sessions = tuple(
            _open_session(segment, folder=str(weights.path.parent)) for segment in segments
        )
        return OrtProgram(
            spec,
            layout,
            segments,
            sessions,
            weight_bytes=weights.manifest.total_bytes,
            context_tokens=context_tokens,
            chunk_tokens=chunk_tokens,
        )


def _prepare_process(threads: int) -> None:
    """The pool and the arena belong to the process: made before the first session, then fixed."""
    global _process_threads  # noqa: PLW0603 - mirrors state that onnxruntime keeps globally
    with _process:
        if _process_threads is None:
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


@dataclass(slots=True)
class _RequestState:
    """One request's KV cache and the bindings made for it, by number of tokens and logit rows."""

    cache: dict[str, NDArray[np.float32]]
    bindings: dict[tuple[int, int], list[Any]] = field(default_factory=dict)


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
        context_tokens: int,
        chunk_tokens: int,
    ) -> None:
        self.weight_bytes = weight_bytes
        self._spec = spec
        self._layout = layout
        self._segments = segments
        self._sessions = sessions
        self._context_tokens = context_tokens
        self._chunk_tokens = chunk_tokens
        self._requests: dict[str, _RequestState] = {}
        frequencies = np.asarray(spec.inverse_frequencies, dtype=np.float32)
        self._cos, self._sin = rope_tables(frequencies, length=context_tokens)
        size = chunk_tokens * spec.hidden_size
        # Each segment reads one pair and writes the other, so no node sees its input change.
        self._hidden = (np.zeros(size, np.float32), np.zeros(size, np.float32))
        self._partial = (np.zeros(size, np.float32), np.zeros(size, np.float32))
        self._tokens = np.zeros(chunk_tokens, np.int64)
        self._positions = np.zeros(chunk_tokens, np.int64)
        self._rows = np.zeros(chunk_tokens, np.int64)
        self._lengths = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._logits = np.zeros(len(layout.vocab), np.float32)

    def receive_buffer(self, num_tokens: int) -> NDArray[np.float32]:
        return self._view(self._hidden[0], num_tokens)

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        count = step.num_tokens
        self._check(step)
        state = self._requests.get(step.request) or self._begin(step.request)
        rows = max(step.logit_rows, 1)
        self._tokens[:count] = step.tokens
        self._positions[:count] = np.arange(step.position, step.position + count)
        self._rows[:rows] = np.arange(count - rows, count)
        self._lengths[0] = step.position + count - 1
        self._total[()] = step.position + count
        if hidden is not None and hidden.ctypes.data != self._hidden[0].ctypes.data:
            self.receive_buffer(count)[...] = hidden
        if rows * len(self._layout.vocab) > self._logits.size:
            self._logits = np.zeros(rows * len(self._layout.vocab), np.float32)
            for each in self._requests.values():
                each.bindings.clear()
        key = (count, rows)
        bindings = state.bindings.get(key)
        if bindings is None:
            bindings = [
                self._bind(index, state, count=count, rows=rows)
                for index in range(len(self._segments))
            ]
            # Decode repeats one key for ever and a prompt one for its chunks; the rest pass by.
            if count in (1, self._chunk_tokens):
                state.bindings[key] = bindings
        for index, segment in enumerate(self._segments):
            self._sessions[index].run_with_iobinding(bindings[index])
            if segment.reduce is not None:
                written = self._hidden if segment.reduce == "hidden" else self._partial
                array = self._view(written[(index + 1) % 2], count)
                if segment.partial_is_zero:
                    array.fill(0)
                collective.all_reduce(array)
        if self._layout.is_last_stage:
            columns = len(self._layout.vocab)
            return self._logits[: rows * columns].reshape(rows, columns)[: step.logit_rows]
        return self._view(self._hidden[len(self._segments) % 2], count)

    def release(self, request: str) -> None:
        self._requests.pop(request, None)

    def close(self) -> None:
        self._requests.clear()
        self._sessions = ()

    def _check(self, step: Step) -> None:
        if not 0 < step.num_tokens <= self._chunk_tokens:
            raise RequestError(
                f"a step of {step.num_tokens} tokens; this shard takes 1 to {self._chunk_tokens}"
            )
        if not 0 <= step.logit_rows <= step.num_tokens:
            raise RequestError(f"{step.logit_rows} logit rows of {step.num_tokens} tokens")
        if not 0 <= step.position <= self._context_tokens - step.num_tokens:
            raise RequestError(
                f"position {step.position + step.num_tokens} is past the context of "
                f"{self._context_tokens} tokens"
            )
        if not 0 <= min(step.tokens) <= max(step.tokens) < self._spec.vocab_size:
            raise RequestError(f"token ids must lie in 0..{self._spec.vocab_size - 1}")

    def _begin(self, request: str) -> _RequestState:
        shape = (
            1,
            self._layout.num_kv_heads,
            self._context_tokens,
            cache_head_size(self._spec.head_size),
        )
        cache: dict[str, NDArray[np.float32]] = {}
        if self._layout.num_heads:
            for layer in self._layout.layers:
                # Zeroed by the system, so a page costs memory only once tokens reach it.
                cache[f"key_{layer}"] = np.zeros(shape, np.float32)
                cache[f"value_{layer}"] = np.zeros(shape, np.float32)
        state = _RequestState(cache)
        self._requests[request] = state
        return state

    def _bind(self, index: int, state: _RequestState, *, count: int, rows: int) -> Any:
        """Bind every input and output of segment `index` to its buffer, for good."""
        segment = self._segments[index]
        binding = self._sessions[index].io_binding()
        read, write = index % 2, (index + 1) % 2
        arrays: dict[str, NDArray[Any]] = {
            "tokens": self._tokens[:count].reshape(1, count),
            "positions": self._positions[:count].reshape(1, count),
            "rows": self._rows[:rows],
            "hidden": self._view(self._hidden[read], count),
            "partial": self._view(self._partial[read], count),
            "hidden_out": self._view(self._hidden[write], count),
            "partial_out": self._view(self._partial[write], count),
            "logits": self._logits[: rows * len(self._layout.vocab)].reshape(1, rows, -1)
            if self._layout.vocab
            else self._logits,
            "cos": self._cos,
            "sin": self._sin,
            "lengths": self._lengths,
            "total": self._total,
        }
        for name in segment.inputs:
            array = arrays.get(name)
            if array is None:
                array = state.cache[name.removeprefix("past_")]
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name in segment.outputs:
            array = arrays.get(name)
            if array is None:
                array = state.cache[name.removeprefix("present_")]
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding

    def _view(self, flat: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        size = self._spec.hidden_size
        return flat[: count * size].reshape(1, count, size)
