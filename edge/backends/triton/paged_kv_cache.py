"""The paged KV cache of a shard on a device: blocks of tokens, allocated on demand.

A block table maps each request's tokens to blocks (Kwon et al., PagedAttention, 2023). So memory is
reserved for all tokens together, not for the longest context of every request, and nothing moves
when requests come and go. Codes of 8 and 4 bits have scales for each token. A request longer than
memory uses all of it: see `long_request_blocks.py`. States of layers are in `request_states.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge.backends.kv_pool import WithoutWindows
from edge.backends.triton.device import Device, Mirror
from edge.backends.triton.long_request_blocks import SpreadBlocks
from edge.backends.triton.request_states import RequestStates
from edge.errors import RequestError
from edge.kernels.kv_cache.gpu_cache import KvCache
from edge.offload import KVLayer, KVShape
from edge.protocol.step import Step, StepLimits
from edge.weights.layout import ShardLayout

BLOCK_TOKENS = 16

_GROUP_SIZE = 32
"""Elements that share a scale with 4 bits, if they divide a head."""

_SCALE_DTYPE = torch.float16

_PIECE_TOKENS = 4096
"""Most tokens moved to or from blocks at once, which bounds the room for them on the device."""

Rows = NDArray[Any]

_CODES = {8: torch.int8, 4: torch.uint8}


class BlockCache(WithoutWindows):
    """Keys and values of requests, by layer. Used from the compute thread."""

    def __init__(
        self,
        layout: ShardLayout,
        limits: StepLimits,
        device: Device,
        *,
        bits: int | None,
        dtype: torch.dtype,
    ) -> None:
        """bits: of a code; None for floats of `dtype`."""
        self._limits = limits
        self._device = device
        row_blocks = math.ceil(limits.context_tokens / BLOCK_TOKENS)
        # The last block of each request may be partly empty, also in the prefix cache.
        self.num_blocks = min(
            math.ceil(limits.cached_tokens / BLOCK_TOKENS) + limits.caches,
            row_blocks * limits.caches,
        )
        self._table = Mirror(device, limits.requests * row_blocks, torch.int32)
        self._rows = self._table.host.reshape(limits.requests, row_blocks)
        self._in_table: list[tuple[str, int]] = []
        """The request, and the number of its blocks, in each row of the table."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._num_slots = limits.caches
        self.states_of_layers = RequestStates(
            layout, device, requests=limits.requests, places=limits.state_places
        )
        self._slots: dict[str, int] = {}
        self._blocks: dict[int, list[int]] = {}
        """Blocks by slot."""
        self._lengths: dict[int, int] = {}
        mixers = layout.caches
        heads = [(each.num_kv_heads, each.cached_size) for each in mixers.values()]
        self._wholes = [
            self._tensors(heads.count(each), *each, bits, dtype) for each in dict.fromkeys(heads)
        ]
        """The tensors for each size of heads, with its layers one after the other."""
        groups = list(dict.fromkeys(heads))
        self._place_of = [
            (groups.index(each), heads[:index].count(each)) for index, each in enumerate(heads)
        ]
        """The index of each layer's tensors, and of the layer within them."""
        table = self._table.tensor.view(limits.requests, row_blocks)
        numbers = {layer: index for index, layer in enumerate(mixers)}
        self.numbers = {layer: numbers[layout.cache_layer(layer)] for layer in layout.attentions}
        """The index of the cache that each layer uses."""
        self._even = {
            layer: KvCache(**self._of_layer(index), block_table=table)
            for layer, index in self.numbers.items()
        }
        self._spread: SpreadBlocks | None = None
        self._far: dict[int, KvCache] = {}
        """Caches of the layers for a request that is longer than memory."""
        self._far_slot: int | None = None
        """The slot of that request, if there is one."""
        self._far_tokens = 0
        """Tokens of that request after the step."""
        if limits.exceeds_memory:
            if len(groups) > 1:
                raise RequestError(
                    "the layers of this model have keys and values of different sizes, which a GPU "
                    "does not support for requests that are longer than its memory; load the model "
                    "with fewer context_tokens"
                )
            self._spread = SpreadBlocks(
                device,
                num_layers=len(heads),
                num_blocks=self.num_blocks,
                row_blocks=row_blocks,
                block_tokens=BLOCK_TOKENS,
            )
            self._far = {
                layer: KvCache(**self._wholes[0], block_table=self._spread.table(index))
                for layer, index in self.numbers.items()
            }
        self.shape = KVShape(
            layers=tuple(
                KVLayer(num_kv_heads=count, row_bytes=_row_bytes(size, bits, dtype))
                for count, size in heads
            ),
            context_tokens=limits.context_tokens,
        )
        """The shape of one request's keys and values in a tier."""

    @property
    def can_cut(self) -> bool:
        """Whether a request can be cut to its first tokens, because it has no states."""
        return not self.states_of_layers

    def states(self, first: int, count: int) -> list[NDArray[np.float32]]:
        """Copies of the states of `count` slots from `first`."""
        return self.states_of_layers.read(first, count)

    def put_states(self, slot: int, states: Sequence[NDArray[np.float32]]) -> None:
        """Set a slot's states, in the form of `states` for one slot."""
        self.states_of_layers.write(slot, states)

    def save_states(self, slot: int, place: int) -> None:
        """Copy a slot's states to a place, over its contents."""
        self.states_of_layers.save(slot, place)

    def saved_states(self, place: int) -> list[NDArray[Any]]:
        """Copies of the states in a place, in the form of `states`."""
        return self.states_of_layers.read_place(place)

    def new_states(self) -> list[NDArray[Any]]:
        """Arrays for the states of one request, in the form of `states`."""
        return self.states_of_layers.new_arrays()

    def load_states(self, slot: int, place: int) -> None:
        """Copy the states of a place to a slot."""
        self.states_of_layers.load(slot, place)

    def drop_states(self, slot: int) -> None:
        """Free the memory of a slot's states until states are set again."""
        self.states_of_layers.drop(slot)

    @property
    def is_spread(self) -> bool:
        """Whether one request has all memory. Its layers need `begin_layer`."""
        return self._far_slot is not None

    @property
    def layers(self) -> dict[int, KvCache]:
        """The caches of the layers for the kernels of this step."""
        return self._far if self.is_spread else self._even

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self._lengths.values())

    @property
    def num_requests(self) -> int:
        return len(self._slots)

    def __contains__(self, request: str) -> bool:
        return request in self._slots

    def open(self, request: str) -> int:
        """The request's slot, a new one if it has none. Raises KeyError if all slots or all states
        are taken."""
        if request not in self._slots:
            if self.is_spread:
                raise KeyError("a request that is longer than memory uses all of it")
            free = set(range(self._num_slots)).difference(self._slots.values())
            if not free:
                raise KeyError(f"all {self._num_slots} places are taken")
            slot = min(free)
            self.states_of_layers.open(slot)
            self._slots[request] = slot
            self._blocks[slot], self._lengths[slot] = [], 0
        return self._slots[request]

    def length(self, slot: int) -> int:
        """Number of tokens in the slot."""
        return self._lengths[slot]

    def wrote(self, slot: int, length: int) -> None:
        """Record that the slot has `length` tokens now."""
        self._lengths[slot] = length

    def shrink(self, slot: int, length: int) -> None:
        """Forget tokens after the first `length`."""
        if slot == self._far_slot or length >= self._lengths[slot]:
            return
        self._lengths[slot] = length
        blocks = self._blocks[slot]
        while len(blocks) > math.ceil(length / BLOCK_TOKENS):
            self._free.append(blocks.pop())
        self._in_table.clear()  # the slot may get other blocks

    def rename(self, request: str, to: str) -> None:
        """Give the slot of `request` to request `to`, which has none."""
        self._slots[to] = self._slots.pop(request)
        self._in_table = [
            ("", 0) if owner in {request, to} else (owner, count) for owner, count in self._in_table
        ]

    def place(self, step: Step) -> None:
        """Allocate blocks for the step's tokens, and fill row i of the block table for entry i."""
        for row, entry in enumerate(step.entries):
            slot = self.open(entry.request)
            if entry.end > self._limits.cached_tokens:
                self._spread_out(slot)
            if slot == self._far_slot:
                self._far_tokens = entry.end
                continue
            self._reach(slot, entry.end)
            self._write_row(row, entry.request, self._blocks[slot])
        self.states_of_layers.place([self._slots[entry.request] for entry in step.entries])

    def begin_layer(self, index: int) -> None:
        """Allocate blocks of this layer for a request longer than memory."""
        if self._spread is not None and self._far:
            self._spread.reach(index, self._far_tokens)
            self._spread.publish(index)

    def release(self, request: str) -> None:
        """Free a request. Unknown requests are ignored."""
        slot = self._slots.pop(request, None)
        if slot is None:
            return
        self._free.extend(reversed(self._blocks.pop(slot)))
        self.states_of_layers.drop(slot)
        del self._lengths[slot]
        if slot == self._far_slot:
            self._far_slot = None
        # A later request of the same name may get other blocks.
        self._in_table = [
            ("", 0) if owner == request else (owner, count) for owner, count in self._in_table
        ]

    def rows(self, index: int, slot: int, first: int, last: int) -> tuple[Rows, Rows]:
        """(keys, values) uint8 [num_kv_heads, tokens, row_bytes]: a token's values or codes, then
        its scales. Copies; waits for earlier launches."""
        keys, values = (self._host_rows(index, last - first) for _ in range(2))
        for start, stop in _pieces(first, last):
            at = self._at(index, slot, start, stop)
            for parts, into in zip(self._parts(index), (keys, values), strict=True):
                found = [each[at].contiguous().view(torch.uint8) for each in parts]
                side_by_side = torch.cat(found, dim=-1).transpose(0, 1).contiguous()
                into[:, start - first : stop - first] = self._device.to_host(side_by_side).numpy()
        return keys, values

    @contextlib.contextmanager
    def filling(self, index: int, slot: int, tokens: int) -> Iterator[tuple[Rows, Rows]]:
        """Arrays as of `rows`, for the first tokens, which are copied to the device when the
        context ends. The copy overlaps computation."""
        keys, values = (self._host_rows(index, tokens) for _ in range(2))
        yield keys, values
        with self._device.side_stream():
            self.put(index, slot, 0, keys, values)

    def put(self, index: int, slot: int, first: int, keys: Rows, values: Rows) -> None:
        """Write rows in the form of `rows`, from token `first` on."""
        last = first + keys.shape[1]
        if slot == self._far_slot and self._spread is not None:
            self._spread.reach(index, last)
        else:
            self._reach(slot, last)
        for start, stop in _pieces(first, last):
            at = self._at(index, slot, start, stop)
            for parts, rows in zip(self._parts(index), (keys, values), strict=True):
                some = torch.from_numpy(rows[:, start - first : stop - first])
                side_by_side = some.to(self._device.torch, non_blocking=True).transpose(0, 1)
                column = 0
                for part in parts:
                    nbytes = part.shape[-1] * part.element_size()
                    own = side_by_side[:, :, column : column + nbytes].contiguous()
                    part[at] = own.view(part.dtype)
                    column += nbytes

    def drop_layer(self, index: int, slot: int) -> None:
        """Free the blocks of one layer and lose their contents. The slot's request has all memory
        until it is released."""
        assert self._spread is not None
        self._spread_out(slot)
        self._device.synchronize()  # earlier launches may still read them
        self._spread.drop(index)

    def new_rows(self, tokens: int) -> list[Rows]:
        """Arrays for keys and values of `tokens` tokens in every layer, as `put` takes them."""
        shapes = [(layer.num_kv_heads, tokens, layer.row_bytes) for layer in self.shape.layers]
        return [np.empty(shape, np.uint8) for shape in shapes for _ in range(2)]

    def _spread_out(self, slot: int) -> None:
        """Give the slot's request, the only one, all memory. Its blocks keep their places."""
        if slot == self._far_slot:
            return
        assert self._spread is not None
        blocks, self._blocks[slot] = self._blocks[slot], []
        self._free.extend(reversed(blocks))
        self._spread.begin(blocks)
        self._far_slot = slot

    def _parts(self, index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors [blocks, heads, block_tokens, n] of keys, and those of values."""
        whole = self._wholes[self._place_of[index][0]]
        keys, values = (
            [whole[name] for name in (f"{which}s", f"{which}_scales") if name in whole]
            for which in ("key", "value")
        )
        return keys, values

    def _at(self, index: int, slot: int, first: int, last: int) -> tuple[Any, slice, Any]:
        """Indices of a layer's tokens in a tensor of `_parts`; they select [tokens, heads, n]."""
        tokens = np.arange(first, last)
        if slot == self._far_slot and self._spread is not None:
            blocks = np.asarray(self._spread.of_layer(index), np.int64)
        else:
            begin = self._place_of[index][1] * self.num_blocks
            blocks = np.asarray(self._blocks[slot], np.int64) + begin
        on = self._device.torch
        return (
            torch.from_numpy(blocks[tokens // BLOCK_TOKENS]).to(on),
            slice(None),
            torch.from_numpy(tokens % BLOCK_TOKENS).to(on),
        )

    def _host_rows(self, index: int, tokens: int) -> Rows:
        layer = self.shape.layers[index]
        return self._device.host_bytes((layer.num_kv_heads, tokens, layer.row_bytes))

    def _reach(self, slot: int, tokens: int) -> None:
        """Allocate blocks for the slot's first tokens."""
        blocks = self._blocks[slot]
        while len(blocks) * BLOCK_TOKENS < tokens:
            blocks.append(self._free.pop())

    def _write_row(self, row: int, request: str, blocks: list[int]) -> None:
        """Write blocks into a row of the table, unless they are there, as in most steps."""
        while len(self._in_table) <= row:
            self._in_table.append(("", 0))
        if self._in_table[row] == (request, len(blocks)):
            return
        self._in_table[row] = (request, len(blocks))
        self._rows[row, : len(blocks)] = blocks
        start = row * self._rows.shape[1]
        self._table.to_device(start, start + len(blocks))

    def _of_layer(self, index: int) -> dict[str, torch.Tensor]:
        """The layer's part of each tensor, with its blocks numbered from 0."""
        group, number = self._place_of[index]
        start = number * self.num_blocks
        whole = self._wholes[group].items()
        return {name: each[start : start + self.num_blocks] for name, each in whole}

    def _tensors(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        bits: int | None,
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """The tensors for `KvCache`, with the blocks of the layers one after the other."""
        widths = {"": (head_size, dtype)}
        if bits is not None:
            widths = {
                "": (head_size * bits // 8, _CODES[bits]),
                "_scales": (scale_groups(head_size, bits), _SCALE_DTYPE),
            }
        shape = (num_layers * self.num_blocks, num_kv_heads, BLOCK_TOKENS)
        return {
            f"{which}{name or 's'}": torch.empty(
                (*shape, width), dtype=kind, device=self._device.torch
            )
            for which in ("key", "value")
            for name, (width, kind) in widths.items()
        }


def _row_bytes(head_size: int, bits: int | None, dtype: torch.dtype) -> int:
    """Bytes of a token's key (or value) of one head, with its scales."""
    if bits is None:
        return int(head_size * dtype.itemsize)
    return int(head_size * bits // 8 + _SCALE_DTYPE.itemsize * scale_groups(head_size, bits))


def scale_groups(head_size: int, bits: int) -> int:
    """Number of scales of a token's key (or value) of one head."""
    return head_size // _GROUP_SIZE if bits == 4 and head_size % _GROUP_SIZE == 0 else 1


def _pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, _PIECE_TOKENS):
        yield start, min(start + _PIECE_TOKENS, last)
