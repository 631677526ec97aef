"""Weight offload in ONNX Runtime: layers whose matrices are read from disk for each step.

The packed weights of all layers lie in one file, made once from the shard. Each layer has sessions
over memory that is filled from the file, once or before each use. Experts have no sessions; experts
of a kind share places, which have them.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights, WeightReads
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.segments import GraphSegment, Streamed, StreamedExperts
from edge.backends.ort.expert_places import ExpertPlace
from edge.backends.ort.prepacking import (
    LooseSession,
    Template,
    make_template,
    open_loose,
    packing_key,
)
from edge.errors import CheckpointError, RequestError
from edge.offload import (
    PIECE_BYTES,
    CachedShard,
    DirectReader,
    ExpertCache,
    Extent,
    ExtentSpan,
    StoreCorruptError,
    WeightStreamer,
)
from edge.partition.plan.expert_tiers import (
    PLACE_BYTES,
    WINDOW_LAYERS,
    ExpertTiers,
    LayerBytes,
    expert_bytes,
    expert_tiers,
)
from edge.system.heap import leave_holes, release_freed_memory
from edge.system.page_supply import PageSupply, want_huge_pages

Options = Callable[[], ort.SessionOptions]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The streamed segments of one layer, by their index in the program."""

    number: int
    segments: tuple[int, ...]

    def kinds(self, segments: Sequence[GraphSegment]) -> tuple[str, ...]:
        return tuple(_streamed(segments[index]).kind for index in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One kind of experts."""

    template: Template
    example: bytes
    """The graph of the last one of the kind."""
    name: str
    """Name of the example's packed weights."""


class StreamedLayers:
    """The loose segments of a program. `begin` and `end` enclose each one's run, in order."""

    def __init__(
        self,
        segments: Sequence[GraphSegment],
        weights: ShardWeights,
        *,
        streamed: int,
        kept_experts: int,
        options: Options,
    ) -> None:
        """Pack layers that are not packed yet, and make the sessions. Reading begins with `start`.

        streamed: number of layers that are read for each step. kept_experts: number of their
        experts that stay in memory.

        Raises CheckpointError for damaged weights, RequestError if layers cannot be streamed here,
        StoreError if the disk is full.
        """
        if weights.packed is None:
            raise RequestError("there is no folder to keep packed weights in")
        self._cache = weights.packed
        self._key = ""
        self._segments = segments
        self._options = options
        self._folder = str(weights.path.parent)
        self._layers = tuple(_layers(segments))
        self._sessions: dict[int, LooseSession] = {}
        self._streamed = streamed
        self._kept_experts = kept_experts
        self._lent_bytes = 0
        self._streamer: WeightStreamer | None = None
        self._experts: ExpertCache[ExpertPlace] | None = None
        self._group: dict[int, int] = {}
        """The expert cache's group for each segment that experts follow."""
        self._kinds: dict[str, _Kind] = {}
        self._bytes: tuple[LayerBytes, ...] = ()
        self._kept = ExpertTiers(streamed=streamed, cache_bytes=0)
        self._position = {
            index: (position, part)
            for position, layer in enumerate(self._layers)
            for part, index in enumerate(layer.segments)
        }
        self._pages = PageSupply()
        self._expert_pages = PageSupply()
        """Separate supplies, because two threads use them at once."""
        self._held: AbstractContextManager[None] | None = None
        self._scratch = ExitStack()
        self._vectors = _read_vectors(segments, weights)
        self._packed = self._find_or_pack(weights)
        self._tensors = {each.name: each for each in self._packed.manifest.tensors}
        try:
            for kinds in dict.fromkeys(layer.kinds(segments) for layer in self._layers):
                self._open([each for each in self._layers if each.kinds(segments) == kinds])
            self._open_experts()
        except (StoreCorruptError, CheckpointError):
            self._cache.discard(self._key)
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Begin to read weights into memory."""
        memories = [self._memory(layer) for layer in self._layers]
        for memory in memories:
            want_huge_pages(memory)
        self._bytes = tuple(map(self._layer_bytes, self._layers))
        self._kept = tiers = self._tiers()
        reader = DirectReader(self._packed.path)
        try:
            self._streamer = WeightStreamer(
                [self._extent(each) for each in self._layers],
                memories,
                reader,
                resident=len(self._layers) - tiers.streamed,
                window=WINDOW_LAYERS,
                pages=self._pages,
            )
            sparse = [index for index in self._position if self._experts_of(index) is not None]
            if sparse:
                self._group = {index: group for group, index in enumerate(sparse)}
                self._experts = ExpertCache(
                    [self._expert_extents(index) for index in sparse],
                    [self._kind_number(index) for index in sparse],
                    self._open_place,
                    reader,
                    capacity_bytes=tiers.cache_bytes,
                    place_bytes=PLACE_BYTES,
                    pages=self._expert_pages,
                )
        except BaseException:
            reader.close()
            raise

    @property
    def streamed(self) -> int:
        """Number of layers that are read for each step."""
        return self._streamed

    @property
    def brings_whole_layers(self) -> bool:
        """Whether layers are read with all of their experts."""
        return self._experts is None

    def stream(self, count: int, kept_experts: int) -> None:
        """Read `count` layers for each step from now on, and keep this many of their experts."""
        self._streamed = count
        self._kept_experts = kept_experts
        self._lent_bytes = 0
        self._keep(for_good=True)

    def lend(self, nbytes: int) -> None:
        """Keep up to that much more of the streamed weights in memory, until the next call. Any
        excess is released before this returns."""
        if nbytes != self._lent_bytes:
            self._lent_bytes = nbytes
            self._keep(for_good=False)

    def _keep(self, *, for_good: bool) -> None:
        """Apply the sizes of layers and experts that stay. Releases memory before it takes any."""
        before, tiers = self._kept, self._tiers()
        if self._experts is not None:
            least = min(before.cache_bytes, tiers.cache_bytes)
            self._experts.keep(least, for_good=for_good)
        self._running.keep(len(self._layers) - tiers.streamed)
        if self._experts is not None:
            self._experts.keep(tiers.cache_bytes, for_good=for_good)
        self._kept = tiers

    def _tiers(self) -> ExpertTiers:
        streamed, lent_bytes = self._streamed, self._lent_bytes
        if not expert_bytes(self._bytes):
            largest = max(each.total for each in self._bytes)
            return ExpertTiers(streamed=max(0, streamed - lent_bytes // largest), cache_bytes=0)
        spare_bytes = lent_bytes + self._kept_experts * expert_bytes(self._bytes)
        return expert_tiers(self._bytes, streamed, spare_bytes=spare_bytes)

    @property
    def reads(self) -> WeightReads:
        """Bytes and experts read from disk since loading."""
        nbytes, cache = self._running.bytes_read, self._experts
        if cache is None:
            return WeightReads(nbytes=nbytes)
        return WeightReads(nbytes=nbytes, experts=cache.uses, experts_read=cache.reads)

    @property
    def wait_s(self) -> float:
        """Seconds that steps waited for the disk."""
        return self._running.wait_s + (0.0 if self._experts is None else self._experts.wait_s)

    def vectors(self, index: int) -> dict[str, NDArray[np.float32]]:
        """The segment's vectors, by input."""
        return {
            name: self._vectors[tensor] for name, tensor in _streamed(self._segments[index]).vectors
        }

    def session(self, index: int) -> ort.InferenceSession:
        return self._sessions[index].session

    def begin(self, index: int) -> None:
        """Wait until the segment's weights are in memory."""
        position, part = self._position[index]
        if part == 0:
            held = self._running.extent(position)
            try:
                held.__enter__()
            except StoreCorruptError:
                self._cache.discard(self._key)  # the next load makes it again
                raise
            self._held = held

    def end(self, index: int) -> None:
        """Mark the segment as computed. After its last segment a layer may be released."""
        position, part = self._position[index]
        if part + 1 == len(self._layers[position].segments) and self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None

    def experts(
        self, index: int, rows: NDArray[np.int64], *, tokens: int
    ) -> Generator[Sequence[tuple[int, ExpertPlace]], None, None]:
        """The experts after a segment that have rows, in runs of experts that are in memory.

        rows [experts]: number of the step's `tokens` for each.
        """
        assert self._experts is not None
        try:
            yield from self._experts.runs(self._group[index], rows.tolist(), tokens=tokens)
        except StoreCorruptError:
            self._cache.discard(self._key)
            raise

    def biases(self, index: int, number: int) -> dict[str, NDArray[np.float32]]:
        """An expert's biases, by input of its graph."""
        experts = self._own_experts(index)
        return {
            name: self._vectors[tensor].reshape(len(experts.models), -1)[number]
            for name, tensor in experts.biases
        }

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()
        if self._streamer is not None:
            self._streamer.close()
        self._pages.close()
        self._expert_pages.close()
        self._sessions.clear()
        self._experts = None
        self._scratch.close()
        self._packed.close()

    @property
    def _running(self) -> WeightStreamer:
        assert self._streamer is not None
        return self._streamer

    def _open(self, layers: Sequence[_Layer]) -> None:
        """Make the sessions of layers with equal graphs, from the packed weights of the first."""
        with self._cache.scratch() as folder:
            templates = self._templates(layers[0], folder)
            for layer in layers:
                for index, template in zip(layer.segments, templates, strict=True):
                    self._sessions[index] = open_loose(template, options=self._options)
                    release_freed_memory()
        self._check(layers[-1])

    def _open_experts(self) -> None:
        """Make the templates from which places of each kind of expert are made."""
        for index, (position, _part) in self._position.items():
            experts = self._experts_of(index)
            if experts is None:
                continue
            known = self._kinds.get(experts.kind)
            if known is None:
                folder = self._scratch.enter_context(self._cache.scratch())
                template = self._template(experts.models[0], folder)
            else:
                template = known.template
            number = len(experts.models) - 1
            self._kinds[experts.kind] = _Kind(
                template=template,
                example=experts.models[number],
                name=_expert_name(self._layers[position].number, number),
            )
        for number, kind in enumerate(self._kinds.values()):
            self._check_place(self._open_place(number), kind)

    def _open_place(self, kind: int) -> ExpertPlace:
        loose = open_loose(list(self._kinds.values())[kind].template, options=self._place_options)
        release_freed_memory()
        leave_holes()  # for places that are made one after the other while steps run
        return ExpertPlace(loose)

    def _place_options(self) -> ort.SessionOptions:
        """Session options without optimisation: packed graphs are optimised already, and another
        pass takes 40 KiB a session."""
        options = self._options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options

    def _kind_number(self, index: int) -> int:
        return list(self._kinds).index(self._own_experts(index).kind)

    def _experts_of(self, index: int) -> StreamedExperts | None:
        """The experts after a segment."""
        return _streamed(self._segments[index]).experts

    def _own_experts(self, index: int) -> StreamedExperts:
        experts = self._experts_of(index)
        assert experts is not None
        return experts

    def _memory(self, layer: _Layer) -> list[memoryview]:
        """Memory of a layer's packed weights, all but its experts."""
        return [part for index in layer.segments for part in self._sessions[index].parts]

    def _extent(self, layer: _Layer) -> Extent:
        names = [
            f"{layer.number}.{part}.{number}"
            for part, index in enumerate(layer.segments)
            for number in range(len(self._sessions[index].parts))
        ]
        return self._place_in_file(names, [len(part) for part in self._memory(layer)])

    def _expert_extents(self, index: int) -> list[Extent]:
        layer = self._layers[self._position[index][0]].number
        experts = self._own_experts(index)
        template = self._kinds[experts.kind].template
        return [
            self._expert_extent(_expert_name(layer, number), template)
            for number in range(len(experts.models))
        ]

    def _expert_extent(self, name: str, template: Template) -> Extent:
        names = [f"{name}.{number}" for number in range(len(template.blobs))]
        return self._place_in_file(names, [_whole_pages(blob.nbytes) for blob in template.blobs])

    def _place_in_file(self, names: Sequence[str], sizes: Sequence[int]) -> Extent:
        """The extent of packed weights in the file, in parts of these sizes."""
        found = [self._tensors[name] for name in names if name in self._tensors]
        if [_whole_pages(tensor.nbytes) for tensor in found] != list(sizes):
            raise CheckpointError(
                f"the packed weights {', '.join(names)} in {self._packed.path} do not fit their "
                "graphs",
                remedy="load the model again",
            )
        return [
            ExtentSpan(
                offset=tensor.offset + number * PIECE_BYTES,
                nbytes=piece.nbytes,
                part=part,
                part_offset=number * PIECE_BYTES,
                digest=piece.digest,
            )
            for part, tensor in enumerate(found)
            for number, piece in enumerate(tensor.pieces)
        ]

    def _layer_bytes(self, layer: _Layer) -> LayerBytes:
        others = sum(map(len, self._memory(layer)))
        for index in layer.segments:
            experts = self._experts_of(index)
            if experts is not None:
                blobs = self._kinds[experts.kind].template.blobs
                count = len(experts.models)
                return LayerBytes(
                    others=others,
                    experts=count * sum(_whole_pages(each.nbytes) for each in blobs),
                    num_experts=count,
                    top_k=experts.top_k,
                )
        return LayerBytes(others=others)

    def _find_or_pack(self, weights: ShardWeights) -> CachedShard:
        """The file with the packed weights of all loose layers. Makes it if it is missing."""
        loose = [self._segments[index].model for index in self._position]
        for index in self._position:
            experts = self._experts_of(index)
            loose += [] if experts is None else experts.models
        graphs = hashlib.sha256(b"".join(loose)).hexdigest()
        self._key = f"{packing_key()} {weights.manifest.digest} {graphs}"
        return self._cache.get(self._key) or self._pack(weights)

    def _pack(self, weights: ShardWeights) -> CachedShard:
        made_of = weights.path.parent
        total_bytes = 2 * weights.manifest.total_bytes
        with self._cache.begin(self._key, total_bytes, made_of=made_of) as writer:

            def pack(model: bytes, name: str) -> None:
                with self._cache.scratch() as folder:
                    template = self._template(model, folder)
                    for number, blob in enumerate(template.blobs):
                        writer.add(f"{name}.{number}", template.read(blob))

            for layer in self._layers:
                for part, index in enumerate(layer.segments):
                    pack(self._segments[index].model, f"{layer.number}.{part}")
                    experts = self._experts_of(index)
                    for number, model in enumerate(() if experts is None else experts.models):
                        pack(model, _expert_name(layer.number, number))
            return writer.finish()

    def _templates(self, layer: _Layer, folder: Path) -> list[Template]:
        made = []
        for index in layer.segments:
            own = folder / str(index)
            own.mkdir()
            made.append(self._template(self._segments[index].model, own))
        return made

    def _template(self, model: bytes, folder: Path) -> Template:
        made = make_template(
            model, weights_folder=self._folder, folder=folder, options=self._options
        )
        release_freed_memory()
        return made

    def _check(self, layer: _Layer) -> None:
        """Check that sessions made from another layer's weights compute this layer bit for bit.

        This detects kernels that keep a weight elsewhere than in their blob, before they can make a
        wrong token.
        """
        memory = self._memory(layer)
        self._read(self._extent(layer), memory)
        for index in layer.segments:
            vectors = self.vectors(index)
            self._compare(self._segments[index].model, self.session(index), vectors)
        self._pages.hand_on(memory, None)
        release_freed_memory()

    def _check_place(self, place: ExpertPlace, kind: _Kind) -> None:
        """Check that a place made from a kind's first expert computes its last one."""
        self._read(self._expert_extent(kind.name, kind.template), place.memory)
        self._compare(kind.example, place.session, {})
        self._expert_pages.hand_on(place.memory, None)
        release_freed_memory()

    def _read(self, extent: Extent, memory: Sequence[memoryview]) -> None:
        reader = DirectReader(self._packed.path)
        try:
            for span in extent:
                reader.read([span.read_into(memory)])
        finally:
            reader.close()

    def _compare(
        self,
        model: bytes,
        loose: ort.InferenceSession,
        vectors: dict[str, NDArray[np.float32]],
    ) -> None:
        options = self._options()
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", self._folder
        )
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        feeds = _feeds(session, vectors)
        expected = session.run(None, feeds)
        caches = [each.name.startswith(_CACHES) for each in session.get_outputs()]
        del session
        for is_cache, *both in zip(caches, expected, loose.run(None, feeds), strict=True):
            # Rows of a window behind the only token are of any content.
            one, other = (each[:, :, :1] if is_cache else each for each in both)
            if not np.array_equal(one, other, equal_nan=True):
                raise RequestError(
                    f"the kernels of onnxruntime {ort.__version__} keep weights where they "
                    "cannot be exchanged on this device, so they cannot be streamed",
                    remedy="give the peer more --memory, or share the model with more peers",
                )


