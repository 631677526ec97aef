"""A shard's weights as tensors on a device, and products with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

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
from edge.kernels.matmul_nbits.gpu_layout import gpu_layout
from edge.kernels.matmul_nbits.reference import QuantizedMatrix
from edge.kernels.matmul_nbits.triton import PackedWeight, matmul_nbits
from edge.weights.block_matrices import (
    Blocks,
    OffsetBlocks,
    SortedBlocks,
    SortedOffsetBlocks,
    SortedZeroBlocks,
    ZeroBlocks,
)
from edge.weights.float_matrices import Floats
from edge.weights.matrix_kind import MatrixKind
from edge.weights.recipe import StoredMatrix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffsetWeight:
    """Codes, and an offset for each of their blocks: float32 [outputs, blocks]."""

    packed: PackedWeight
    offsets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedWeight:
    """Codes whose columns are stored in another order: int32 [columns], the input of each."""

    stored: PackedWeight | OffsetWeight
    order: Tensor


Weight: TypeAlias = Tensor | PackedWeight | OffsetWeight | SortedWeight


class Product:
    """x [rows, columns] times one matrix of the shard, float or packed, with its bias.

    A matrix of several kinds is as many products, each of which makes some of the columns.
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
        """Where what it is given is summed up."""
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
        """Compute with what lies there from now on. None: let go of it, until there is another."""
        self._weights = () if weight is None else tuple(map(weight, self.stored))

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, outputs] of x's type unless `out` has another."""
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
        shape = ProductShape(
            bits=stored.kind.bits, rows=x.shape[0], outputs=len(stored.rows), inputs=x.shape[1]
        )
        return _PRODUCTS[type(stored.kind)].multiply(
            x,
            self._weights[number],
            self._biases[number],
            out=out,
            tiles=self._tuning.product(shape),
        )


def read_weight(
    arrays: ShardArrays, stored: StoredMatrix, device: Device, *, half_scales: bool
) -> Weight:
    """A matrix of the shard's file, in memory of its own on the device."""
    laid_out = gpu_arrays(arrays, stored, half_scales=half_scales)
    return placed(stored, lambda array: to_device(laid_out[array], device))


def gpu_arrays(
    arrays: ShardArrays, stored: StoredMatrix, *, half_scales: bool
) -> dict[str, NDArray[Any]]:
    """The arrays that the kernels read, by name.

    half_scales: keep scales as float16, if it holds them; a fifth less to read of int4.
    """
    return _PRODUCTS[type(stored.kind)].arrays(arrays.matrix(stored), half_scales)


def placed(stored: StoredMatrix, tensor: Callable[[str], Tensor]) -> Weight:
    """The matrix, of which these arrays lie on the device."""
    return _PRODUCTS[type(stored.kind)].weight(tensor, stored.kind, stored.columns)


def to_device(array: NDArray[Any], device: Device) -> Tensor:
    """An array that is the caller's to give away, as a tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).to(device.torch).view(torch.bfloat16)
    return torch.from_numpy(array).to(device.torch)


class _Product(Protocol):
    """What differs from one kind of matrix to another."""

    def arrays(self, matrix: Any, half_scales: bool) -> dict[str, NDArray[Any]]: ...

    def weight(self, tensor: Callable[[str], Tensor], kind: Any, columns: int) -> Weight: ...

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None, **named: Any) -> Tensor: ...


class _Floats:
    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, **named: Any) -> Tensor:
        return matmul(x, weight, bias, **named)

    def arrays(self, matrix: NDArray[np.float32], half_scales: bool) -> dict[str, NDArray[Any]]:
        return {"weight": matrix}

    def weight(self, tensor: Callable[[str], Tensor], kind: Floats, columns: int) -> Tensor:
        return tensor("weight")


class _Blocks:
    def multiply(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, **named: Any
    ) -> Tensor:
        return matmul_nbits(x, weight, bias, **named)

    def arrays(self, matrix: QuantizedMatrix, half_scales: bool) -> dict[str, NDArray[Any]]:
        zeros = matrix.zero_points
        try:
            found = gpu_layout(matrix, zero_points=zeros, half_scales=half_scales)
        except ValueError:  # some scale is too large or too small for float16
            found = gpu_layout(matrix, zero_points=zeros)
        arrays = {"words": found.words.view(np.int32), "scales": found.scales}
        if found.zero_points is not None:
            arrays["zero_points"] = found.zero_points
        return arrays

    def weight(self, tensor: Callable[[str], Tensor], kind: Blocks, columns: int) -> PackedWeight:
        return PackedWeight(
            words=tensor("words"),
            scales=tensor("scales"),
            zero_points=tensor("zero_points") if isinstance(kind, ZeroBlocks) else None,
            bits=kind.bits,
            block_size=kind.block_size,
            columns=columns,
        )


class _OffsetBlocks:
    """The product with codes, and one with the sums of each block of x."""

    def multiply(
        self,
        x: Tensor,
        weight: OffsetWeight,
        bias: Tensor | None,
        out: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        out = matmul_nbits(x, weight.packed, bias, out=out, **named)
        size = weight.packed.block_size
        whole = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
        sums = whole.view(x.shape[0], -1, size).sum(-1, dtype=torch.float32)
        return out.add_(matmul(sums, weight.offsets))

    def arrays(self, matrix: QuantizedMatrix, half_scales: bool) -> dict[str, NDArray[Any]]:
        assert matrix.offsets is not None
        return {**_BLOCKS.arrays(matrix, half_scales), "offsets": matrix.offsets}

    def weight(
        self, tensor: Callable[[str], Tensor], kind: OffsetBlocks, columns: int
    ) -> OffsetWeight:
        return OffsetWeight(packed=_BLOCKS.weight(tensor, kind, columns), offsets=tensor("offsets"))


class _Sorted:
    """The product with the inputs in the order that columns are stored in."""

    def __init__(self, product: _Product) -> None:
        self._product = product

    def multiply(
        self, x: Tensor, weight: SortedWeight, bias: Tensor | None, **named: Any
    ) -> Tensor:
        return self._product.multiply(x[:, weight.order], weight.stored, bias, **named)

    def arrays(self, matrix: QuantizedMatrix, half_scales: bool) -> dict[str, NDArray[Any]]:
        assert matrix.order is not None
        return {**self._product.arrays(matrix, half_scales), "order": matrix.order}

    def weight(self, tensor: Callable[[str], Tensor], kind: Blocks, columns: int) -> SortedWeight:
        stored = self._product.weight(tensor, kind, columns)
        assert isinstance(stored, PackedWeight | OffsetWeight)
        return SortedWeight(stored=stored, order=tensor("order"))


_BLOCKS, _OFFSETS = _Blocks(), _OffsetBlocks()
_PRODUCTS: dict[type[MatrixKind[Any]], _Product] = {
    Floats: _Floats(),
    Blocks: _BLOCKS,
    ZeroBlocks: _BLOCKS,
    OffsetBlocks: _OFFSETS,
    SortedBlocks: _Sorted(_BLOCKS),
    SortedZeroBlocks: _Sorted(_BLOCKS),
    SortedOffsetBlocks: _Sorted(_OFFSETS),
}
