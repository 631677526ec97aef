"""Codes in the order in which GPU kernels unpack them, for whole tiles of their tensor cores.

A tile is 16 words of 32 bits for each output, which lie together for all outputs: words int32
[tiles, outputs, 16]. It holds 16 / bits groups of 32 inputs. The codes of a group lie at one place
of both halves of a word: those of inputs 2i and 2i + 1 in the low and the high half of word i. One
shift and one mask then take two codes as they are, and those of a thread are what its part of a
matrix product wants: nothing passes through shared memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

WORDS = 16
"""Words of an output in a tile."""
GROUP = 2 * WORDS
"""Inputs of a group."""


def tile_inputs(bits: int) -> int:
    """Inputs of a tile: 256, 128 or 64."""
    return GROUP * (16 // bits)


def num_tiles(columns: int, bits: int) -> int:
    return -(-columns // tile_inputs(bits))


def arranged(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [rows, blocks, bytes] of a `QuantizedMatrix` → int32 [tiles, rows, 16].

    On the device of `codes`. Zeros fill the last tile.
    """
    rows = codes.shape[0]
    flat = codes.reshape(rows, -1)
    per_tile = WORDS * 4
    flat = pad(flat, (0, -flat.shape[1] % per_tile)).view(rows, -1, per_tile)
    if bits == 8:
        pairs = flat.view(rows, -1, 2, WORDS, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        if bits == 2:  # a byte holds two pairs
            flat = torch.stack((flat & 15, flat >> 4), dim=-1)
        pairs = flat.view(rows, -1, 16 // bits, WORDS)
        first, second = pairs & ((1 << bits) - 1), pairs >> bits
    words = torch.zeros(rows, flat.shape[1], WORDS, dtype=torch.int32, device=codes.device)
    for group in range(16 // bits):
        for half, of_half in enumerate((first, second)):
            words |= of_half[:, :, group].to(torch.int32) << (16 * half + bits * group)
    return words.transpose(0, 1).contiguous()
