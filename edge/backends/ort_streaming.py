"""Layers whose matrices come from disk for each step, in ONNX Runtime.

The packed weights of every streamed layer lie in one file, made once from the shard. A few slots,
each with the sessions of one layer, take turns: while one computes, the next are being filled.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.backends.base import ShardWeights
from edge.backends.onnx_runtime import ort
from edge.backends.ort_graphs import GraphSegment, Streamed
from edge.backends.ort_packing import (
    SlotSession,
    Template,
    make_template,
    open_slot,
    packing_key,
)
from edge.errors import CheckpointError, RequestError
from offload import (
    PIECE_BYTES,
    CachedShard,
    DirectReader,
    Extent,
    Span,
    StoreCorruptError,
    WeightStreamer,
)
from partition.memory import WINDOW_LAYERS

Options = Callable[[], ort.SessionOptions]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The streamed segments of one layer, by their place in the program."""

    number: int
    segments: tuple[int, ...]

    def kinds(self, segments: Sequence[GraphSegment]) -> tuple[str, ...]:
        return tuple(_streamed(segments[index]).kind for index in self.segments)


class StreamedLayers:
    """The streamed segments of a program. `begin` and `end` enclose each, in their order."""

    def __init__(
        self, segments: Sequence[GraphSegment], weights: ShardWeights, *, options: Options
    ) -> None:
        """Packs what is not packed yet, makes the slots, and begins to read.

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
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._place: dict[int, tuple[_Group, int, int]] = {}
        self._held: AbstractContextManager[int] | None = None
        self._slot = 0
        layers = list(_layers(segments))
        self._vectors = _read_vectors(segments, weights)
        with ExitStack() as stack:
            packed = stack.enter_context(self._packed(layers, weights))
            for kinds in dict.fromkeys(layer.kinds(segments) for layer in layers):
                group = _Group([layer for layer in layers if layer.kinds(segments) == kinds])
                self._groups[kinds] = group
                stack.callback(group.close)
                with self._cache.scratch() as folder:
                    templates = self._templates(group.layers[0], folder)
                    try:
                        group.open(templates, packed, options=options)
                    except (StoreCorruptError, CheckpointError):
                        self._cache.discard(self._key)
                        raise
                self._check(group)
                group.start(packed)
                for position, layer in enumerate(group.layers):
                    for part, index in enumerate(layer.segments):
                        self._place[index] = (group, position, part)
            self._resources = stack.pop_all()

    @property
    def bytes_read(self) -> int:
        """From disk since loading."""
        return sum(group.streamer.bytes_read for group in self._groups.values())

    @property
    def wait_s(self) -> float:
        """Seconds that steps waited for the disk."""
        return sum(group.streamer.wait_s for group in self._groups.values())

    def vectors(self, index: int) -> dict[str, NDArray[np.float32]]:
        """What the segment takes besides its matrices, by input."""
        return {
            name: self._vectors[tensor] for name, tensor in _streamed(self._segments[index]).vectors
        }

    def begin(self, index: int) -> int:
        """The slot that holds the segment's weights; waits for the disk."""
        group, position, part = self._place[index]
        if part == 0:
            held = group.streamer.extent(position)
            try:
                self._slot = held.__enter__()
            except StoreCorruptError:
                self._cache.discard(self._key)  # made anew at the next load
                raise
            self._held = held
        return self._slot

    def session(self, index: int, slot: int) -> ort.InferenceSession:
        group, _position, part = self._place[index]
        return group.slots[slot][part].session

    def end(self, index: int) -> None:
        """The segment is computed; after its layer's last one the slot is filled anew."""
        group, position, part = self._place[index]
        if part + 1 == len(group.layers[position].segments) and self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None

    def close(self) -> None:
        self._resources.close()

    def _packed(self, layers: Sequence[_Layer], weights: ShardWeights) -> CachedShard:
        """The file with every streamed layer's packed weights; made if it is not there."""
        streamed = [self._segments[index].model for layer in layers for index in layer.segments]
        graphs = hashlib.sha256(b"".join(streamed)).hexdigest()
        self._key = f"{packing_key()} {weights.manifest.digest} {graphs}"
        return self._cache.get(self._key) or self._pack(layers, weights)

    def _pack(self, layers: Sequence[_Layer], weights: ShardWeights) -> CachedShard:
        with self._cache.begin(self._key, 2 * weights.manifest.total_bytes) as writer:
            for layer in layers:
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
        return made

    def _check(self, group: _Group) -> None:
        """Each slot must compute the last layer as a session of that layer does, bit for bit.

        What a blob holds is the kernels' own affair: should some kernel keep a weight elsewhere,
        it is noticed here, before it could make a wrong token.
        """
        layer = group.layers[-1]
        for part, index in enumerate(layer.segments):
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
            for slot in group.slots:
                for one, other in zip(expected, slot[part].session.run(None, feeds), strict=True):
                    if not np.array_equal(one, other, equal_nan=True):
                        raise RequestError(
                            f"the kernels of onnxruntime {ort.__version__} keep weights where they "
                            "cannot be exchanged on this device, so they cannot be streamed; give "
                            "the peer more --memory, or share the model with more peers"
                        )


class _Group:
    """Layers with the same graphs, the slots they share, and what fills those."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self.layers = layers
        self.slots: list[tuple[SlotSession, ...]] = []
        self._streamer: WeightStreamer | None = None

    @property
    def streamer(self) -> WeightStreamer:
        assert self._streamer is not None
        return self._streamer

    def open(self, templates: Sequence[Template], packed: CachedShard, *, options: Options) -> None:
        """Make the slots, and put the last layer's weights into each."""
        for _ in range(min(WINDOW_LAYERS, len(self.layers))):
            self.slots.append(tuple(open_slot(each, options=options) for each in templates))
        reader = DirectReader(packed.path)
        try:
            for slot in self.slots:
                memory = _memory(slot)
                extent = _extent(self.layers[-1], packed, memory)
                for span in extent:
                    reader.read([span.read_into(memory)])
        finally:
            reader.close()

    def start(self, packed: CachedShard) -> None:
        memories = [_memory(slot) for slot in self.slots]
        extents = [_extent(layer, packed, memories[0]) for layer in self.layers]
        reader = DirectReader(packed.path)
        try:
            self._streamer = WeightStreamer(extents, memories, reader)
        except BaseException:
            reader.close()
            raise

    def close(self) -> None:
        if self._streamer is not None:
            self._streamer.close()
        self.slots.clear()


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


def _memory(slot: tuple[SlotSession, ...]) -> list[memoryview]:
    return [part for session in slot for part in session.parts]


def _extent(layer: _Layer, packed: CachedShard, memory: Sequence[memoryview]) -> Extent:
    """Where the layer's packed weights lie in the file, piece by piece, and in a slot."""
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
