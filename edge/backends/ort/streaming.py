"""Layers whose matrices come from disk for each step, in ONNX Runtime.

The packed weights of every layer lie in one file, made once from the shard. Each layer has sessions
of its own over memory that is filled from it: for good, or just before each use.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights, WeightReads
from edge.backends.ort.page_pool import PageSupply, want_huge_pages
from edge.backends.ort.prepacking import (
    LooseSession,
    Template,
    make_template,
    open_loose,
    packing_key,
)
from edge.backends.ort.runtime import ort
from edge.backends.ort.segments import GraphSegment, Streamed
from edge.errors import CheckpointError, RequestError
from edge.host.huge_pages import release_freed_memory
from edge.offload import (
    PIECE_BYTES,
    CachedShard,
    DirectReader,
    Extent,
    Span,
    StoreCorruptError,
    UnitCache,
    WeightStreamer,
)
from edge.partition.plan.expert_tiers import WINDOW_LAYERS, ExpertTiers, LayerBytes, expert_tiers

Options = Callable[[], ort.SessionOptions]

_OF_EXPERT = re.compile(r"experts\.([0-9]+)\.(gate_up|down)\.")
"""What names of an expert's matrices begin with in a graph of its layer."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The streamed segments of one layer, by their place in the program."""

    number: int
    segments: tuple[int, ...]

    def kinds(self, segments: Sequence[GraphSegment]) -> tuple[str, ...]:
        return tuple(_streamed(segments[index]).kind for index in self.segments)


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is brought in together."""

    memory: tuple[memoryview, ...]
    extent: Extent

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Of one layer."""

    others: _Unit
    experts: tuple[_Unit, ...]
    top_k: int

    @property
    def layer_bytes(self) -> LayerBytes:
        return LayerBytes(
            others=self.others.nbytes,
            experts=sum(unit.nbytes for unit in self.experts),
            num_experts=len(self.experts),
            top_k=self.top_k,
        )


