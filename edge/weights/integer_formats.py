"""Weights in 8 or 4 bits, made of a checkpoint's floats without any data. Pure."""

from __future__ import annotations

import math

from edge.models.spec import ModelSpec
from edge.weights.block_matrices import Blocks, mixed
from edge.weights.encoding import Encoding
from edge.weights.recipe import Recipe, Rule

_WIDEST_BLOCK, _WIDEST_CUT_BLOCK = 128, 64
"""Codes of 8 bits lose nothing by it that can be seen, and a quarter of the scales is left. Where
columns are shared out among devices, in multiples of a block, those are better not too large."""


def int8(spec: ModelSpec, block_size: int) -> Encoding:
    return mixed(Recipe(Blocks(8, block_size)))


def pure_int4(spec: ModelSpec, block_size: int) -> Encoding:
    return mixed(Recipe(Blocks(4, block_size)))


def int4(spec: ModelSpec, block_size: int) -> Encoding:
    """4 bits, but 8 where models are most sensitive.

    Those are the head, keys, values, and "down" of the first and last eighth of the layers and
    every third between (the layers that llama.cpp's K-quants give more bits, too). Measured with
    SmolLM2-135M, KL divergence from float32: 0.36 with 4 bits everywhere, 0.08 with this.
    """
    wide = head_kind(spec, block_size)
    columns = math.gcd(*(kind.feed_forward.columns for kind in spec.kinds))
    cut = Blocks(8, _widest_block(_WIDEST_CUT_BLOCK, columns, block_size))
    rules = (
        *(Rule(role, wide) for role in ("head", "key.weight", "value.weight")),
        Rule("down.weight", cut, grade=1),
    )
    grades = tuple(int(_is_sensitive(n, spec.num_layers)) for n in range(spec.num_layers))
    return mixed(Recipe(Blocks(4, block_size), rules), grades)


def head_kind(spec: ModelSpec, least_block: int = 32) -> Blocks:
    """8 bits, for the matrix that is largest and most sensitive."""
    return Blocks(8, _widest_block(_WIDEST_BLOCK, spec.hidden_size, least_block))


def _is_sensitive(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _widest_block(size: int, columns: int, least: int) -> int:
    """The widest up to `size` that leaves no part of a block empty."""
    while size > least and columns % size:
        size //= 2
    return max(size, least)
