"""The KV caches of a shard's requests on a device: blocks of tokens, given out as they are needed.

A block table says where each request's tokens lie (Kwon et al., PagedAttention, 2023), so memory is
kept for the tokens under way together, not for the longest context of every request, and nothing
moves when requests come and go. Codes of 8 and 4 bits have scales of their own for each token.
"""

from __future__ import annotations

import math

import torch

from edge.backends.base import Step, StepLimits
from edge.backends.triton_device import Device, Mirror
from edge.errors import RequestError
from edge.layout import ShardLayout
from edge.models.spec import ModelSpec
from kernels.attention.gpu_cache import KvCache

BLOCK_TOKENS = 16

_GROUP_SIZE = 32
"""Elements of a head that share a scale with 4 bits, where they divide it."""

_CODES = {8: torch.int8, 4: torch.uint8}


class BlockCache:
    """What each request's tokens left in each layer. Used from the compute thread."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        limits: StepLimits,
        device: Device,
        *,
        bits: int | None,
        dtype: torch.dtype,
    ) -> None:
        """bits: of a code; None for floats, which are of `dtype`."""
        self._limits = limits
        self._device = device
        row_blocks = math.ceil(limits.context_tokens / BLOCK_TOKENS)
        # The last block of each request may have room left.
        self.num_blocks = min(
            math.ceil(limits.cached_tokens / BLOCK_TOKENS) + limits.requests,
            row_blocks * limits.requests,
        )
        self._table = Mirror(device, limits.requests * row_blocks, torch.int32)
        self._rows = self._table.host.reshape(limits.requests, row_blocks)
        self._in_table: list[tuple[str, int]] = []
        """Of each row of the table: whose blocks they are, and how many."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        table = self._table.tensor.view(limits.requests, row_blocks)
        self.layers: dict[int, KvCache] = {}
        if layout.num_kv_heads:
            self.layers = {
                layer: self._layer(spec.head_size, layout.num_kv_heads, bits, dtype, table)
                for layer in layout.layers
            }

    @property
    def num_tokens(self) -> int:
        """Tokens kept for all requests together."""
        return sum(self._lengths.values())

    def place(self, step: Step) -> None:
        """Find blocks for the step's tokens; row i of the table is then that of its entry i.

        Raises RequestError when more requests or tokens are under way than there is memory for.
        """
        limits = self._limits
        new = sum(len(entry.tokens) for entry in step.entries)
        if self.num_tokens + new > limits.cached_tokens:
            raise RequestError(
                f"{self.num_tokens + new} tokens under way; memory is kept for "
                f"{limits.cached_tokens}"
            )
        unknown = sum(entry.request not in self._blocks for entry in step.entries)
        if len(self._blocks) + unknown > limits.requests:
            raise RequestError(f"too many requests at once: all {limits.requests} places are taken")
        for row, entry in enumerate(step.entries):
            blocks = self._blocks.setdefault(entry.request, [])
            self._lengths.setdefault(entry.request, 0)
            while len(blocks) * BLOCK_TOKENS < entry.end:
                blocks.append(self._free.pop())
            self._write_row(row, entry.request, blocks)

    def wrote(self, step: Step) -> None:
        """The step's tokens are in the cache."""
        for entry in step.entries:
            self._lengths[entry.request] = entry.end

    def release(self, request: str) -> None:
        """Unknown requests are ignored."""
        self._free.extend(reversed(self._blocks.pop(request, [])))
        self._lengths.pop(request, None)
        # Another request of the same name may be given other blocks.
        self._in_table = [
            ("", 0) if owner == request else (owner, count) for owner, count in self._in_table
        ]

    def _write_row(self, row: int, request: str, blocks: list[int]) -> None:
        """Most steps find everything in the table already: a block lasts for many tokens."""
        while len(self._in_table) <= row:
            self._in_table.append(("", 0))
        if self._in_table[row] == (request, len(blocks)):
            return
        self._in_table[row] = (request, len(blocks))
        self._rows[row, : len(blocks)] = blocks
        start = row * self._rows.shape[1]
        self._table.to_device(start, start + len(blocks))

    def _layer(
        self,
        head_size: int,
        num_kv_heads: int,
        bits: int | None,
        dtype: torch.dtype,
        table: torch.Tensor,
    ) -> KvCache:
        shape = (self.num_blocks, num_kv_heads, BLOCK_TOKENS)
        on = self._device.torch
        if bits is None:
            keys, values = (
                torch.empty((*shape, head_size), dtype=dtype, device=on) for _ in range(2)
            )
            return KvCache(keys=keys, values=values, block_table=table)
        keys, values = (
            torch.empty((*shape, head_size * bits // 8), dtype=_CODES[bits], device=on)
            for _ in range(2)
        )
        key_scales, value_scales = (
            torch.empty((*shape, scale_groups(head_size, bits)), dtype=torch.float16, device=on)
            for _ in range(2)
        )
        return KvCache(
            keys=keys,
            values=values,
            key_scales=key_scales,
            value_scales=value_scales,
            block_table=table,
        )


def scale_groups(head_size: int, bits: int) -> int:
    """Scales of one token's key, or value, of one head."""
    return head_size // _GROUP_SIZE if bits == 4 and head_size % _GROUP_SIZE == 0 else 1
