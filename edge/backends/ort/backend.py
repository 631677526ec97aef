"""CPU peers: a shard as ONNX Runtime sessions that share one thread pool and one arena."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.interface import ShardWeights
from edge.backends.onnx.lowering import lower
from edge.backends.onnx.process import prepare_process
from edge.backends.onnx.proof import proof
from edge.backends.onnx.runtime import has_windowed_caches, new_session_options, ort
from edge.backends.onnx.segments import GraphSegment
from edge.backends.onnx.self_check import run_self_check, run_tower_check
from edge.backends.onnx.speed import decode_seconds
from edge.backends.onnx.tower import lower_tower
from edge.backends.ort.arena import Arena, make_arena
from edge.backends.ort.expert_stacks import Stacks, stacked_kinds, written_stacks
from edge.backends.ort.open_graphs import OpenGraphs
from edge.backends.ort.program import OrtProgram
from edge.backends.ort.streaming import StreamedLayers
from edge.backends.ort.tower import OrtTower
from edge.backends.shard_arrays import ShardArrays
from edge.backends.watched_file import WatchedFile
from edge.errors import RequestError
from edge.host import block_kernels
from edge.host.free_memory import usable_memory_bytes
from edge.kernels.onnx_graph import CPU, ExternalTensor, Provider
from edge.memory.step_memory import keeps_windows, load_bytes
from edge.models.spec import (
    FILE_BLOCKS,
    NIBBLE_KV,
    TILED_ATTENTION,
    WEIGHTS_ON_DISK,
    WINDOW_READS,
    WINDOWED_KV,
    ModelSpec,
)
from edge.models.towers.part import TowerPart
from edge.offload import KVTier, numpy_dtype
from edge.protocol.step import StepLimits
from edge.system.heap import (
    ask_for_huge_pages,
    leave_holes,
    release_freed_memory,
    use_huge_pages,
)
from edge.system.pages import can_put_memory_over_mappings, let_go_of, mappings_of
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.layout import ShardLayout
from edge.weights.tower import tower_layout

_OF_THE_LIBRARY = (FILE_BLOCKS, TILED_ATTENTION, WINDOW_READS, NIBBLE_KV)

_process = threading.Lock()
_has_arena = False


def open_backend(*, threads: int) -> OrtBackend:
    return OrtBackend(threads=threads)


class OrtBackend:
    """ONNX Runtime's CPU provider with one thread pool and one arena for the whole process.

    Sessions with their own pools compete for cores: 45 sessions of two threads each ran a 1.1 B
    model at 1.8 tok/s, and at 44.6 tok/s with one shared pool.
    """

    name = "ort"
    # Layers are read into memory that lies over ONNX Runtime's mappings.
    lacks = frozenset(
        (
            *(() if can_put_memory_over_mappings() else (WEIGHTS_ON_DISK,)),
            *(() if has_windowed_caches() else (WINDOWED_KV,)),
            *(() if block_kernels.library() else _OF_THE_LIBRARY),
        )
    )
    is_stand_in = False

    def __init__(self, *, threads: int) -> None:
        self._threads = threads

    @property
    def _provider(self) -> Provider:
        has_library = block_kernels.library() is not None
        return replace(CPU, has_own_attention=has_library)

    @property
    def device_name(self) -> str:
        return "CPU"

    @property
    def has_own_memory(self) -> bool:
        return False

    def usable_memory_bytes(self) -> int:
        return usable_memory_bytes()

    def copy_bytes_per_s(self) -> float | None:
        return None

    def decode_seconds(self) -> float:
        """Seconds of a token's products, see `edge.backends.onnx.speed`."""
        _prepare_process(self._threads)
        return decode_seconds(_cpu_session, provider=CPU)

    def prove(self, weight_format: WeightFormat, seed: int) -> list[NDArray[np.float32]]:
        _prepare_process(self._threads)
        return proof(weight_format, seed, _cpu_session)

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
        kv_dtype: KvDtype = "float32",
        kv_tier: KVTier | None = None,
    ) -> OrtProgram:
        if keeps_windows(spec) and WINDOWED_KV in self.lacks:
            raise RequestError(
                "this onnxruntime keeps the keys and values of all tokens in layers with a sliding "
                "window",
                remedy="install onnxruntime 1.31 or newer on this device",
            )
        if kv_dtype == "int4" and NIBBLE_KV in self.lacks:
            raise RequestError(
                "this device has no kernels for keys and values in 4 bits, and int4 was asked for",
                remedy="install edge-inference[fast] on it, or ask for int8",
            )
        _prepare_process(self._threads)
        arrays = ShardArrays(layout, weights, weight_format)
        kinds = stacked_kinds(arrays, hidden_size=spec.hidden_size, threads=self._threads)
        provider = self._provider
        self_check = run_self_check(spec, arrays, _cpu_session, stacked=kinds, provider=provider)

        def fits(*, stacks_experts: bool) -> bool:
            room = weights.load_room_bytes
            wanted = load_bytes(layout, weight_format, stacks_experts=stacks_experts)
            return room is None or wanted <= room

        # Loading the whole shard at once would exceed the memory; layer by layer it does not.
        is_tight = not fits(stacks_experts=False)
        if not (stacks_fit := fits(stacks_experts=True)):
            kinds = {}

        def open_graphs(bits: int | None, streamed_layers: int) -> OpenGraphs:
            is_loose = bool(streamed_layers) or (is_tight and weights.packed is not None)
            with written_stacks(arrays, {} if is_loose else kinds, weights.packed) as stacks:
                return open_lowered(bits, streamed_layers, stacks, is_loose=is_loose)

        def open_lowered(
            bits: int | None, streamed_layers: int, stacks: Stacks, *, is_loose: bool
        ) -> OpenGraphs:
            segments = lower(
                spec,
                layout,
                _places(layout, arrays, weights, stacks.folder),
                weight_format,
                bits,
                stacks=stacks.by_layer,
                joins_experts=stacks_fit,
                cut_layers=limits.exceeds_memory,
                is_loose=is_loose,
                cuts_experts=bool(streamed_layers),
                observes=limits.observes,
                provider=provider,
            )
            folder = str(stacks.folder)
            ask_for_huge_pages()
            streamed: StreamedLayers | None = None
            embedding: EmbeddingRows | None = None
            mapped: WatchedFile | None = None
            if any(each.streamed is not None for each in segments):  # False without matrices
                streamed = StreamedLayers(
                    segments,
                    weights,
                    streamed=streamed_layers,
                    kept_experts=layout.streaming(streamed_layers).kept_experts,
                    options=_session_options,
                )
            try:
                sessions = tuple(
                    streamed.session(index)
                    if streamed is not None and each.streamed is not None
                    else _open_session(each, folder=folder)
                    for index, each in enumerate(segments)
                )
                # The unpacked weights are not read again.
                for path in (weights.path, *stacks.paths):
                    let_go_of(tuple(mappings_of(path)))
                release_freed_memory()
                use_huge_pages()
                leave_holes()
                if layout.is_first_stage or layout.token_columns:
                    embedding = EmbeddingRows(
                        weights,
                        layout.embedding,
                        spec.hidden_size,
                        scale=spec.embedding_scale,
                    )
                mapped = WatchedFile(
                    weights.path,
                    [
                        each
                        for each in weights.manifest.tensors
                        if not (is_loose and each.name.startswith("layers."))
                        or each.name.endswith("_post_norm")
                    ],
                )
                if streamed is not None:
                    streamed.start()
            except BaseException:
                if embedding is not None:
                    embedding.close()
                if streamed is not None:
                    streamed.close()
                if mapped is not None:
                    mapped.close()
                raise
            return OpenGraphs(segments, sessions, streamed, embedding, mapped)

        return OrtProgram(
            spec,
            layout,
            open_graphs,
            self_check=self_check,
            weight_bytes=weights.manifest.total_bytes,
            limits=limits,
            kv_dtype=kv_dtype,
            kv_tier=kv_tier,
            arena=Arena(_session_options()),
            provider=provider,
            lends_buffers=weights.lends_buffers,
        )

    def load_tower(
        self, part: TowerPart, weights: ShardWeights, weight_format: WeightFormat
    ) -> OrtTower:
        """See `open_tower`."""
        _prepare_process(self._threads)
        layout, folder = tower_layout(part), weights.path.parent
        arrays = ShardArrays(layout, weights, weight_format)
        place = _places(layout, arrays, weights, folder)
        provider = self._provider
        run_tower_check(part.tower, arrays, _cpu_session, provider=provider)
        segment = lower_tower(part, place, weight_format, provider=provider)
        session = _open_session(segment, folder=str(folder))
        let_go_of(tuple(mappings_of(weights.path)))
        release_freed_memory()
        return OrtTower(part, session, weights)


