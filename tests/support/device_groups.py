"""Groups that sum tensors by torch.distributed, with gloo where there is no GPU.

Import this at the top of a test module: Triton decides at its first import that it interprets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.device_sums import join
from edge.transport import BackgroundWork, Collective
from tests.support.triton_face import only_interpreted


def joined(links: Collective) -> Collective:
    """What a shard of Triton's sums with; all ranks call this together."""
    only_interpreted()
    from edge.backends.triton.device import Device
    from edge.backends.triton.nccl import device_sums

    opened, way = join(links, device_sums(Device()))
    assert (opened.memory, way) == ("device", "gloo")
    return opened


class NumpyFace:
    """A collective of tensors on the CPU that takes numpy arrays: both lie in the same memory."""

    def __init__(self, inner: Collective) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size

    def all_reduce(self, array: NDArray[Any]) -> None:
        self.inner.all_reduce(_as_tensor(array))

    def begin_all_reduce(self, array: NDArray[Any]) -> BackgroundWork:
        return self.inner.begin_all_reduce(_as_tensor(array))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _as_tensor(array: NDArray[Any]) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