def _layers(segments: Sequence[GraphSegment]) -> Iterator[_Layer]:
    """Streamed layers in order, with the segments of each."""
    found: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        if segment.streamed is not None:
            found.setdefault(segment.streamed.layer, []).append(index)
    for number, indices in found.items():
        yield _Layer(number, tuple(indices))


def _streamed(segment: GraphSegment) -> Streamed:
    assert segment.streamed is not None
    return segment.streamed


def _expert_name(layer: int, number: int) -> str:
    """The prefix of the names of an expert's packed weights."""
    return f"{layer}.experts.{number}"


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _read_vectors(
    segments: Sequence[GraphSegment], weights: ShardWeights
) -> dict[str, NDArray[np.float32]]:
    """Norms and biases of the streamed layers, which stay in memory because they are small."""
    entries = {entry.name: entry for entry in weights.manifest.tensors}
    layers = [each.streamed for each in segments if each.streamed is not None]
    names = [tensor for each in layers for _, tensor in each.vectors]
    names += [tensor for each in layers if each.experts for _, tensor in each.experts.biases]
    return {
        name: np.fromfile(
            weights.path,
            np.float32,
            entries[name].nbytes // 4,
            offset=entries[name].offset,
        ).reshape(entries[name].shape)
        for name in names
    }


