"""Weights in 8, 4 or 2 bits, made from a checkpoint's floats without data. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from edge.kernels.matmul_nbits.reference import LEAST_BLOCK
from edge.models.experts import Experts
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.weights.block_matrices import Blocks
from edge.weights.encoding import Encoding
from edge.weights.file_blocks import FileBlocks
from edge.weights.float_matrices import Floats
from edge.weights.recipe import Kind, Recipe, Rule, rule_role
from edge.weights.rounded_source import mixed
from edge.weights.stored_blocks import recipe_of

DEFAULT_BLOCK_SIZE = 32
_MIXED_INPUTS = ("key.weight", "value.weight", "kv_down.weight", "key_value.weight")
_MIXED_OUTPUTS = ("output.weight", "linear_output.weight", "short_output.weight")
_INT4_BLOCK = 64
"""Columns of a block of most matrices in int4. With zero points these are as accurate as blocks of
32 without, and faster."""
_WIDEST_BLOCK, _WIDEST_CUT_BLOCK = 128, 64
"""Columns of a block with 8 bits, which saves three quarters of the scales without visible loss.
Columns are divided among devices in multiples of a block, so these blocks are smaller."""

_WIDE = 256
"""Columns of a block of types with two levels."""
_LEAST_CUT = 6 * _WIDE
"""Columns of a matrix that devices divide in multiples of 256; fewer leave too few ways."""
_Types = Mapping[str, str]
_TYPES: _Types = {"usual": "Q4_K", "head": "Q5_K", "inputs": "Q6_K", "down": "Q5_K"}
"""Types of blocks of files. inputs: keys and values. down: of the most sensitive layers."""
_TYPES_OF_4_BITS: _Types = {"usual": "Q4_0", "head": "Q4_0", "inputs": "Q4_1", "down": "Q4_1"}
_TYPES_OF_3_BITS: _Types = {"usual": "Q3_K", "head": "Q4_K", "inputs": "Q4_K", "down": "Q4_K"}
_TYPES_OF_2_BITS: _Types = {"usual": "Q2_K", "head": "Q4_K", "inputs": "Q4_K", "down": "Q3_K"}
"""The same in formats of fewer bits; `_TYPES_OF_4_BITS` with blocks of 32 columns."""
_NARROW_TYPES: _Types = {"usual": "Q5_0", "head": "Q5_1", "inputs": "Q8_0", "down": "Q5_1"}
"""The same with blocks of 32 columns, where the hidden state has no multiple of 256."""
_FINE_TYPES: _Types = {"usual": "Q5_K", "head": "Q6_K", "inputs": "Q6_K", "down": "Q6_K"}
"""The same for other matrices of such a model."""

_zero_blocks = partial(Blocks, zero_points=True)


def int8(spec: ModelSpec, block_size: int | None) -> Encoding:
    return mixed(Recipe(Blocks(8, block_size or DEFAULT_BLOCK_SIZE), small_floats(spec)))


def pure_int4(spec: ModelSpec, block_size: int | None) -> Encoding:
    return mixed(Recipe(Blocks(4, block_size or DEFAULT_BLOCK_SIZE), small_floats(spec)))


def int4(spec: ModelSpec, block_size: int | None) -> Encoding:
    """4 bits, and more where models are most sensitive: in blocks of files, or packed.

    block_size: only packed ones have a choice.
    """
    packed = _packed_int4(spec, block_size)
    if block_size is not None:
        return packed
    return _or_packed(_in_blocks(spec, _TYPES, _NARROW_TYPES), packed)


def _or_packed(found: tuple[Recipe, tuple[int, ...]] | None, packed: Encoding) -> Encoding:
    return packed if found is None else replace(mixed(*found), packed=packed)


def _in_blocks(
    spec: ModelSpec, wide: _Types, narrow: _Types
) -> tuple[Recipe, tuple[int, ...]] | None:
    """Blocks of files: most of the usual type, with more bits where models are most sensitive (the
    head, keys and values, and "down" of half of the layers). Blocks of 32 columns where there are
    no 256, or few that devices could divide.

    In int4 a model of W's shape has 4.85 bits a weight, as in llama.cpp's Q4_K_M. On SmolLM2-135M,
    with its channels in another order and rows filled up to 768, the mean KL divergence is 0.096
    with 5.03 bits, and that of Q4_K_M 0.137 with 5.12. Without filling up, it is 0.037 with 5.9.
    """
    floats = {rule.role for rule in small_floats(spec)}
    kinds: dict[str, Kind] = {}
    for role, shape in tensor_shapes(spec).items():
        if len(shape) != 2 or role in TABLES:
            continue
        local, columns = rule_role(role).removeprefix("shared."), shape[1]
        if local in floats:
            kinds[role] = Floats()
            continue
        place = {"head": "head"} | dict.fromkeys(_MIXED_INPUTS, "inputs")
        part = place.get(local, "usual")
        if local == "down.weight" and _is_sensitive(int(role.split(".")[1]), spec.num_layers):
            part = "down"
        is_wide = has_wide_blocks(role, columns)
        is_of_wide = spec.hidden_size % _WIDE == 0
        types = wide if is_wide and is_of_wide else _FINE_TYPES if is_wide else narrow
        kinds[role] = FileBlocks(types[part])
    return recipe_of(spec, kinds)


def has_wide_blocks(role: str, columns: int) -> bool:
    """Whether a matrix may have blocks of 256 columns: it has whole ones, and where devices divide
    its columns, enough of them."""
    is_cut = rule_role(role).removeprefix("shared.") == "down.weight"
    return columns % _WIDE == 0 and (not is_cut or columns >= _LEAST_CUT)


def _packed_int4(spec: ModelSpec, block_size: int | None) -> Encoding:
    """4 bits with zero points, and 8 bits where models are most sensitive.

    These are the head, keys, values, and "down" of the first and last eighth of the layers and of
    every third between (llama.cpp's K-quants give these layers more bits, too). Queries and outputs
    of attention have blocks of at most 32. KL divergence of SmolLM2-135M from float32: 0.36 with 4
    bits in blocks of 32 everywhere, and 0.096 with this.
    """
    hidden = spec.hidden_size
    columns = math.gcd(*_block_columns(spec))
    fine = _zero_blocks(4, min(block_size or DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE))
    usual, down = (
        _zero_blocks(4, block_size or widest_block(_INT4_BLOCK, inputs, DEFAULT_BLOCK_SIZE))
        for inputs in (hidden, columns)
    )
    wide = Blocks(8, widest_block(_WIDEST_BLOCK, hidden, usual.block_size))
    cut = Blocks(8, widest_block(_WIDEST_CUT_BLOCK, columns, down.block_size))
    rules = (
        *(Rule(role, wide) for role in ("head", *_MIXED_INPUTS)),
        *(Rule(role, fine) for role in ("query.weight", "query_up.weight", *_MIXED_OUTPUTS)),
        Rule("down.weight", cut, grade=1),
        Rule("down.weight", down),
        *small_floats(spec),
    )
    grades = tuple(int(_is_sensitive(n, spec.num_layers)) for n in range(spec.num_layers))
    return mixed(Recipe(usual, rules), grades)


def int3(spec: ModelSpec, block_size: int | None) -> Encoding:
    """3 bits, and 4 where models are most sensitive, in blocks of files. Packed: 2 bits for gate
    and up, which are half of most models, and 4 for the rest."""
    packed = _coarse(spec, block_size, {"gate.weight", "up.weight"})
    return packed if block_size is not None else _few_bits(spec, _TYPES_OF_3_BITS, packed)


def int2(spec: ModelSpec, block_size: int | None) -> Encoding:
    """2 bits, and 3 or 4 where models are most sensitive, in blocks of files. Packed: 2 bits for
    feed-forward blocks and queries, which are most of a model, and 4 for the rest."""
    packed = _coarse(spec, block_size, {"gate.weight", "up.weight", "down.weight", "query.weight"})
    return packed if block_size is not None else _few_bits(spec, _TYPES_OF_2_BITS, packed)


def _few_bits(spec: ModelSpec, types: _Types, packed: Encoding) -> Encoding:
    """Blocks of these types, unless most matrices lack the columns for them."""
    if spec.hidden_size % _WIDE:
        return packed
    return _or_packed(_in_blocks(spec, types, _TYPES_OF_4_BITS), packed)


def _coarse(spec: ModelSpec, block_size: int | None, in_2_bits: Collection[str]) -> Encoding:
    """2 or 4 bits with zero points. Matrices that int4 has in 8 bits have small blocks here."""
    fine = min(block_size or DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)
    wide, cut = (
        block_size or widest_block(widest, inputs, DEFAULT_BLOCK_SIZE)
        for widest, inputs in (
            (_WIDEST_BLOCK, spec.hidden_size),
            (_WIDEST_CUT_BLOCK, math.gcd(*_block_columns(spec))),
        )
    )
    sizes = dict.fromkeys(("head", *_MIXED_INPUTS, *_MIXED_OUTPUTS), fine)
    sizes |= {"down.weight": cut, "gate.weight": wide, "up.weight": wide, "query.weight": wide}
    rules = (
        Rule(role, _zero_blocks(bits, max(size, LEAST_BLOCK[bits])))
        for role, size in sizes.items()
        for bits in (2 if role in in_2_bits else 4,)
    )
    return mixed(Recipe(_zero_blocks(4, wide), (*rules, *small_floats(spec))))


def small_floats(spec: ModelSpec) -> tuple[Rule, ...]:
    """Rules for small matrices that stay floats: routers, because their errors change the choice of
    experts, and decay rates of states, because they apply at every token."""
    roles = ["router.weight", "shared_gate.weight"] if spec.has_experts else []
    if spec.has_states:
        roles += ["linear_decay.weight", "linear_beta.weight"]
    return tuple(Rule(role, Floats()) for role in roles)


def head_kind(spec: ModelSpec) -> Blocks:
    """The kind of the head, the largest and most sensitive matrix: 8 bits."""
    return Blocks(8, widest_block(_WIDEST_BLOCK, spec.hidden_size, 32))


def _block_columns(spec: ModelSpec) -> Iterator[int]:
    """Columns of all feed-forward blocks."""
    for kind in spec.kinds:
        part = kind.feed_forward
        yield part.columns
        if isinstance(part, Experts) and part.shared is not None:
            yield part.shared.columns


def _is_sensitive(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def widest_block(size: int, columns: int, least: int) -> int:
    """The widest block from `size` down to `least` that divides the columns."""
    while size > least and columns % size:
        size //= 2
    return max(size, least)
