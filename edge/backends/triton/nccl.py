"""Sums over the shards of a stage from device to device, with torch.distributed.

NCCL between the GPUs of one host; gloo for interpreted kernels. Other exchanges are small and on
the host, and use the links.

Sums are in rank order, as over links, so that both ways give the same bits. NCCL's all_reduce adds
in an order that depends on the slice, the number of GPUs and its algorithm. Gathering and adding
costs no more: for two ranks the traffic is the same, and with more ranks each sums one slice of a
large array, which is the traffic of a ring.
"""

from __future__ import annotations

import datetime
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from edge.backends.triton.device import Device
from edge.transport import BackgroundWork, Collective
from edge.transport.background import Background
from edge.transport.collective import SLICED_ABOVE_BYTES
from edge.transport.errors import ChannelClosedError, ProtocolError, TransportError

OPEN_TIMEOUT_S = 20.0
"""Seconds for the ranks to find each other, and for their first exchange."""

TIMEOUT_S = 120.0
"""Seconds for a sum, as over links. A longer one means that a device hangs."""

_NCCL_SETTINGS = {
    # A failed sum ends its model, and not the daemon.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Ranks of one host communicate over loopback only.
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Settings that these libraries read only from the environment."""


def device_sums(device: Device) -> TorchSums | None:
    """The device's sums; None if PyTorch lacks the support."""
    distributed = torch.distributed
    if not distributed.is_available():
        return None
    can = distributed.is_nccl_available() if device.is_gpu else distributed.is_gloo_available()
    return TorchSums(device) if can else None


class TorchSums:
    """See `DeviceSums`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.way = "nccl" if device.is_gpu else "gloo"
        self.device = uuid.uuid4().hex
        if device.is_gpu:
            self.device = str(torch.cuda.get_device_properties(device.torch).uuid)

    @property
    def version(self) -> str:
        nccl = torch.cuda.nccl.version() if self._device.is_gpu else None
        return f"{torch.__version__} {nccl}"

    def open(self, links: Collective, store: Path) -> TorchCollective:
        """See `DeviceSums`. Raises RuntimeError if ranks do not find each other in time."""
        shared = torch.distributed.FileStore(str(store), links.size)
        shared.set_timeout(datetime.timedelta(seconds=OPEN_TIMEOUT_S))
        make = _nccl if self._device.is_gpu else _gloo
        opened = TorchCollective(links, make(shared, links.rank, links.size), self._device)
        try:
            opened.check()
        except BaseException:
            opened.leave()
            raise
        return opened


class TorchCollective:
    """A collective whose `all_reduce` takes tensors on the device. See `Collective`.

    Ranks with different sizes are not detected: NCCL waits for ever, and gloo ends the process.
    """

    memory: Literal["device"] = "device"

    def __init__(self, links: Collective, group: Any, device: Device) -> None:
        """Takes ownership of `links` and of `group`, a process group of torch.distributed."""
        self.rank = links.rank
        self.size = links.size
        self._links = links
        self._device = device
        self._group: Any = group
        self._last: Any = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._background = Background(f"edge-device-sums-of-rank-{self.rank}")
        self._stream = torch.cuda.Stream(device.torch) if device.is_gpu else None
        self._terms = torch.empty(0, dtype=torch.uint8, device=device.torch)

    def all_reduce(self, array: Tensor) -> None:
        """See `Collective`. On a GPU later launches see the sum; `settle` raises its failure."""
        self._sum(_flat(array))

    def begin_all_reduce(self, array: Tensor) -> BackgroundWork:
        """See `Collective`. On a GPU the wait delays later launches only."""
        flat = _flat(array)
        if self._stream is None:
            return self._background.begin(lambda: self._sum(flat))
        self._stream.wait_stream(torch.cuda.current_stream(self._device.torch))
        with torch.cuda.stream(self._stream):
            self._sum(flat)
            return _StreamWork(self._stream.record_event())

    def settle(self) -> None:
        """Wait for the device. Raises the failure of an earlier sum."""
        if self._stream is None:
            return  # waiting for a sum has raised its failure already
        torch.cuda.current_stream(self._device.torch).synchronize()
        if self._is_closed:
            raise _closed()
        if self._last is not None and not self._last.is_success():
            raise self._failure("NCCL aborted it")

    def all_gather(self, own: Any, into: Any) -> None:
        """See `Collective`."""
        self._links.all_gather(own, into)

    def gather(self, own: Any, into: Any, *, root: int) -> None:
        """See `Collective`."""
        self._links.gather(own, into, root=root)

    def broadcast(self, array: Any, *, root: int) -> None:
        """See `Collective`."""
        self._links.broadcast(array, root=root)

    def barrier(self) -> None:
        """See `Collective`."""
        self._links.barrier()

    def check(self) -> None:
        """Raises RuntimeError unless all ranks answer, in order. The links stay usable."""
        own = torch.tensor([self.rank], device=self._device.torch)
        ranks = torch.empty(self.size, dtype=own.dtype, device=own.device)
        reason = self._outcome(lambda group: group._allgather_base(ranks, own))
        if reason:
            raise RuntimeError(reason)
        found = ranks.tolist()  # waits for the GPU
        if found != list(range(self.size)):
            raise RuntimeError(f"it found ranks {found} of {self.size}")

    def leave(self) -> None:
        """See `DeviceCollective`."""
        with self._changed:
            groups, self._group = [self._group], None
            self._changed.notify_all()
        if groups == [None]:
            return
        if self._stream is not None:
            groups[0].abort()  # ends a sum that waits for a lost rank
            return
        # A group's end waits for its sums, and those for other ranks to end their groups.
        threading.Thread(target=groups.clear, name="edge-device-sums-end", daemon=True).start()

    def close(self) -> None:
        """See `Collective`."""
        self._is_closed = True
        self.leave()
        self._links.close()
        self._background.close()

    def _sum(self, flat: Tensor) -> None:
        """Sum in place. Values of all types are moved as bytes."""
        size, count = self.size, flat.numel()
        if not count:
            return
        own = _bytes(flat)
        if size == 2 or own.numel() <= SLICED_ABOVE_BYTES or count % size:
            terms = self._space(size * count, flat.dtype)
            self._move(lambda group: group._allgather_base(_bytes(terms), own))
            _add_in_order(terms.view(size, count), flat)
            return
        terms = self._space(count, flat.dtype).view(size, count // size)
        self._move(lambda group: group.alltoall_base(_bytes(terms), own, [], []))
        _add_in_order(terms, terms[0])
        self._move(lambda group: group._allgather_base(own, _bytes(terms[0])))

    def _space(self, count: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory, valid until the next call."""
        nbytes = count * dtype.itemsize
        if self._terms.numel() < nbytes:
            if self._stream is not None:  # a sum under way may still use the smaller one
                torch.cuda.synchronize(self._device.torch)
            self._terms = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch)
        return self._terms[:nbytes].view(dtype)

    def _move(self, begin: Callable[[Any], Any]) -> None:
        """Run an exchange. It is done at return; on a GPU, before later launches run."""
        reason = self._outcome(begin)
        if reason:
            raise self._failure(reason)

    def _outcome(self, begin: Callable[[Any], Any]) -> str:
        """Run an exchange; the reason of a failure, or "". Raises nothing, because an error's
        frames would keep the group's sockets open."""
        try:
            work = self._begun(begin)
            if work is None:
                return "it ended before"
            if self._stream is not None:
                self._last = work
                work.wait()
                return ""
            future = work.get_future()
            future.add_done_callback(self._wake)
            with self._changed:
                self._changed.wait_for(lambda: future.done() or self._group is None)
            if not future.done():
                return "it ended while it waited"
            future.wait()
        except RuntimeError as error:
            return str(error) or "for no reason given"
        return ""

    def _begun(self, begin: Callable[[Any], Any]) -> Any:
        """Begin an exchange; None after `leave`. Keeps no reference to the group, so that gloo ends
        it after its current call."""
        if self._stream is not None:  # without the lock: a GPU that waits may block this call
            group = self._group
            return None if group is None else begin(group)
        with self._changed:
            return None if self._group is None else begin(self._group)

    def _wake(self, _: Any = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def _failure(self, reason: str) -> TransportError:
        """The error of a failed sum. Raises PeerLostError if the lost peer is known."""
        if self._is_closed:
            return _closed()
        self.leave()  # so that the other ranks notice, and come to the barrier
        self._links.barrier()
        return ProtocolError(f"a sum of {self.size} devices failed, and none is lost: {reason}")


class _StreamWork:
    """Work on another stream of the GPU. See `BackgroundWork`."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Order later launches after this work."""
        torch.cuda.current_stream().wait_event(self._event)


def _gloo(store: Any, rank: int, size: int) -> Any:
    """A gloo group over loopback sockets."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=TIMEOUT_S)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    for name, value in _NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    options = ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=TIMEOUT_S)
    return ProcessGroupNCCL(store, rank, size, options)


def _flat(array: Tensor) -> Tensor:
    if not array.is_contiguous():
        raise ValueError(
            f"a collective sums contiguous tensors; this one of shape {tuple(array.shape)} has "
            f"strides {array.stride()}"
        )
    return array.view(-1)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8).view(-1)


def _add_in_order(terms: Tensor, into: Tensor) -> None:
    """`into` = ((terms[0] + terms[1]) + ...); it may be terms[0]."""
    total = terms[0]
    for term in terms[1:-1]:
        total = torch.add(total, term, out=terms[0])
    torch.add(total, terms[-1], out=into)


def _closed() -> ChannelClosedError:
    return ChannelClosedError("the collective was closed")
