"""A shard's weights as tensors on a device, and products with them."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.device import Device
from edge.backends.triton.tuning import ProductShape, Tuning
from kernels.matmul.triton import matmul
from kernels.matmul_nbits.gpu_layout import GpuMatrix, gpu_layout
from kernels.matmul_nbits.reference import QuantizedMatrix
from kernels.matmul_nbits.triton import PackedWeight, matmul_nbits

Weight: TypeAlias = Tensor | PackedWeight


class Product:
    """x [rows, columns] times one matrix of the shard, float or packed, with its bias."""

    def __init__(
        self, arrays: ShardArrays, name: str, weight: Weight, device: Device, tuning: Tuning
    ) -> None:
        self.name = name
        self.padding = arrays.padding(name)
        self._bits = arrays.format.bits
        self._tuning = tuning
        bias = arrays.vector(f"{name}.bias")
        self._bias = None if bias is None else to_device(bias, device)
        self._weight: Weight | None = weight
        self.num_rows = arrays.layout.matrix(name).num_rows

    def place(self, weight: Weight | None) -> None:
        """Compute with what lies there from now on. None: let go of it, until there is another."""
        self._weight = weight

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, outputs] of x's type unless `out` has another."""
        assert self._weight is not None
        if self.padding:
            x = torch.nn.functional.pad(x, (self.padding, 0))
        shape = ProductShape(
            bits=self._bits, rows=x.shape[0], outputs=self.num_rows, inputs=x.shape[1]
        )
        tiles = self._tuning.product(shape)
        if isinstance(self._weight, PackedWeight):
            return matmul_nbits(x, self._weight, self._bias, out=out, tiles=tiles)
        return matmul(x, self._weight, self._bias, out=out, tiles=tiles)


def read_weight(arrays: ShardArrays, name: str, device: Device, *, half_scales: bool) -> Weight:
    """A matrix of the shard's file, in memory of its own on the device."""
    if arrays.format.bits is None:
        return to_device(arrays.read(f"{name}.weight"), device)
    matrix = gpu_matrix(arrays.quantized(name), half_scales=half_scales)
    return PackedWeight.from_arrays(matrix, device.torch)


def to_device(array: NDArray[Any], device: Device) -> Tensor:
    """An array that is the caller's to give away, as a tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).to(device.torch).view(torch.bfloat16)
    return torch.from_numpy(array).to(device.torch)


def gpu_matrix(matrix: QuantizedMatrix, *, half_scales: bool) -> GpuMatrix:
    """half_scales: keep scales as float16, if it holds them; a fifth less to read of int4."""
    if half_scales:
        try:
            return gpu_layout(matrix, half_scales=True)
        except ValueError:
            pass  # some scale is too large or too small for float16
    return gpu_layout(matrix)