_CACHES = ("present_key", "present_value")

_VALUES = (
    "hidden",
    "partial",
    "expert_results",
    "expert_weights",
    "x",
    "gate_up_bias",
    "down_bias",
)
"""Inputs that come from other graphs, or differ between experts."""


def _feeds(
    session: ort.InferenceSession, vectors: dict[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.generic]]:
    """Inputs of a segment for a small step: one token at the start of an empty cache."""
    kinds = {
        "tensor(float)": np.float32,
        "tensor(int64)": np.int64,
        "tensor(int32)": np.int32,
        "tensor(int8)": np.int8,
        "tensor(uint8)": np.uint8,
    }
    sizes = {"batch": 1, "requests": 1, "tokens": 1, "rows": 1, "context": 8, "routed_rows": 1}
    feeds: dict[str, NDArray[np.generic]] = dict(vectors)
    routed = [each.shape[1] for each in session.get_inputs() if each.name == "expert_weights"]
    if routed:
        feeds["expert_ranks"] = np.arange(routed[0])
        sizes["most_results"] = routed[0]
    generator = np.random.default_rng(0)
    for each in session.get_inputs():
        if each.name not in feeds:
            shape = [sizes.get(size, size) for size in each.shape]
            if each.name in _VALUES:
                feeds[each.name] = generator.standard_normal(shape, np.float32)
            elif each.name in {"total", "counts"} or each.name.endswith("_scales"):
                feeds[each.name] = np.ones(shape, kinds[each.type])
            else:
                feeds[each.name] = np.zeros(shape, kinds[each.type])
    return feeds
