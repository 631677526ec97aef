"""Shared by every `triton.py` face: the launch of a kernel, and checks of its tensors.

Knows torch tensors; knows no operator. Kernels run on torch's current device: the caller makes
that of its tensors current. Sizes that only change speed live in frozen dataclasses, so
that a table of measured ones can take the place of the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)

SMALLEST_DOT = 16
"""tl.dot takes no side smaller than this."""

SMALLEST_SHARED_MEMORY = 99 << 10
"""Bytes that a program may have on the smallest GPUs that kernels are made for."""

_PROCESSORS_UNKNOWN = 1
_SMALL_CACHE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The compiler's layout of one program: warps of 32 threads, and loads kept in flight."""

    num_warps: int = 4
    num_stages: int = 2

    def options(self) -> dict[str, int]:
        """Multiply and add as one instruction, said aloud: Triton 3.10 changes its default."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


def row_launch(block: int) -> Launch:
    """For a program that holds one row of `block` elements: 16 of them a thread, 16 warps at most.

    Sixteen bfloat16 elements are two 16-byte loads, and half of the registers stay free.
    """
    return Launch(num_warps=min(16, max(1, block // 512)), num_stages=1)


LARGEST_ROW = 65_536
"""Elements of a row that one program holds in its registers."""


def norm_rows(
    kernel: Any, x: Tensor, *, epsilon: float, out: Tensor | None, **vectors: Tensor
) -> Tensor:
    """Each row of x [..., n] normed with vectors [n], in x's type. Raises ValueError."""
    _check_norm(x, vectors)
    out = output("out", out, shape=x.shape, like=x)
    _launch_norm(kernel, x, x, vectors, out, out, epsilon=epsilon, adds=False)
    return out


def norm_sums(
    kernel: Any,
    x: Tensor,
    addend: Tensor,
    *,
    epsilon: float,
    out: Tensor | None,
    total: Tensor | None,
    **vectors: Tensor,
) -> tuple[Tensor, Tensor]:
    """The norm of x + addend, and the sum, both in x's type. Raises ValueError."""
    _check_norm(x, vectors)
    check("addend", addend, dtypes=FLOATS, shape=x.shape, like=x)
    out = output("out", out, shape=x.shape, like=x)
    total = output("total", total, shape=x.shape, like=x, dtypes=(x.dtype,))
    if out.data_ptr() == total.data_ptr() and out.numel():
        raise ValueError("out and total are the same tensor; pass two")
    _launch_norm(kernel, x, addend, vectors, out, total, epsilon=epsilon, adds=True)
    return out, total


def _check_norm(x: Tensor, vectors: Mapping[str, Tensor]) -> None:
    check("x", x, dtypes=FLOATS)
    if not x.ndim or not 0 < x.shape[-1] <= LARGEST_ROW:
        raise ValueError(f"x needs rows of 1 to {LARGEST_ROW} elements, not {list(x.shape)}")
    for name, vector in vectors.items():
        check(name, vector, dtypes=FLOATS, shape=x.shape[-1:], like=x)


def _launch_norm(
    kernel: Any, x: Tensor, addend: Tensor, vectors: Mapping[str, Tensor], out: Tensor,
    total: Tensor, *, epsilon: float, adds: bool,
) -> None:  # fmt: skip
    columns = x.shape[-1]
    if not x.numel():
        return
    block = padded(columns)
    kernel[(x.numel() // columns,)](
        x, addend, *vectors.values(), out, total, columns, epsilon, adds=adds, block=block,
        **row_launch(block).options(),
    )  # fmt: skip


def padded(size: int, *, at_least: int = 1) -> int:
    """The power of two that holds `size`: every block of a kernel is one."""
    return max(at_least, int(triton.next_power_of_2(size)))


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return _PROCESSORS_UNKNOWN
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; where kernels are interpreted, as on the smallest GPUs."""
    if device.type != "cuda":
        return SMALLEST_SHARED_MEMORY
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def cache_bytes(device: torch.device) -> int:
    """Size of a GPU's last cache; where kernels are interpreted, of a small one's."""
    if device.type != "cuda":
        return _SMALL_CACHE_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def check(
    name: str,
    tensor: Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None] | None = None,
    like: Tensor | None = None,
    contiguous: bool = True,
) -> None:
    """ValueError unless `tensor` is what a kernel reads.

    shape: None inside it stands for any size. like: whose device it must share. Without
    `contiguous` only the last axis must be.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(_name(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {_name(tensor.dtype)}; pass {wanted}")
    if shape is not None and not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, not [{wanted}]")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors on {like.device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} is not contiguous along its last axis")


def output(
    name: str,
    given: Tensor | None,
    *,
    shape: Sequence[int],
    like: Tensor,
    dtype: torch.dtype | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
) -> Tensor:
    """The tensor to write: `given` if it fits, else a new one of `dtype` (or that of `like`)."""
    if given is None:
        return torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device)
    check(name, given, dtypes=dtypes, shape=shape, like=like)
    return given


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        expected is None or size == expected for size, expected in zip(shape, wanted, strict=True)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