class StreamedLayers:
    """The loose segments of a program. `begin` and `end` enclose each, in their order."""

    def __init__(
        self,
        segments: Sequence[GraphSegment],
        weights: ShardWeights,
        *,
        streamed: int,
        options: Options,
    ) -> None:
        """Packs what is not packed yet, makes the sessions, reads nothing before `start`.

        `streamed`: how many layers are read for each step.

        Raises CheckpointError for damaged weights, RequestError where this cannot be done,
        StoreError when the disk is full.
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
        self._lent = 0
        self._streamer: WeightStreamer | None = None
        self._experts: UnitCache | None = None
        self._group: dict[int, int] = {}
        """Of each segment of experts, which of the cache's groups they are."""
        self._bytes: tuple[LayerBytes, ...] = ()
        self._kept = ExpertTiers(streamed=streamed, cache_bytes=0)
        self._position = {
            index: (position, part)
            for position, layer in enumerate(self._layers)
            for part, index in enumerate(layer.segments)
        }
        self._pages = PageSupply()
        self._expert_pages = PageSupply()
        """The two are used by different threads at once."""
        self._held: AbstractContextManager[None] | None = None
        self._vectors = _read_vectors(segments, weights)
        self._packed = self._find_or_pack(weights)
        try:
            for kinds in dict.fromkeys(layer.kinds(segments) for layer in self._layers):
                self._open([each for each in self._layers if each.kinds(segments) == kinds])
        except (StoreCorruptError, CheckpointError):
            self._cache.discard(self._key)
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Begin to read: from now on weights take memory."""
        parts = [self._parts(layer) for layer in self._layers]
        for layer in self._layers:
            want_huge_pages(self._memory(layer))
        self._bytes = tuple(each.layer_bytes for each in parts)
        self._kept = tiers = self._tiers()
        reader = DirectReader(self._packed.path)
        try:
            self._streamer = WeightStreamer(
                [each.others.extent for each in parts],
                [each.others.memory for each in parts],
                reader,
                resident=len(self._layers) - tiers.streamed,
                window=WINDOW_LAYERS,
                pages=self._pages,
            )
            sparse = [each for each in parts if each.experts]
            if sparse:
                segments = [i for i in self._position if _streamed(self._segments[i]).experts]
                self._group = {index: group for group, index in enumerate(segments)}
                self._experts = UnitCache(
                    [[unit.extent for unit in each.experts] for each in sparse],
                    [[unit.memory for unit in each.experts] for each in sparse],
                    reader,
                    capacity_bytes=tiers.cache_bytes,
                    pages=self._expert_pages,
                )
        except BaseException:
            reader.close()
            raise

    @property
    def streamed(self) -> int:
        """How many layers are read for each step."""
        return self._streamed

    @property
    def brings_whole_layers(self) -> bool:
        """Experts are brought in with all others of their layer, if there are any."""
        return self._experts is None

    @property
    def layer_bytes(self) -> int:
        """What the largest layer takes while all of it is in memory."""
        return max(sum(map(len, self._memory(layer))) for layer in self._layers)

    def stream(self, count: int) -> None:
        """Read so many layers for each step from now on."""
        self._streamed = count
        self._lent = 0
        self._keep()

    def lend(self, layers: int) -> None:
        """So many of those that are read for each step stay in memory until this says otherwise;
        what is too many then has left it when this returns."""
        layers = min(layers, self._streamed)
        if layers != self._lent:
            self._lent = layers
            self._keep()

    def _keep(self) -> None:
        """Whatever gives memory does so before something else takes it."""
        before, tiers = self._kept, self._tiers()
        if self._experts is not None:
            self._experts.keep(min(before.cache_bytes, tiers.cache_bytes))
        self._running.keep(len(self._layers) - tiers.streamed)
        if self._experts is not None:
            self._experts.keep(tiers.cache_bytes)
        self._kept = tiers

    def _tiers(self) -> ExpertTiers:
        return expert_tiers(self._bytes, self._streamed - self._lent)

    @property
    def reads(self) -> WeightReads:
        """From disk since loading."""
        nbytes, cache = self._running.bytes_read, self._experts
        if cache is None:
            return WeightReads(nbytes=nbytes)
        return WeightReads(nbytes=nbytes, experts=cache.uses, experts_read=cache.reads)

    @property
    def wait_s(self) -> float:
        """Seconds that steps waited for the disk."""
        return self._running.wait_s + (0.0 if self._experts is None else self._experts.wait_s)

    def vectors(self, index: int) -> dict[str, NDArray[np.float32]]:
        """What the segment takes besides its matrices, by input."""
        return {
            name: self._vectors[tensor] for name, tensor in _streamed(self._segments[index]).vectors
        }

    def session(self, index: int) -> ort.InferenceSession:
        return self._sessions[index].session

    def begin(self, index: int) -> None:
        """The segment's weights are in their place when this returns; waits for the disk."""
        position, part = self._position[index]
        if part == 0:
            held = self._running.extent(position)
            try:
                held.__enter__()
            except StoreCorruptError:
                self._cache.discard(self._key)  # made anew at the next load
                raise
            self._held = held

    def end(self, index: int) -> None:
        """The segment is computed; after its layer's last one the layer may be let go."""
        position, part = self._position[index]
        if part + 1 == len(self._layers[position].segments) and self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None

    def experts(
        self, index: int, rows: NDArray[np.int64], *, tokens: int
    ) -> Generator[Sequence[int], None, None]:
        """Those of a segment of experts that have rows, in runs, each in memory for its turn.

        rows [experts]: how many of the step's `tokens` go through each.
        """
        assert self._experts is not None
        try:
            yield from self._experts.runs(self._group[index], rows.tolist(), tokens=tokens)
        except StoreCorruptError:
            self._cache.discard(self._key)
            raise

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()
        if self._streamer is not None:
            self._streamer.close()
        self._pages.close()
        self._expert_pages.close()
        self._sessions.clear()
        self._packed.close()

    @property
    def _running(self) -> WeightStreamer:
        assert self._streamer is not None
        return self._streamer

    def _open(self, layers: Sequence[_Layer]) -> None:
        """Sessions for layers with the same graphs: all are made of what the first one packs."""
        with self._cache.scratch() as folder:
            templates = self._templates(layers[0], folder)
            for layer in layers:
                for index, template in zip(layer.segments, templates, strict=True):
                    self._sessions[index] = open_loose(template, options=self._options)
                    release_freed_memory()
        self._check(layers[-1])

    def _memory(self, layer: _Layer) -> list[memoryview]:
        return [part for index in layer.segments for part in self._sessions[index].parts]

    def _extent(self, layer: _Layer) -> Extent:
        return _extent(layer, self._packed, self._memory(layer))

    def _parts(self, layer: _Layer) -> _Parts:
        """The layer's memory, that of each expert apart."""
        owners: list[int | None] = []
        count = top_k = 0
        for index in layer.segments:
            segment = _streamed(self._segments[index])
            count, top_k = count or segment.experts, top_k or segment.top_k
            for weight in self._sessions[index].weights:
                found = _OF_EXPERT.match(weight) if segment.experts else None
                owners.append(None if found is None else int(found[1]))
        memory, extent = self._memory(layer), self._extent(layer)
        return _Parts(
            others=_unit(memory, extent, owners, None),
            experts=tuple(_unit(memory, extent, owners, number) for number in range(count)),
            top_k=top_k,
        )

    def _find_or_pack(self, weights: ShardWeights) -> CachedShard:
        """The file with every loose layer's packed weights; made if it is not there."""
        loose = [self._segments[index].model for index in self._position]
        graphs = hashlib.sha256(b"".join(loose)).hexdigest()
        self._key = f"{packing_key()} {weights.manifest.digest} {graphs}"
        return self._cache.get(self._key) or self._pack(weights)

    def _pack(self, weights: ShardWeights) -> CachedShard:
        made_of = weights.path.parent
        total_bytes = 2 * weights.manifest.total_bytes
        with self._cache.begin(self._key, total_bytes, made_of=made_of) as writer:
            for layer in self._layers:
                with self._cache.scratch() as folder:
                    for part, template in enumerate(self._templates(layer, folder)):
                        for number, blob in enumerate(template.blobs):
                            name = f"{layer.number}.{part}.{number}"
                            writer.add(name, template.read(blob))
            return writer.finish()

    def _templates(self, layer: _Layer, folder: Path) -> list[Template]:
        made = []
        for index in layer.segments:
            own = folder / str(index)
            own.mkdir()
            model = self._segments[index].model
            made.append(
                make_template(model, weights_folder=self._folder, folder=own, options=self._options)
            )
            release_freed_memory()
        return made

    def _check(self, layer: _Layer) -> None:
        """The layer's sessions, made of another layer's weights, must compute it bit for bit.

        What a blob holds is the kernels' own affair: should some kernel keep a weight elsewhere,
        it is noticed here, before it could make a wrong token.
        """
        memory = self._memory(layer)
        reader = DirectReader(self._packed.path)
        try:
            for span in self._extent(layer):
                reader.read([span.read_into(memory)])
        finally:
            reader.close()
        for index in layer.segments:
            options = self._options()
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", self._folder
            )
            session = ort.InferenceSession(
                self._segments[index].model, options, providers=["CPUExecutionProvider"]
            )
            feeds = _feeds(session, self.vectors(index))
            expected = session.run(None, feeds)
            del session
            for one, other in zip(expected, self.session(index).run(None, feeds), strict=True):
                if not np.array_equal(one, other, equal_nan=True):
                    raise RequestError(
                        f"the kernels of onnxruntime {ort.__version__} keep weights where they "
                        "cannot be exchanged on this device, so they cannot be streamed",
                        remedy="give the peer more --memory, or share the model with more peers",
                    )
        self._pages.hand_on(memory, None)
        release_freed_memory()


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


