"""The device of Triton's kernels, and memory that it shares with the CPU.

The device is a CUDA GPU or, for tests, the CPU with Triton's interpreter. There device and host
memory are the same, and copies between them do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.kernels.triton_interpreter import interpret_bfloat16
from edge.offload import Copier, Mark, Memory, MemoryCopier, Unpin, unpinned

_MAX_SHAPES = 32
"""Most decode steps whose graphs are kept."""

_MEASURED_BYTES = 256 << 20
_MEASURED_COPIES = 4

_interpreting = threading.Lock()
"""Held during a launch, because the interpreter patches Triton's language for all threads."""

_recording = threading.Lock()
"""Held while a graph is recorded, because CUDA records one at a time in a process."""

_log = logging.getLogger(__name__)


def is_interpreted() -> bool:
    """Whether Triton interprets kernels. Its own variable decides when it is first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Device:
    """The first CUDA GPU that this process sees, or the CPU where kernels are interpreted."""

    def __init__(self) -> None:
        self.is_gpu = not is_interpreted()
        if not self.is_gpu:
            interpret_bfloat16()
        self.torch = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        self.name = (
            torch.cuda.get_device_name(self.torch) if self.is_gpu else "CPU, Triton interpreted"
        )
        if self.is_gpu:  # sums of products are float32 to their end
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._beside: Any = None
        """The only side stream, because memory used on one stream is not reused on another."""

    def free_bytes(self) -> int:
        """Free bytes of the GPU's own memory."""
        free_bytes, _total_bytes = torch.cuda.mem_get_info(self.torch)
        return int(free_bytes)

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Context for every launch of kernels. Do not wait inside."""
        if self.is_gpu:
            yield
        else:
            with _interpreting:
                yield

    def mark(self) -> Any:
        """An event after all launches and copies so far, for `wait`."""
        return torch.cuda.current_stream(self.torch).record_event() if self.is_gpu else None

    def wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def synchronize(self) -> None:
        """Wait for all launches and copies so far."""
        self.wait(self.mark())

    def give_back(self) -> None:
        """Return unused memory to the system, for other programs."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def host_bytes(self, shape: Sequence[int]) -> NDArray[np.uint8]:
        """Uninitialised host memory, pinned if there is a GPU."""
        found: NDArray[np.uint8] = torch.empty(
            tuple(shape), dtype=torch.uint8, pin_memory=self.is_gpu
        ).numpy()
        return found

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Context whose copies overlap computation, and are done when it ends."""
        if not self.is_gpu:
            yield
            return
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.torch)
        with torch.cuda.stream(self._beside):
            yield
            self._beside.synchronize()

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, through pinned memory. Waits for earlier launches."""
        if not self.is_gpu:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self.synchronize()
        return host

    def copy_bytes_per_s(self) -> float | None:
        """The best rate of a few copies from pinned memory; None without a GPU."""
        if not self.is_gpu:
            return None
        host = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
        into = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=self.torch)
        best_s = math.inf
        for _ in range(_MEASURED_COPIES):
            self.synchronize()
            start_s = time.perf_counter()
            into.copy_(host, non_blocking=True)
            self.synchronize()
            best_s = min(best_s, time.perf_counter() - start_s)
        return _MEASURED_BYTES / best_s

    def copier(self, places: Sequence[Tensor]) -> Copier:
        """A copier into these uint8 tensors on the device, which overlaps computation."""
        if self.is_gpu:
            return StreamCopier(self, places)
        return MemoryCopier([memoryview(place.numpy()) for place in places])

    def pin(self, memory: memoryview) -> Unpin:
        """Pin this memory, in whole pages, so that copies from it overlap computation."""
        if not self.is_gpu:
            return unpinned(memory)
        runtime: Any = torch.cuda.cudart()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with torch.cuda.device(self.torch):
            error = runtime.cudaHostRegister(address, memory.nbytes, 0)
        if error != runtime.cudaError.success:
            _log.warning(
                "CUDA cannot pin %d bytes of memory (%s), so copies from them are slower; raise "
                "the limit of locked memory, or give the peer less --host-memory",
                memory.nbytes,
                error,
            )
            return unpinned(memory)
        return lambda: runtime.cudaHostUnregister(address)


