"""The KV caches of a shard's requests on a device: blocks of tokens, given out as they are needed.

A block table says where each request's tokens lie (Kwon et al., PagedAttention, 2023), so memory is
kept for the tokens under way together, not for the longest context of every request, and nothing
moves when requests come and go. Codes of 8 and 4 bits have scales of their own for each token.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge.backends.base import Step, StepLimits
from edge.backends.triton_device import Device, Mirror
from edge.layout import ShardLayout
from edge.models.spec import ModelSpec
from kernels.attention.gpu_cache import KvCache
from offload import KVShape

BLOCK_TOKENS = 16

_GROUP_SIZE = 32
"""Elements of a head that share a scale with 4 bits, where they divide it."""

_SCALE_DTYPE = torch.float16

Rows = NDArray[Any]

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
        self._slots: dict[str, int] = {}
        self._blocks: dict[int, list[int]] = {}
        """Of each slot."""
        self._lengths: dict[int, int] = {}
        table = self._table.tensor.view(limits.requests, row_blocks)
        self.layers: dict[int, KvCache] = {}
        if layout.num_kv_heads:
            self.layers = {
                layer: self._layer(spec.head_size, layout.num_kv_heads, bits, dtype, table)
                for layer in layout.layers
            }
        elements = spec.head_size if bits is None else spec.head_size * bits // 8
        row_bytes = elements * dtype.itemsize
        if bits is not None:
            row_bytes = elements + _SCALE_DTYPE.itemsize * scale_groups(spec.head_size, bits)
        self.shape = KVShape(
            num_layers=len(self.layers),
            num_kv_heads=layout.num_kv_heads,
            context_tokens=limits.context_tokens,
            row_bytes=row_bytes,
        )
        """What a tier must keep of one request."""

    @property
    def num_tokens(self) -> int:
        """Tokens kept for all requests together."""
        return sum(self._lengths.values())

    @property
    def num_requests(self) -> int:
        return len(self._slots)

    def __contains__(self, request: str) -> bool:
        return request in self._slots

    def open(self, request: str) -> int:
        """The request's slot, a new one if it has none. KeyError when every slot is taken."""
        if request not in self._slots:
            free = set(range(self._limits.requests)).difference(self._slots.values())
            if not free:
                raise KeyError(f"all {self._limits.requests} places are taken")
            slot = self._slots[request] = min(free)
            self._blocks[slot], self._lengths[slot] = [], 0
        return self._slots[request]

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return self._lengths[slot]

    def wrote(self, slot: int, length: int) -> None:
        """The slot now holds `length` tokens."""
        self._lengths[slot] = length

    def place(self, step: Step) -> None:
        """Find blocks for the step's tokens; row i of the table is then that of its entry i."""
        for row, entry in enumerate(step.entries):
            slot = self.open(entry.request)
            self._reach(slot, entry.end)
            self._write_row(row, entry.request, self._blocks[slot])

    def release(self, request: str) -> None:
        """Unknown requests are ignored."""
        slot = self._slots.pop(request, None)
        if slot is None:
            return
        self._free.extend(reversed(self._blocks.pop(slot)))
        del self._lengths[slot]
        # Another request of the same name may be given other blocks.
        self._in_table = [
            ("", 0) if owner == request else (owner, count) for owner, count in self._in_table
        ]

    def rows(self, index: int, slot: int, first: int, last: int) -> tuple[Rows, Rows]:
        """(keys, values) uint8 [num_kv_heads, tokens, row_bytes]: a token's values or codes, and
        its scales behind them. Copies; waits for what was launched before."""
        keys, values = (
            self._to_host([each[self._at(slot, first, last)] for each in parts])
            for parts in self._parts(index)
        )
        return keys, values

    @contextlib.contextmanager
    def filling(self, index: int, slot: int, tokens: int) -> Iterator[tuple[Rows, Rows]]:
        """Arrays as `rows` gives, for the first tokens; they are on the device in the end."""
        shape = (self.shape.num_kv_heads, tokens, self.shape.row_bytes)
        arrays = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
        yield arrays
        self.put(index, slot, 0, *arrays)

    def put(self, index: int, slot: int, first: int, keys: Rows, values: Rows) -> None:
        """Write rows as `rows` gives them, from token `first` on."""
        last = first + keys.shape[1]
        self._reach(slot, last)
        at = self._at(slot, first, last)
        for parts, rows in zip(self._parts(index), (keys, values), strict=True):
            start = 0
            for part in parts:
                nbytes = part.shape[-1] * part.element_size()
                some = np.ascontiguousarray(rows[:, :, start : start + nbytes].swapaxes(0, 1))
                part[at] = torch.from_numpy(some).view(part.dtype).to(part.device)
                start += nbytes

    def drop_layer(self, index: int, slot: int) -> None:
        """Never asked for: a block holds the same tokens of every layer, so no request is longer
        than memory (see `triton.py`)."""
        raise NotImplementedError

    def new_rows(self, tokens: int) -> list[Rows]:
        """Memory for so many tokens: keys and values of every layer, as `put` takes them."""
        shape = (self.shape.num_kv_heads, tokens, self.shape.row_bytes)
        return [np.empty(shape, np.uint8) for _ in range(2 * self.shape.num_layers)]

    def _parts(self, index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of keys and of values: the tensors [blocks, heads, block_tokens, n] that hold them."""
        layer = list(self.layers.values())[index]
        keys, values = [layer.keys], [layer.values]
        if layer.key_scales is not None and layer.value_scales is not None:
            keys.append(layer.key_scales)
            values.append(layer.value_scales)
        return keys, values

    def _at(self, slot: int, first: int, last: int) -> tuple[Any, slice, Any]:
        """Indices of tokens in such a tensor; what is there is [tokens, heads, n]."""
        tokens = np.arange(first, last)
        blocks = np.asarray(self._blocks[slot], np.int64)[tokens // BLOCK_TOKENS]
        on = self._device.torch
        return (
            torch.from_numpy(blocks).to(on),
            slice(None),
            torch.from_numpy(tokens % BLOCK_TOKENS).to(on),
        )

    def _to_host(self, parts: list[torch.Tensor]) -> Rows:
        """[tokens, heads, n] each, side by side as bytes [heads, tokens, row_bytes]."""
        found = [
            self._device.to_host(part.contiguous()).view(torch.uint8).numpy() for part in parts
        ]
        return np.concatenate(found, axis=-1).swapaxes(0, 1)

    def _reach(self, slot: int, tokens: int) -> None:
        """Blocks for the slot's first tokens."""
        blocks = self._blocks[slot]
        while len(blocks) * BLOCK_TOKENS < tokens:
            blocks.append(self._free.pop())

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
            torch.empty((*shape, scale_groups(head_size, bits)), dtype=_SCALE_DTYPE, device=on)
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
