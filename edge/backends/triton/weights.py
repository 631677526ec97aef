"""A shard's weights as tensors on a device, and products with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.device import Device
from edge.backends.triton.observation import Grams
from edge.backends.triton.tuning import ProductShape, Tuning
from edge.kernels.matmul.triton import matmul
from edge.kernels.matmul_nbits.gpu_layout import WORDS, arranged, num_tiles
from edge.kernels.matmul_nbits.reference import QuantizedMatrix
from edge.kernels.matmul_nbits.triton import (
    MOST_TILED_ROWS,
    PackedWeight,
    Weight,
    matmul_nbits,
)
from edge.weights.block_matrices import Blocks
from edge.weights.recipe import StoredMatrix

_HALF_ROUNDING = 2.0**-11
"""Relative; a scale that loses more than this as float16 is too small or too large for it."""


_EXACT_FLOATS = (".router", ".linear_gates")
"""Endings of the names of matrices that stay float32: small differences decide what they choose."""

_ARRANGED_BYTES = 16 << 20


class Product:
    """x [rows, columns] times one matrix of the shard, float or packed, with its bias.

    Each kind of matrix is a separate product, which computes some of the columns.
    """

    def __init__(
        self,
        arrays: ShardArrays,
        name: str,
        weight: Callable[[StoredMatrix], Weight],
        device: Device,
        tuning: Tuning,
    ) -> None:
        self.name = name
        self.stored = arrays.stored(name)
        self.num_rows = arrays.layout.matrix(name).num_rows
        self.grams: Grams | None = None
        """Sums of its inputs, for quantization with data."""
        self._tuning = tuning
        self._weights: tuple[Weight, ...] = ()
        whole = arrays.vector(f"{name}.bias")
        bias = None if whole is None else to_device(whole, device)
        self._biases = [
            None if bias is None else bias[each.rows.start : each.rows.stop].contiguous()
            for each in self.stored
        ]
        self.place(weight)

    def place(self, weight: Callable[[StoredMatrix], Weight] | None) -> None:
        """Set the weights to compute with. None: release them until the next call."""
        self._weights = () if weight is None else tuple(map(weight, self.stored))

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The product [rows, outputs], of x's type or of `out`'s."""
        assert self._weights
        if self.grams is not None:
            self.grams.add(self.name, x)
        if len(self.stored) == 1:
            return self._multiply(0, x, out)
        if out is None:
            out = torch.empty(x.shape[0], self.num_rows, dtype=x.dtype, device=x.device)
        for number, stored in enumerate(self.stored):
            out[:, stored.rows.start : stored.rows.stop] = self._multiply(number, x, None)
        return out

    def _multiply(self, number: int, x: Tensor, out: Tensor | None) -> Tensor:
        stored = self.stored[number]
        if stored.padding:
            x = torch.nn.functional.pad(x, (stored.padding, 0))
        weight, bias = self._weights[number], self._biases[number]
        if weight.order is not None:
            x = x[:, weight.order]
        if not isinstance(weight.matrix, PackedWeight):
            return matmul(x, weight.matrix, bias, out=out)
        shape = ProductShape(
            bits=weight.matrix.bits, rows=x.shape[0], outputs=len(stored.rows), inputs=x.shape[1]
        )
        is_tiled = shape.rows <= MOST_TILED_ROWS
        tiles = self._tuning.product(shape) if is_tiled else None
        out = matmul_nbits(x, weight.matrix, bias, out=out, tiles=tiles)
        if weight.offsets is None:
            return out
        size = weight.matrix.block_size
        whole = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
        sums = whole.view(x.shape[0], -1, size).sum(-1, dtype=torch.float32)
        return out.add_(matmul(sums, weight.offsets))


def read_weight(
    arrays: ShardArrays, stored: StoredMatrix, device: Device, *, is_half: bool
) -> Weight:
    """A matrix of the shard's file, in its own device memory. is_half: see `gpu_arrays`."""
    return placed(stored, gpu_arrays(arrays, stored, device, is_half=is_half).__getitem__)


def gpu_arrays(
    arrays: ShardArrays, stored: StoredMatrix, device: Device, *, is_half: bool
) -> dict[str, Tensor]:
    """The arrays that the kernels read, by name, on the device.

    is_half: inputs of products are bfloat16. Then so are weights that are floats, but for small
    ones that decide something, and scales are float16 where they fit, which makes int4 in blocks of
    32 a fifth smaller.
    """
    matrix = arrays.matrix(stored)
    if not isinstance(matrix, QuantizedMatrix):
        weight = to_device(matrix, device)
        is_exact = stored.name.endswith(_EXACT_FLOATS)
        return {"weight": weight.bfloat16() if is_half and not is_exact else weight}
    scales = torch.from_numpy(matrix.scales).to(device.torch).t().contiguous()
    zeros = matrix.zero_points
    named = {
        "words": _arranged(matrix, device),
        "scales": _halved(scales) if is_half else scales,
        "zero_points": None if zeros is None else to_device(np.ascontiguousarray(zeros.T), device),
        "offsets": None if matrix.offsets is None else to_device(matrix.offsets, device),
        "order": None if matrix.order is None else to_device(matrix.order, device),
    }
    return {name: array for name, array in named.items() if array is not None}


def _arranged(matrix: QuantizedMatrix, device: Device) -> Tensor:
    """By some rows at a time: arranging takes several times the memory of what is arranged."""
    rows, blocks, nbytes = matrix.codes.shape
    tiles = num_tiles(blocks * matrix.block_size, matrix.bits)
    words = torch.empty(tiles, rows, WORDS, dtype=torch.int32, device=device.torch)
    each = max(1, _ARRANGED_BYTES // (blocks * nbytes))
    for start in range(0, rows, each):
        some = torch.from_numpy(matrix.codes[start : start + each]).to(device.torch)
        words[:, start : start + each] = arranged(some, matrix.bits)
    return words


def _halved(scales: Tensor) -> Tensor:
    """As float16, unless one of them is too large or too small for it."""
    halved = scales.half()
    is_lost = (halved.float() - scales).abs() > _HALF_ROUNDING * scales.abs()
    return scales if bool(is_lost.any()) or not bool(halved.isfinite().all()) else halved


def placed(stored: StoredMatrix, tensor: Callable[[str], Tensor]) -> Weight:
    """The weight of a matrix. tensor: gives its arrays on the device, by name."""
    kind = stored.kind
    if not isinstance(kind, Blocks):
        return Weight(matrix=tensor("weight"))
    packed = PackedWeight(
        words=tensor("words"),
        scales=tensor("scales"),
        zero_points=tensor("zero_points") if kind.zero_points else None,
        bits=kind.bits,
        block_size=kind.block_size,
        columns=stored.columns,
    )
    return Weight(
        matrix=packed,
        offsets=tensor("offsets") if kind.offsets else None,
        order=tensor("order") if kind.is_sorted else None,
    )


def to_device(array: NDArray[Any], device: Device) -> Tensor:
    """An array as a tensor on the device. The caller must not use the array afterwards."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).to(device.torch).view(torch.bfloat16)
    return torch.from_numpy(array).to(device.torch)


def from_device(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array in main memory; bfloat16 as `ml_dtypes` has it."""
    if tensor.dtype == torch.bfloat16:
        return from_device(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    found: NDArray[Any] = tensor.cpu().numpy()
    return found