class StreamCopier:
    """Copies on a separate stream. See `offload.Copier`."""

    def __init__(self, device: Device, places: Sequence[Tensor]) -> None:
        self._device = device
        self._places = places
        self._stream: Any = torch.cuda.Stream(device.torch)

    def copy(self, memory: Memory, place: int, nbytes: int, *, after: Mark) -> Mark:
        source = torch.frombuffer(memory[0], dtype=torch.uint8, count=nbytes)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._places[place][:nbytes].copy_(source, non_blocking=True)
            return self._stream.record_event()

    def used(self) -> Mark:
        return self._device.mark()

    def wait(self, mark: Mark) -> None:
        self._device.wait(mark)

    def close(self) -> None:
        self._stream.synchronize()


class Mirror:
    """A flat tensor on the device with a copy on the host.

    `host` is pinned if there is a GPU, so that copies are asynchronous. Call `Device.synchronize`
    between a copy and its use on the host.
    """

    def __init__(self, device: Device, length: int, dtype: torch.dtype) -> None:
        if device.is_gpu:
            self._pinned = torch.zeros(length, dtype=dtype, pin_memory=True)
            self.tensor = torch.zeros(length, dtype=dtype, device=device.torch)
        else:
            self._pinned = self.tensor = torch.zeros(length, dtype=dtype)
        self.host: Any = self._pinned.numpy()

    def __len__(self) -> int:
        return int(self.host.size)

    def to_device(self, start: int = 0, stop: int | None = None) -> None:
        if self._pinned is not self.tensor:
            self.tensor[start:stop].copy_(self._pinned[start:stop], non_blocking=True)

    def to_host(self, start: int = 0, stop: int | None = None) -> None:
        if self._pinned is not self.tensor:
            self._pinned[start:stop].copy_(self.tensor[start:stop], non_blocking=True)


class Launches:
    """Launches pieces of a step; repeated ones run as CUDA graphs on a GPU.

    A decode step is hundreds of short kernels. Launched one by one they cost the CPU more time than
    the GPU takes to compute them; a graph is one launch.
    """

    def __init__(self, device: Device, *, pieces: int = 1) -> None:
        """pieces: number of graphs of one step, which is cut wherever the host must act."""
        self._device = device
        self._most_graphs = pieces * _MAX_SHAPES
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._is_graphing = device.is_gpu
        self._pool: Any = None

    def run(self, key: Hashable | None, work: Callable[[], None]) -> None:
        """Run `work`, which only launches kernels, on the same memory for the same `key`.

        key: None for work that is not worth a graph.
        """
        if key is None or not self._is_graphing:
            with self._device.launching():
                work()
            return
        if key not in self._graphs:
            work()  # compiles the kernels, which is impossible while recording
            self._graphs[key] = None
            if len(self._graphs) > self._most_graphs:
                self._graphs.popitem(last=False)
            return
        self._graphs.move_to_end(key)
        if self._graphs[key] is None:
            self._graphs[key] = self._record(work)
        graph = self._graphs[key]
        if graph is None:
            work()
        else:
            graph.replay()

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _record(self, work: Callable[[], None]) -> Any:
        """The graph of `work`. If CUDA refuses, None, and no further graphs are tried."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other sessions of this process may use the GPU during the recording.
            with (
                _recording,
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                work()
        except RuntimeError as error:
            self._is_graphing = False
            _log.warning("CUDA records no graphs, so decoding is slower: %s", error)
            return None
        # Nothing in a graph's memory outlives its run, so all graphs share one pool.
        self._pool = graph.pool()
        return graph


def rows_of(flat: Tensor, start: int, count: int, width: int) -> Tensor:
    """Rows [count, width] of a flat tensor, from row `start`."""
    return flat[start * width : (start + count) * width].view(count, width)
