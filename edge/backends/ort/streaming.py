"""Layers whose matrices come from disk for each step, in ONNX Runtime.

The packed weights of every layer lie in one file, made once from the shard. Each layer has sessions
of its own over memory that is filled from it: for good, or just before each use.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.backends.ort.page_pool import PageSupply
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
    WeightStreamer,
)
from edge.partition.plan.shard import WINDOW_LAYERS

Options = Callable[[], ort.SessionOptions]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The streamed segments of one layer, by their place in the program."""

    number: int
    segments: tuple[int, ...]

    def kinds(self, segments: Sequence[GraphSegment]) -> tuple[str, ...]:
        return tuple(_streamed(segments[index]).kind for index in self.segments)


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
        self._position = {
            index: (position, part)
            for position, layer in enumerate(self._layers)
            for part, index in enumerate(layer.segments)
        }
        self._pages = PageSupply()
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
        extents = [self._extent(layer) for layer in self._layers]
        reader = DirectReader(self._packed.path)
        try:
            self._streamer = WeightStreamer(
                extents,
                [self._memory(layer) for layer in self._layers],
                reader,
                resident=len(self._layers) - self._streamed,
                window=WINDOW_LAYERS,
                pages=self._pages,
            )
        except BaseException:
            reader.close()
            raise

    @property
    def streamed(self) -> int:
        """How many layers are read for each step."""
        return self._streamed

    @property
    def layer_bytes(self) -> int:
        """What the largest layer takes while it is in memory."""
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
        self._running.keep(len(self._layers) - self._streamed + self._lent)

    @property
    def bytes_read(self) -> int:
        """From disk since loading."""
        return self._running.bytes_read

    @property
    def wait_s(self) -> float:
        """Seconds that steps waited for the disk."""
        return self._running.wait_s

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

    def close(self) -> None:
        if self._streamer is not None:
            self._streamer.close()
        self._pages.close()
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
                        "cannot be exchanged on this device, so they cannot be streamed; give "
                        "the peer more --memory, or share the model with more peers"
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
            f"the packed weights of layer {layer.number} do not fit its graph; load the model again"
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
    sizes = {"batch": 1, "tokens": 1, "rows": 1, "context": 8}
    generator = np.random.default_rng(0)
    feeds: dict[str, NDArray[np.generic]] = dict(vectors)
    for each in session.get_inputs():
        if each.name not in feeds:
            shape = [sizes.get(size, size) for size in each.shape]
            if each.name in ("hidden", "partial"):
                feeds[each.name] = generator.standard_normal(shape, np.float32)
            elif each.name == "total" or each.name.endswith("_scales"):
                feeds[each.name] = np.ones(shape, kinds[each.type])
            else:
                feeds[each.name] = np.zeros(shape, kinds[each.type])
    return feeds
