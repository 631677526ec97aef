"""Weight offload on a GPU: layers on the device, in pinned host memory, or on disk.

Layers that do not stay on the device are copied into a window there just before their use.
`weight_tiers` of edge.partition decides where each layer is, `DeviceWindow` of edge.offload when it
moves.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from edge.backends.interface import ShardWeights
from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.device import Device
from edge.backends.triton.packing import layer_runs, open_packed
from edge.kernels.matmul_nbits.triton import Weight
from edge.offload import (
    DeviceWindow,
    DirectReader,
    HostSlots,
    StoreCorruptError,
    WeightStreamer,
    is_streamed,
    padded,
)
from edge.partition.fit.weight_tiers import WeightTiers, weight_tiers
from edge.partition.plan.expert_tiers import WINDOW_LAYERS
from edge.weights.recipe import StoredMatrix

_LEAST_WINDOW = 2
"""Least window that WeightStreamer takes, if all layers stay in the host's memory."""


class StreamedLayers:
    """The matrices of a shard's layers. Used by the compute thread.

    Call `settle`, then `start`. Then `begin` and `end` enclose the use of each streamed layer, in
    order.
    """

    def __init__(
        self, arrays: ShardArrays, weights: ShardWeights, device: Device, *, is_half: bool
    ) -> None:
        """Pack layers that are not packed yet. Takes device memory of a matrix meanwhile."""
        self._device = device
        self._host_bytes = weights.host_bytes
        self._key, self._packed = open_packed(arrays, weights, device, is_half=is_half)
        self._cache = weights.packed
        self._runs = layer_runs(self._packed)
        self._layers = tuple(self._runs)
        self._run_bytes = max((run.nbytes for run in self._runs.values()), default=0)
        self._own: dict[int, Tensor] = {}
        """The runs of layers that stay on the device."""
        self._places: list[Tensor] = []
        """The window on the device."""
        self._window: DeviceWindow | None = None
        self._slots: HostSlots | None = None
        self._waited_s = 0.0
        self._bytes_read = 0
        self.tiers = self._tiers(0)

    @property
    def wait_s(self) -> float:
        """Seconds that steps waited for weights."""
        return self._waited_s + (0.0 if self._window is None else self._window.wait_s)

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk since loading."""
        return self._bytes_read + (0 if self._window is None else self._window.bytes_read)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that are copied into the window for each step."""
        return self._layers[self.tiers.resident :]

    def settle(self, streamed: int) -> None:
        """Place the layers anew, with the last `streamed` not resident on the device.

        Nothing streams until `start`. Earlier views of `weight` are invalid. Raises StoreError, and
        torch's OutOfMemoryError; then the layers keep their places.
        """
        before = self.tiers
        self._stop()
        try:
            self._settle(self._tiers(streamed))
        except BaseException:
            self._settle(before)
            raise

    def start(self) -> None:
        """Begin to read and copy."""
        tiers = self.tiers
        if not tiers.streamed:
            return
        layers = self.streamed
        slots = HostSlots(padded(self._run_bytes), pin=self._device.pin)
        memories = [slots.memory() for _ in layers]
        reader = DirectReader(self._packed.path)
        try:
            streamer = WeightStreamer(
                [self._runs[layer].extent for layer in layers],
                memories,
                reader,
                resident=tiers.pinned,
                window=max(_LEAST_WINDOW, tiers.staging),
                pages=slots,
            )
        except BaseException:
            reader.close()
            slots.close()
            raise
        self._slots = slots
        self._window = DeviceWindow(
            streamer,
            memories,
            [self._runs[layer].nbytes for layer in layers],
            self._device.copier(self._places),
            places=tiers.window,
            stays=lambda index: not is_streamed(index, len(layers), tiers.on_disk),
        )

    def weight(self, matrix: StoredMatrix) -> Weight:
        """The matrix at its place while its layer is in use."""
        layer = int(matrix.name.split(".")[1])
        return self._runs[layer].weight(matrix, self._place(layer))

    def bring(self, layer: int) -> None:
        """Copy a streamed layer into its place once, before `start`."""
        if layer in self.streamed:
            self._read(layer, self._place(layer))

    def begin(self, layer: int) -> None:
        """Wait until a streamed layer is in its place. Raises StoreError."""
        assert self._window is not None
        try:
            self._window.begin(self.streamed.index(layer))
        except StoreCorruptError:
            self._discard()
            raise

    def end(self, layer: int) -> None:
        """Release a layer after all its launches."""
        assert self._window is not None
        self._window.end(self.streamed.index(layer))

    def close(self) -> None:
        self._stop()
        self._own.clear()
        self._places.clear()
        self._packed.close()

    def _tiers(self, streamed: int) -> WeightTiers:
        streamed = min(streamed, len(self._layers))  # a shard may have no layers
        return weight_tiers(
            len(self._layers),
            streamed=streamed,
            window=WINDOW_LAYERS,
            layer_bytes=self._run_bytes,
            host_bytes=self._host_bytes,
        )

    def _settle(self, tiers: WeightTiers) -> None:
        """Move the layers to these tiers. Frees memory before it takes any."""
        self.tiers = tiers
        for layer in self.streamed:
            self._own.pop(layer, None)
        del self._places[tiers.window :]
        self._device.give_back()
        while len(self._places) < tiers.window:
            self._places.append(self._empty(self._run_bytes))
        for layer in self._layers[: tiers.resident]:
            if layer not in self._own:
                run = self._empty(self._runs[layer].nbytes)
                self._read(layer, run)
                self._own[layer] = run

    def _place(self, layer: int) -> Tensor:
        if layer in self._own:
            return self._own[layer]
        return self._places[self.streamed.index(layer) % self.tiers.window]

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch)

    def _read(self, layer: int, into: Tensor) -> None:
        run = self._runs[layer]
        memory = memoryview(mmap.mmap(-1, padded(run.nbytes))).cast("B")
        reader = DirectReader(self._packed.path)
        try:
            reader.read([span.read_into([memory]) for span in run.extent])
        except StoreCorruptError:
            self._discard()
            raise
        finally:
            reader.close()
        into[: run.nbytes].copy_(torch.frombuffer(memory, dtype=torch.uint8, count=run.nbytes))

    def _discard(self) -> None:
        """Discard the packed file, so that the next load makes it again."""
        if self._cache is not None:
            self._cache.discard(self._key)

    def _stop(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            self._device.synchronize()  # earlier launches may still read its weights
            window.close()
            self._waited_s += window.wait_s
            self._bytes_read += window.bytes_read
        if self._slots is not None:
            self._slots.close()
            self._slots = None