def _prepare_process(threads: int) -> None:
    """Make the process's thread pool and arena before its first session. They cannot change."""
    global _has_arena  # noqa: PLW0603 - mirrors state that onnxruntime keeps globally
    with _process:
        prepare_process(threads)
        if not _has_arena:
            make_arena()
            _has_arena = True


def _session_options() -> ort.SessionOptions:
    options = new_session_options()
    if (library := block_kernels.library()) is not None:
        options.register_custom_ops_library(str(library))
    # A memory pattern would add a large block at the second step of a size.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.use_env_allocators", "1")
    # Otherwise memory that packing used would stay in the arena.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # On ARM64, KleidiAI rounds the inputs of 4-bit products per row. Without it they are rounded
    # per block, as on x86 and as accuracy "high" needs.
    options.add_session_config_entry("mlas.disable_kleidiai", "1")
    return options


def _cpu_session(model: bytes) -> ort.InferenceSession:
    return ort.InferenceSession(model, _session_options(), providers=["CPUExecutionProvider"])


def _open_session(segment: GraphSegment, *, folder: str) -> ort.InferenceSession:
    options = _session_options()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return ort.InferenceSession(segment.model, options, providers=["CPUExecutionProvider"])


def _places(
    layout: ShardLayout, arrays: ShardArrays, weights: ShardWeights, folder: Path
) -> Callable[[str], ExternalTensor | NDArray[Any]]:
    """The tensors of graphs: matrices as places below the folder, because kernels pack them, and
    vectors as values. Kernels read vectors at each step, and reading a truncated mapped file would
    end the process."""
    vectors = {vector.name for vector in layout.vectors}
    location = str(weights.path.parent.resolve().relative_to(folder.resolve()) / weights.path.name)

    def place(name: str) -> ExternalTensor | NDArray[Any]:
        if name in vectors:
            return arrays.read(name)
        entry = arrays.entry(name)
        return ExternalTensor(
            location=location,
            offset=entry.offset,
            nbytes=entry.nbytes,
            dtype=numpy_dtype(entry.dtype),
            shape=entry.shape,
        )

    return place
