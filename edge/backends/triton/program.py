"""One shard on a GPU or interpreted: its kernels, buffers and KV caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.interface import WeightReads, check_step
from edge.backends.kv_storage import SwappedKv
from edge.backends.kv_swap import CacheMoves
from edge.backends.overlap import parts_of
from edge.backends.triton.buffers import Lane, StepBuffers
from edge.backends.triton.device import Device, Launches, Mirror
from edge.backends.triton.layers import LaunchSegment, ShardOperators
from edge.backends.triton.logits import DeviceLogits
from edge.backends.triton.nccl import TorchSums, device_sums
from edge.backends.triton.streaming import StreamedLayers
from edge.errors import RequestError
from edge.models.pictures import is_row
from edge.offload import KVTier
from edge.protocol.step import Step, StepLimits
from edge.transport import BackgroundWork, Collective


class TritonProgram(SwappedKv):
    """See StageProgram. Sums over links are computed on the host, in buffers made once."""

    def __init__(
        self,
        operators: ShardOperators,
        device: Device,
        buffers: StepBuffers,
        *,
        weight_bytes: int,
        limits: StepLimits,
        embedding: EmbeddingRows,
        streamed: StreamedLayers | None,
        open_streamed: Callable[[], StreamedLayers],
        kv_tier: KVTier | None,
    ) -> None:
        """streamed: the source of layers, if not all are in the device's memory. open_streamed:
        makes it if memory shrinks later."""
        self.weight_bytes = weight_bytes
        self._operators = operators
        self._device = device
        self._buffers = buffers
        self._limits = limits
        self._layout = operators.layout
        self._cache = operators.cache
        self._side = operators.side
        self._moves = CacheMoves(self._cache, self._cache.shape, kv_tier, limits)
        self._segments = operators.segments()
        self._embedding = embedding
        self._streamed = streamed
        self._open_streamed = open_streamed
        self._embeds_on_host = False
        """Whether the current step's embedding is looked up on the host."""
        self._cut()
        if streamed is not None:
            streamed.start()

    @property
    def disk_wait_s(self) -> float:
        weights_s = 0.0 if self._streamed is None else self._streamed.wait_s
        return weights_s + self._moves.wait_s

    @property
    def weight_reads(self) -> WeightReads:
        return WeightReads(nbytes=0 if self._streamed is None else self._streamed.bytes_read)

    @property
    def device_sums(self) -> TorchSums | None:
        return device_sums(self._device)

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        handed = self._side.handed(step.batch, step.num_tokens)
        return self._hidden_rows(step) if handed is None else handed

    def picture_rows(self, step: Step) -> NDArray[np.float32]:
        raise RequestError("rows of pictures behind several layers are not computed on a GPU")

    def _hidden_rows(self, step: Step) -> NDArray[np.float32]:
        """The step's hidden state [batch, tokens, hidden size] on the host."""
        size = self._operators.spec.hidden_size
        count = step.batch * step.num_tokens * size
        rows: NDArray[np.float32] = self._buffers.hidden.host[:count]
        return rows.reshape(step.batch, step.num_tokens, size)

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        self._compute(step, hidden, collective)
        if self._layout.is_last_stage:
            result = self._logits(step).array()
        else:
            result = self._hidden_rows(step)
            self._buffers.hidden.to_host(0, result.size)
            self._side.to_host(result.size)
            self._device.synchronize()
            result = self._side.put_together(result)
        collective.settle()
        return result

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> DeviceLogits:
        self._compute(step, hidden, collective)
        self._device.synchronize()  # before the next step fills the buffers that this one reads
        collective.settle()
        return self._logits(step)

    def _logits(self, step: Step) -> DeviceLogits:
        columns = len(self._layout.vocab)
        return DeviceLogits(
            self._device, self._buffers.logits, step, columns, partial(self._states, step)
        )

    def _states(self, step: Step) -> NDArray[np.float32]:
        rows = self._hidden_rows(step)
        self._buffers.hidden.to_host(0, rows.size)
        self._device.synchronize()
        return rows[:, step.num_tokens - step.logit_rows :]

    def _compute(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> None:
        check_step(step, self._limits, vocab_size=self._operators.spec.vocab_size)
        buffers = self._buffers
        self._moves.arrive(step)
        self._cache.place(step)
        if buffers.make_room_for_logits(step):
            self._launches.clear()
        lanes = buffers.lanes(parts_of(step, is_split=self._layout.is_split))
        rows = self._hidden_rows(step)
        tokens = np.asarray([token for entry in step.entries for token in entry.tokens])
        if hidden is not None:
            received = self.receive_buffer(step)
            if hidden.ctypes.data != received.ctypes.data:
                received[...] = hidden
            if received.size != rows.size:
                self._side.take_apart(received, rows)
        is_first = self._layout.is_first_stage and bool(self._layout.embedding)
        has_pictures = is_first and any(map(is_row, tokens.tolist()))
        self._embeds_on_host = has_pictures or (is_first and self._operators.embedding is None)
        if self._embeds_on_host:
            positions = [np.arange(entry.position, entry.end) for entry in step.entries]
            self._embedding.read_into(
                rows.reshape(tokens.size, -1),
                tokens,
                np.concatenate(positions),
                has_pictures=hidden is not None,
            )
        if hidden is not None or self._embeds_on_host:
            buffers.hidden.to_device(0, rows.size)
        self._side.look_up(self._embedding, tokens, rows if self._embeds_on_host else None)
        self._run(lanes, collective)
        for entry in step.entries:
            self._cache.wrote(self._cache.open(entry.request), entry.end)

    def gram(self, run: int) -> NDArray[np.float32]:
        assert self._operators.grams is not None
        self._device.synchronize()
        return self._operators.grams.array(run)

    def calibrate(self, request: str) -> None:
        """Only releases the request, because each token has its own scales here."""
        self.release(request)

    @property
    def rows_agree(self) -> bool:
        return False  # kernels for few and for many rows sum in different orders

    @property
    def batches_agree(self) -> bool:
        return False  # as above

    @property
    def mixes(self) -> bool:
        return False

    @property
    def cache_digest(self) -> str:
        return (
            f"triton {triton.__version__} torch {torch.__version__} {self._device.name} "
            f"{self._operators.activations}"
        )

    def new_rows(self, tokens: int, *, windows: bool = True) -> list[NDArray[Any]]:
        return self._cache.new_rows(tokens)

    def rows(
        self, request: str, first: int, last: int, *, windows: bool = True
    ) -> list[NDArray[Any]] | None:
        if request not in self._cache or not self._moves.is_inside(request):
            return None
        slot = self._cache.open(request)
        if self._cache.length(slot) < last:
            return None
        layers = range(self._cache.shape.num_layers)
        return [each for layer in layers for each in self._cache.rows(layer, slot, first, last)]

    def put_rows(
        self, request: str, first: int, rows: Sequence[NDArray[Any]], *, windows: bool = True
    ) -> None:
        slot = self._cache.open(request)
        for layer in range(self._cache.shape.num_layers):
            keys, values = rows[2 * layer : 2 * layer + 2]
            self._cache.put(layer, slot, first, keys, values)
            self._cache.wrote(slot, first + keys.shape[1])

    def stream(self, layers: int) -> None:
        streamed = self._streamed
        if streamed is None and not layers:
            return
        self._launches.clear()  # recorded graphs have the old places of weights
        if streamed is not None:
            try:
                self._settle(streamed, layers)
            finally:
                self._take(streamed)
            return
        with self._memory_told():
            streamed = self._open_streamed()
        self._operators.let_go()  # first, because there may be no room for both
        try:
            self._settle(streamed, layers)
        except BaseException:
            streamed.close()
            self._operators.place(None)
            raise
        self._take(streamed)

    def _settle(self, streamed: StreamedLayers, layers: int) -> None:
        with self._memory_told():
            streamed.settle(layers)

    @contextmanager
    def _memory_told(self) -> Iterator[None]:
        """RequestError instead of torch's own for too little memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise RequestError(
                f"the GPU ({self._device.name}) has too little free for more layers",
                remedy="end other programs that use it, and try again",
            ) from error

    def _take(self, streamed: StreamedLayers) -> None:
        self._streamed = streamed
        self._operators.place(streamed)
        self._cut()
        streamed.start()

    def _cut(self) -> None:
        """Divide a step into pieces, at sums and at layers whose weights or KV caches move."""
        streamed = () if self._streamed is None else self._streamed.streamed
        layers = [segment.layer for segment in self._segments]
        firsts: dict[int, int] = {}
        lasts: dict[int, int] = {}
        for index, layer in enumerate(layers):
            if layer is not None:
                firsts.setdefault(layer, index)
                lasts[layer] = index
        self._first = {index: layer for layer, index in firsts.items()}
        self._last = {index: layer for layer, index in lasts.items()}
        self._pieces = self._divided([each if each in streamed else None for each in layers])
        self._far_pieces = self._divided(layers) if self._limits.exceeds_memory else ()
        pieces = len(self._pieces) + len(self._far_pieces)
        self._launches = Launches(self._device, pieces=pieces)

    def _divided(self, layers: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
        """Groups of segments that are launched together. layers: the layer of each segment, at
        whose changes groups are divided."""
        parts = groupby(
            range(len(layers)),
            key=(lambda index: index) if self._layout.is_split else layers.__getitem__,
        )
        return tuple(tuple(part) for _, part in parts)

    def release(self, request: str) -> None:
        self._cache.release(request)
        self._moves.drop(request)

    def interrupt(self) -> None:
        """Does nothing, because launches cannot be cancelled."""

    def reset(self) -> bool:
        return False

    def close(self) -> None:
        if self._streamed is not None:
            self._streamed.close()
        self._embedding.close()
        self._moves.close()
        self._launches.clear()
        self._segments = ()

    def _run(self, lanes: Sequence[Lane], collective: Collective) -> None:
        """Run the segments in turn. The sum of one half overlaps the computation of the other."""
        if not self._layout.is_split:
            (lane,) = lanes
            for piece in self._far_pieces if self._cache.is_spread else self._pieces:
                self._begin(piece[0])
                self._launch(piece, lane)
                self._end(piece[-1])
            return
        on_host = collective.memory == "host"
        under_way: list[BackgroundWork | None] = [None] * len(lanes)
        for index, segment in enumerate(self._segments):
            marks = []
            self._begin(index)
            for half, lane in enumerate(lanes):
                work, under_way[half] = under_way[half], None
                if work is not None:
                    work.wait()
                    if on_host:
                        self._move(self._segments[index - 1], lane, to_device=True)
                self._launch((index,), lane)
                if on_host:
                    self._move(segment, lane, to_device=False)
                    marks.append(self._device.mark())
            self._end(index)
            if segment.reduce is None:
                continue
            for half, lane in enumerate(lanes):
                if on_host:
                    self._device.wait(marks[half])
                array = self._summed(segment, lane, on_host=on_host)
                if len(lanes) > 1:
                    under_way[half] = collective.begin_all_reduce(array)
                    continue
                collective.all_reduce(array)
                if on_host:
                    self._move(segment, lane, to_device=True)
        for work in under_way:
            if work is not None:
                work.wait()

    def _begin(self, index: int) -> None:
        """Wait until the segment's weights, keys and values are on the device."""
        layer = self._first.get(index)
        if layer is None:
            return
        if self._streamed is not None and layer in self._streamed.streamed:
            self._streamed.begin(layer)
        number = self._cache.numbers.get(layer)
        if self._cache.is_spread and number is not None:
            self._moves.begin(number)
            self._cache.begin_layer(number)

    def _end(self, index: int) -> None:
        """Release the segment's weights, keys and values after it was launched."""
        layer = self._last.get(index)
        if layer is None:
            return
        if self._streamed is not None and layer in self._streamed.streamed:
            self._streamed.end(layer)
        number = self._cache.numbers.get(layer)
        if self._cache.is_spread and number is not None:
            self._device.synchronize()  # so that computing is not counted as moving
            self._moves.end(number)

    def _launch(self, indices: tuple[int, ...], lane: Lane) -> None:
        """Launch these segments in turn."""
        segments = [
            segment
            for segment in map(self._segments.__getitem__, indices)
            if (lane.logit_rows or not segment.is_head)
            and not (segment.is_embedding and self._embeds_on_host)
        ]
        if not segments:
            return  # CUDA records no empty graphs

        def work() -> None:
            for segment in segments:
                segment.launch(lane)

        key = None
        if lane.key is not None:
            key = indices, lane.key, self._cache.is_spread, self._embeds_on_host
        self._launches.run(key, work)

    def _summed(self, segment: LaunchSegment, lane: Lane, *, on_host: bool) -> Any:
        """The lane's rows that are summed after the segment: an array on the host, or a tensor."""
        if on_host:
            return self._buffers.host_rows(self._reduced(segment), lane)
        return lane.hidden if segment.reduce == "hidden" else lane.partial

    def _reduced(self, segment: LaunchSegment) -> Mirror:
        return self._buffers.hidden if segment.reduce == "hidden" else self._buffers.partial

    def _move(self, segment: LaunchSegment, lane: Lane, *, to_device: bool) -> None:
        """Copy the rows that are summed after the segment between device and host."""
        if segment.reduce is None:
            return
        mirror, span = self._reduced(segment), self._buffers.span(lane)
        if to_device:
            mirror.to_device(*span)
        else:
            mirror.to_host(*span)
