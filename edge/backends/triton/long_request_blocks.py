"""Blocks of a request that is longer than memory, and uses all of it.

Usually a block of the pool holds the same tokens of every layer. The layers of this request are
swapped in and out one by one, so each layer has its own blocks, at any free places of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from edge.backends.triton.device import Device, Mirror


class SpreadBlocks:
    """The blocks of each layer, numbered over all layers: layer i has numbers from i *
    `num_blocks`.

    Layers are counted within the shard. Two threads may use it for two layers at once.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_layers: int,
        num_blocks: int,
        row_blocks: int,
        block_tokens: int,
    ) -> None:
        """row_blocks: blocks of the longest request in one layer."""
        self._num_layers = num_layers
        self._num_blocks = num_blocks
        self._row_blocks = row_blocks
        self._block_tokens = block_tokens
        self._table = Mirror(device, num_layers * row_blocks, torch.int32)
        self._in_table = [0] * num_layers
        """Number of each layer's blocks that are in its row of the table."""
        self._blocks: list[list[int]] = []
        self._free: list[int] = []

    def begin(self, blocks: Sequence[int]) -> None:
        """Give these blocks to every layer, by its own numbers, and free all others."""
        layers = range(self._num_layers)
        self._blocks = [[layer * self._num_blocks + block for block in blocks] for layer in layers]
        taken = set[int]().union(*self._blocks)
        numbers = range(self._num_layers * self._num_blocks)
        self._free = [number for number in numbers if number not in taken]
        self._in_table = [0] * self._num_layers

    def of_layer(self, layer: int) -> list[int]:
        """The layer's blocks in the order of their tokens."""
        return self._blocks[layer]

    def table(self, layer: int) -> Tensor:
        """The layer's table, int32 [1, row_blocks] on the device, as of the last `publish`."""
        return self._table.tensor.view(self._num_layers, 1, self._row_blocks)[layer]

    def reach(self, layer: int, tokens: int) -> None:
        """Allocate blocks for the layer's first tokens."""
        blocks = self._blocks[layer]
        for _ in range(len(blocks), math.ceil(tokens / self._block_tokens)):
            blocks.append(self._free.pop())

    def publish(self, layer: int) -> None:
        """Copy the layer's blocks into its table, for the next launches."""
        blocks, known = self._blocks[layer], self._in_table[layer]
        if known == len(blocks):
            return
        start = layer * self._row_blocks
        self._table.host[start + known : start + len(blocks)] = blocks[known:]
        self._table.to_device(start + known, start + len(blocks))
        self._in_table[layer] = len(blocks)

    def drop(self, layer: int) -> None:
        """Free the layer's blocks. No launch may still use them."""
        self._free.extend(reversed(self._blocks[layer]))
        self._blocks[layer] = []
        self._in_table[layer] = 0