def _extent(layer: _Layer, packed: CachedShard, memory: Sequence[memoryview]) -> Extent:
    """Where the layer's packed weights lie in the file, piece by piece, and in its memory."""
    mine = [t for t in packed.manifest.tensors if t.name.startswith(f"{layer.number}.")]
    sizes = [-(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for tensor in mine]
    if sizes != [len(part) for part in memory]:
        raise CheckpointError(
            f"the packed weights of layer {layer.number} do not fit its graph",
            remedy="load the model again",
        )
    return [
        Span(
            offset=tensor.offset + number * PIECE_BYTES,
            nbytes=piece.nbytes,
            part=part,
            part_offset=number * PIECE_BYTES,
            digest=piece.digest,
        )
        for part, tensor in enumerate(mine)
        for number, piece in enumerate(tensor.pieces)
    ]


def _unit(
    memory: Sequence[memoryview], extent: Extent, owners: Sequence[int | None], owner: int | None
) -> _Unit:
    """The parts of one owner."""
    parts = [part for part, each in enumerate(owners) if each == owner]
    places = {part: place for place, part in enumerate(parts)}
    return _Unit(
        memory=tuple(memory[part] for part in parts),
        extent=[replace(span, part=places[span.part]) for span in extent if span.part in places],
    )


def _read_vectors(
    segments: Sequence[GraphSegment], weights: ShardWeights
) -> dict[str, NDArray[np.float32]]:
    """Norms and biases of the streamed layers; small, so they stay."""
    entries = {entry.name: entry for entry in weights.manifest.tensors}
    names = [tensor for s in segments if s.streamed is not None for _, tensor in s.streamed.vectors]
    return {
        name: np.fromfile(
            weights.path,
            np.float32,
            entries[name].nbytes // 4,
            offset=entries[name].offset,
        ).reshape(entries[name].shape)
        for name in names
    }


def _feeds(
    session: ort.InferenceSession, vectors: dict[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.generic]]:
    """A small step for a segment: one token at the start of an empty cache."""
    kinds = {
        "tensor(float)": np.float32,
        "tensor(int64)": np.int64,
        "tensor(int32)": np.int32,
        "tensor(int8)": np.int8,
        "tensor(uint8)": np.uint8,
    }
    sizes = {"batch": 1, "tokens": 1, "rows": 1, "context": 8, "routed_rows": 1}
    feeds: dict[str, NDArray[np.generic]] = dict(vectors)
    experts = [each.shape[0] for each in session.get_inputs() if each.name == "expert_used"]
    routed = [each.shape[1] for each in session.get_inputs() if each.name == "expert_weights"]
    if experts:  # the token goes through all of them, and the result of each is looked at
        order = np.arange(experts[0])
        feeds |= {"expert_used": np.ones_like(order), "expert_sources": np.zeros_like(order)}
        feeds |= {"expert_starts": order, "expert_stops": order + 1}
    if routed:
        feeds["expert_ranks"] = np.arange(routed[0])
        sizes["most_results"] = routed[0]
    generator = np.random.default_rng(0)
    for each in session.get_inputs():
        if each.name not in feeds:
            shape = [sizes.get(size, size) for size in each.shape]
            if each.name in ("hidden", "partial", "expert_results", "expert_weights"):
                feeds[each.name] = generator.standard_normal(shape, np.float32)
            elif each.name == "total" or each.name.endswith("_scales"):
                feeds[each.name] = np.ones(shape, kinds[each.type])
            else:
                feeds[each.name] = np.zeros(shape, kinds[each.type])
    return feeds
