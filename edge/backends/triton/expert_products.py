"""Products of rows with the matrices of the experts that are chosen for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.tuning import InterpretedTiles, ProductShape, Tuning
from edge.kernels.experts.triton import (
    FEW_ROWS,
    ExpertStack,
    SortedUses,
    expert_product,
    expert_tiles,
    sort_uses,
)
from edge.kernels.matmul_nbits.triton import PackedWeight, ProductTiles, Weight
from edge.weights.recipe import StoredMatrix


class ExpertProducts:
    """The product of each row with the matrices of its chosen experts.

    Each kind of matrix is a separate product, which computes some of the columns.
    """

    def __init__(
        self,
        arrays: ShardArrays,
        names: Sequence[str],
        weight: Callable[[StoredMatrix], Weight],
        biases: Tensor | None,
        tuning: Tuning,
    ) -> None:
        """names: of the experts' matrices. biases: float32 [experts, outputs]."""
        self.names = tuple(names)
        self.num_rows = arrays.layout.matrix(names[0]).num_rows
        self.runs: tuple[tuple[StoredMatrix, ...], ...] = tuple(
            zip(*map(arrays.stored, names), strict=True)
        )
        """The matrices of all experts, for each kind."""
        self.biases = biases
        self._tuning = tuning
        self._stacks: tuple[ExpertStack, ...] = ()
        self.place(weight)

    def place(self, weight: Callable[[StoredMatrix], Weight] | None) -> None:
        """See `Product.place`."""
        self._stacks = ()
        if weight is not None:
            self._stacks = tuple(stack_of(list(map(weight, run))) for run in self.runs)

    def sort(self, chosen: Tensor, *, element_bytes: int) -> SortedUses | None:
        """Uses sorted by expert, for all products with the same experts; None for few rows."""
        if chosen.shape[0] <= FEW_ROWS:
            return None
        stack = self._stacks[0]
        tiles = self._tiles(self.runs[0][0], stack, chosen, element_bytes)
        return sort_uses(chosen, num_experts=stack.num_experts, rows=tiles.rows)

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        sorted_uses: SortedUses | None,
        *,
        is_part: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [rows or uses, columns], chosen int32 [rows, top_k] → [uses, outputs] of `dtype`, or
        of x's. is_part: see `expert_product`."""
        assert self._stacks
        shape = chosen.numel(), self.num_rows
        out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
        for (stored, *_others), stack in zip(self.runs, self._stacks, strict=True):
            part = slice(stored.rows.start, stored.rows.stop)
            expert_product(
                x,
                stack,
                chosen,
                None if self.biases is None else self.biases[:, part],
                tiles=self._tiles(stored, stack, chosen, x.element_size()),
                sorted_uses=sorted_uses,
                padding=stored.padding,
                is_part=is_part,
                out=out[:, part],
            )
        return out

    def _tiles(
        self, stored: StoredMatrix, stack: ExpertStack, chosen: Tensor, element_bytes: int
    ) -> ProductTiles:
        """Tiles for these products. Measured tiles are for products with one matrix only."""
        rows, top_k = chosen.shape
        if isinstance(self._tuning, InterpretedTiles):
            bits, outputs, inputs = stored.kind.bits, stack.outputs, stack.inputs
            return self._tuning.product(
                ProductShape(bits=bits or 32, rows=rows, outputs=outputs, inputs=inputs)
            )
        return expert_tiles(rows, stack, top_k=top_k, element_bytes=element_bytes)


def stack_of(weights: Sequence[Weight]) -> ExpertStack:
    """The experts' weights stacked, with float32 scales for all if one expert needs them."""
    experts = list(weights)
    packed = [each.matrix for each in experts if isinstance(each.matrix, PackedWeight)]
    if len({each.scales.dtype for each in packed}) > 1:
        experts = [
            replace(each, matrix=replace(matrix, scales=matrix.scales.float()))
            for each, matrix in zip(experts, packed, strict=True)
        ]
    return ExpertStack(experts)
