"""One shard on a GPU, or interpreted: its kernels, its buffers, and the KV of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.base import Step, StepLimits, check_step
from edge.backends.overlap import parts_of
from edge.backends.triton_buffers import Lane, StepBuffers
from edge.backends.triton_collective import TorchSums, device_sums
from edge.backends.triton_device import Device, Launches, Mirror
from edge.backends.triton_layers import Segment, ShardOperators
from edge.errors import RequestError
from transport import Collective, Work

NO_STREAM = (
    "back end triton keeps all weights in memory and cannot stream layers from disk; load without "
    "stream, or start this peer with --backend ort"
)

NO_TIER = (
    "back end triton keeps keys and values in the GPU's memory only; start this peer without "
    "--kv-disk, or with --backend ort"
)


class TritonProgram:
    """See StageProgram. Sums over links happen on the host, in buffers made once."""

    disk_wait_s = 0.0

    def __init__(
        self,
        operators: ShardOperators,
        device: Device,
        buffers: StepBuffers,
        *,
        weight_bytes: int,
        limits: StepLimits,
    ) -> None:
        self.weight_bytes = weight_bytes
        self._operators = operators
        self._device = device
        self._buffers = buffers
        self._limits = limits
        self._layout = operators.layout
        self._cache = operators.cache
        self._segments = operators.segments()
        self._launches = Launches(device)

    @property
    def device_sums(self) -> TorchSums | None:
        return device_sums(self._device)

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        size = self._operators.spec.hidden_size
        count = step.batch * step.num_tokens * size
        rows: NDArray[np.float32] = self._buffers.hidden.host[:count]
        return rows.reshape(step.batch, step.num_tokens, size)

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        check_step(step, self._limits, vocab_size=self._operators.spec.vocab_size)
        buffers = self._buffers
        self._cache.place(step)
        if buffers.make_room_for_logits(step):
            self._launches.clear()
        lanes = buffers.lanes(parts_of(step, is_split=self._layout.is_split))
        if hidden is not None:
            rows = self.receive_buffer(step)
            if hidden.ctypes.data != rows.ctypes.data:
                rows[...] = hidden
            buffers.hidden.to_device(0, rows.size)
        self._run(lanes, collective)
        self._cache.wrote(step)
        result = self._result(step)
        collective.settle()
        return result

    def calibrate(self, request: str) -> None:
        """Every token has scales of its own here: there is nothing to choose."""
        self.release(request)

    def save(self, request: str) -> None:
        """Never asked for: `load` takes no tier."""
        raise RequestError(NO_TIER)

    def reserve(self, request: str, tokens: int) -> None:
        """Likewise."""
        raise RequestError(NO_TIER)

    @property
    def cache_digest(self) -> str:
        return ""

    def new_rows(self, tokens: int) -> list[NDArray[Any]]:
        """None are handed out."""
        return []

    def rows(self, request: str, first: int, last: int) -> list[NDArray[Any]] | None:
        return None

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None:
        """Nobody has any: their digest would be empty."""
        raise RequestError(NO_TIER)

    def stream(self, layers: int) -> None:
        """Refused, but for none."""
        if layers:
            raise RequestError(NO_STREAM)

    def release(self, request: str) -> None:
        self._cache.release(request)

    def close(self) -> None:
        self._launches.clear()
        self._segments = ()

    def _result(self, step: Step) -> NDArray[np.float32]:
        buffers, layout = self._buffers, self._layout
        if not layout.is_last_stage:
            rows = self.receive_buffer(step)
            buffers.hidden.to_host(0, rows.size)
            self._device.synchronize()
            return rows
        columns = len(layout.vocab)
        count = step.batch * step.logit_rows * columns
        buffers.logits.to_host(0, count)
        self._device.synchronize()
        logits: NDArray[np.float32] = buffers.logits.host[:count]
        return logits.reshape(step.batch, step.logit_rows, columns)

    def _run(self, lanes: Sequence[Lane], collective: Collective) -> None:
        """Segment after segment. While one half's sum is under way the other is computed."""
        if not self._layout.is_split:
            (lane,) = lanes
            self._launch(tuple(range(len(self._segments))), lane)
            return
        on_host = collective.memory == "host"
        under_way: list[Work | None] = [None] * len(lanes)
        for index, segment in enumerate(self._segments):
            marks = []
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

    def _launch(self, indices: tuple[int, ...], lane: Lane) -> None:
        """These segments, one after the other."""
        segments = [self._segments[index] for index in indices]

        def work() -> None:
            for segment in segments:
                if lane.logit_rows or not segment.is_head:
                    segment.launch(lane)

        self._launches.run(None if lane.key is None else (indices, lane.key), work)

    def _summed(self, segment: Segment, lane: Lane, *, on_host: bool) -> Any:
        """The lane's rows of it: an array on the host, or a tensor."""
        if on_host:
            return self._buffers.host_rows(self._reduced(segment), lane)
        return lane.hidden if segment.reduce == "hidden" else lane.partial

    def _reduced(self, segment: Segment) -> Mirror:
        return self._buffers.hidden if segment.reduce == "hidden" else self._buffers.partial

    def _move(self, segment: Segment, lane: Lane, *, to_device: bool) -> None:
        """What is summed after the segment, between device and host."""
        if segment.reduce is None:
            return
        mirror, span = self._reduced(segment), self._buffers.span(lane)
        if to_device:
            mirror.to_device(*span)
        else:
            mirror.to_host(*span)
