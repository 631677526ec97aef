"""Experts on a GPU: routing is decided on the device, and products are grouped by expert.

A use is one row's of one of its experts; there are rows · top_k, row by row. All sizes follow from
the number of rows: nothing is asked of the device in between, so a step can be recorded.

Few rows (decoding) are bound by reading weights: each use is a product by itself. Of more rows the
uses are sorted by expert, and each tile is of one expert. There are as many programs as tiles in
the worst case, and those without one end at once. Results lie at their use again, and each row's
are added in the order of its experts, so they do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.activation.triton import sigmoid
from edge.kernels.experts.reference import BEST_OF_GROUP, Routing
from edge.kernels.matmul_nbits.triton import (
    PackedWeight,
    ProductTiles,
    Weight,
    add_products,
    inputs_of,
    is_whole,
    product_tiles,
)
from edge.kernels.triton_launch import (
    FLOATS,
    Launch,
    check,
    num_processors,
    output,
    padded,
    row_launch,
)

_SORTED_AT_ONCE = 1 << 14
"""Numbers of a program that counts: uses times experts."""

FEW_ROWS = 4
"""Up to here each use is a product by itself: few of them share an expert."""

_PROGRAMS_PER_PROCESSOR = 4
_FLOAT_BITS = 32
_FLOATS_AT_ONCE = tl.constexpr(32)
_MIX_BLOCK = 1024
_ALIGNMENT = tl.constexpr(16)
"""Bytes; what a GPU's memory is given in is a multiple."""


class ExpertStack:
    """The same matrix of all experts of a layer, wherever each of them lies: a table of addresses.

    They must stay where they are. Raises ValueError where they are not alike.
    """

    def __init__(self, experts: Sequence[Weight]) -> None:
        self._experts = tuple(experts)  # so that their memory stays
        self.first = self._experts[0]
        matrix = self.first.matrix
        self.packed = matrix if isinstance(matrix, PackedWeight) else None
        self.num_experts = len(self._experts)
        self.outputs, self.inputs = self.first.shape
        if any(_form(each) != _form(self.first) for each in self._experts):
            raise ValueError("experts of one layer have unlike matrices")
        addresses = [
            [0 if array is None else array.data_ptr() for array in arrays]
            for arrays in zip(*(each.arrays for each in self._experts), strict=True)
        ]
        words = self.first.arrays[0]
        assert words is not None
        if words.is_cuda and any(at % _ALIGNMENT.value for row in addresses for at in row):
            raise ValueError(
                f"experts' arrays lie at addresses that {_ALIGNMENT.value} does not divide"
            )
        self.table = torch.tensor(addresses, dtype=torch.int64).to(words.device)
        """int64 [arrays, experts]; 0 where there is no such array."""

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Arrays of the first one; where an array is missing, something in its place."""
        words = self.first.arrays[0]
        assert words is not None
        return tuple(words if array is None else array for array in self.first.arrays)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedUses:
    """Which uses each expert has, in tiles of `rows` and less."""

    uses: Tensor
    """int32 [uses], one expert's after the other's, and within one by row."""
    tiles: Tensor
    """int32 [3, tiles in the worst case]: the expert, or −1; where in `uses` it begins and ends."""
    rows: int


@triton.jit
def _route_kernel(
    logits, correction, scales, chosen, weights, row_stride, num_experts, groups, chosen_groups,
    scale, least_sum,
    top_k: tl.constexpr, is_softmax: tl.constexpr, corrected: tl.constexpr, scaled: tl.constexpr,
    renormalized: tl.constexpr, is_grouped: tl.constexpr, best_of_group: tl.constexpr,
    block_groups: tl.constexpr, block_experts: tl.constexpr, block_chosen: tl.constexpr,
):  # fmt: skip
    """One row; experts as [groups, of a group]. What is equal is chosen in the experts' order."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, block_groups)
    member = tl.arange(0, block_experts)
    size = num_experts // groups
    number = group[:, None] * size + member[None, :]
    inside = (group < groups)[:, None] & (member < size)[None, :]
    x = tl.load(logits + row * row_stride + number, mask=inside, other=0.0).to(tl.float32)
    if is_softmax:
        x = tl.where(inside, x, float("-inf"))
        scores = tl.exp(x - tl.max(tl.max(x, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    else:
        scores = sigmoid(x)
    ranked = scores
    if corrected:
        ranked += tl.load(correction + number, mask=inside, other=0.0)
    ranked = tl.where(inside, ranked, float("-inf"))
    if is_grouped:
        rest = ranked
        best = tl.zeros((block_groups,), dtype=tl.float32)
        for _ in range(best_of_group):
            most = tl.max(rest, axis=1)
            best += most
            of_most = tl.where(rest == most[:, None], member[None, :], block_experts)
            first = tl.min(of_most, axis=1)
            rest = tl.where(member[None, :] == first[:, None], float("-inf"), rest)
        best = tl.where(group < groups, best, float("-inf"))
        is_chosen = tl.zeros((block_groups,), dtype=tl.int32)
        for _ in range(chosen_groups):
            first = tl.min(tl.where(best == tl.max(best, axis=0), group, block_groups), axis=0)
            is_chosen = tl.where(group == first, 1, is_chosen)
            best = tl.where(group == first, float("-inf"), best)
        ranked = tl.where(is_chosen[:, None] > 0, ranked, float("-inf"))
    place = tl.arange(0, block_chosen)
    ids = tl.zeros((block_chosen,), dtype=tl.int32)
    found = tl.zeros((block_chosen,), dtype=tl.float32)
    for index in range(top_k):
        most = tl.max(tl.max(ranked, axis=1), axis=0)
        hits = tl.where(ranked == most, number, num_experts)
        # NaN is equal to nothing: then it is some expert that there is.
        best_id = tl.minimum(tl.min(tl.min(hits, axis=1), axis=0), num_experts - 1)
        hit = (number == best_id) & inside
        score = tl.sum(tl.sum(tl.where(hit, scores, 0.0), axis=1), axis=0)
        ids = tl.where(place == index, best_id, ids)
        found = tl.where(place == index, score, found)
        ranked = tl.where(hit, float("-inf"), ranked)
    if renormalized:
        found = found / (tl.sum(found, axis=0) + least_sum)
    found = found * scale
    if scaled:
        found = found * tl.load(scales + ids)
    tl.store(chosen + row * top_k + place, ids, mask=place < top_k)
    tl.store(weights + row * top_k + place, found, mask=place < top_k)


@triton.jit
def _sort_kernel(
    chosen, sorted_uses, tiles, num_uses, num_experts, most_tiles,
    tile_rows: tl.constexpr, block_uses: tl.constexpr, block_experts: tl.constexpr,
    block_tiles: tl.constexpr,
):  # fmt: skip
    """One expert's uses, and its tiles; the last one says of the others that they are none."""
    expert = tl.program_id(0)
    every = tl.arange(0, block_experts)
    counts = tl.zeros((block_experts,), dtype=tl.int32)
    for first in range(0, num_uses, block_uses):
        use = first + tl.arange(0, block_uses)
        each = tl.load(chosen + use, mask=use < num_uses, other=-1)
        counts += tl.sum((each[:, None] == every[None, :]).to(tl.int32), axis=0)
    of_each = (counts + tile_rows - 1) // tile_rows
    start = tl.sum(tl.where(every < expert, counts, 0), axis=0)
    stop = tl.sum(tl.where(every <= expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(every < expert, of_each, 0), axis=0)
    end_tile = tl.sum(tl.where(every <= expert, of_each, 0), axis=0)
    for first in range(first_tile, end_tile, block_tiles):
        tile = first + tl.arange(0, block_tiles)
        begin = start + (tile - first_tile) * tile_rows
        inside = tile < end_tile
        tl.store(tiles + tile, tile * 0 + expert, mask=inside)
        tl.store(tiles + most_tiles + tile, begin, mask=inside)
        tl.store(tiles + 2 * most_tiles + tile, tl.minimum(begin + tile_rows, stop), mask=inside)
    if expert == num_experts - 1:
        for first in range(end_tile, most_tiles, block_tiles):
            tile = first + tl.arange(0, block_tiles)
            tl.store(tiles + tile, tile * 0 - 1, mask=tile < most_tiles)
    place = start
    for first in range(0, num_uses, block_uses):
        use = first + tl.arange(0, block_uses)
        is_own = tl.load(chosen + use, mask=use < num_uses, other=-1) == expert
        own = is_own.to(tl.int32)
        tl.store(sorted_uses + place + tl.cumsum(own, axis=0) - own, use, mask=is_own)
        place += tl.sum(own, axis=0)


@triton.jit
def _array(table, array: tl.constexpr, expert, num_experts, like):
    """The array of one expert, as a pointer to what `like` points to."""
    return tl.multiple_of(tl.load(table + array * num_experts + expert).to(like.dtype), _ALIGNMENT)


@triton.jit
def _expert_kernel(
    x, chosen, uses, tiles, table, words, scales, zero_points, offsets, order, bias, out,
    num_experts, of_row, num_outputs, num_inputs, num_tiles, padding, out_stride, bias_stride,
    bits: tl.constexpr, block_size: tl.constexpr, has_zeros: tl.constexpr,
    has_offsets: tl.constexpr, has_order: tl.constexpr, biased: tl.constexpr,
    is_sorted: tl.constexpr, is_whole: tl.constexpr,
    block_outputs: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """One tile of uses of one expert, or one use, times `block_outputs` rows of its weight.

    Floats have 32 bits.
    """
    tile = tl.program_id(0)
    expert = tl.load((tiles if is_sorted else chosen) + tile).to(tl.int64)
    if expert >= 0:
        at = tl.arange(0, block_rows)
        if is_sorted:
            most_tiles = tl.num_programs(0)
            at += tl.load(tiles + most_tiles + tile)
            row_inside = at < tl.load(tiles + 2 * most_tiles + tile)
            use = tl.load(uses + at, mask=row_inside, other=0).to(tl.int64)
        else:
            row_inside = at < 1
            use = (at * 0 + tile).to(tl.int64)
        n = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
        n_inside = n < num_outputs
        own = tl.minimum(n, num_outputs - 1)
        own_words = _array(table, 0, expert, num_experts, words)
        rows = x + use // of_row * (num_inputs - padding)
        sums = tl.zeros((block_outputs, block_rows), dtype=tl.float32)
        if bits == 32:
            for first in range(0, num_inputs, _FLOATS_AT_ONCE):
                k = first + tl.arange(0, _FLOATS_AT_ONCE)
                place = own.to(tl.int64)[:, None] * num_inputs + k[None, :]
                w = tl.load(own_words + place, mask=(k < num_inputs)[None, :], other=0.0)
                source, inside = inputs_of(order, k, num_inputs, padding, False)
                a = tl.load(
                    rows[None, :] + source[:, None],
                    mask=inside[:, None] & row_inside[None, :], other=0.0,
                )  # fmt: skip
                sums = tl.dot(w.to(a.dtype), a, sums, input_precision="ieee")
        else:
            sums = add_products(
                sums, rows, row_inside, _array(table, 4, expert, num_experts, order), own_words,
                _array(table, 1, expert, num_experts, scales),
                _array(table, 2, expert, num_experts, zero_points),
                _array(table, 3, expert, num_experts, offsets),
                own, 0, num_tiles, num_outputs, num_inputs, padding,
                bits, block_size, has_zeros, has_offsets, has_order, is_whole,
                block_outputs, block_rows,
            )  # fmt: skip
        if biased:
            given = tl.load(bias + expert * bias_stride + n, mask=n_inside, other=0.0)
            sums += given.to(tl.float32)[:, None]
        tl.store(
            out + use[None, :] * out_stride + n[:, None], sums.to(out.dtype.element_ty),
            mask=row_inside[None, :] & n_inside[:, None],
        )  # fmt: skip


@triton.jit
def _mix_kernel(
    results, weights, shared, gate, out, columns, gate_stride,
    top_k: tl.constexpr, has_shared: tl.constexpr, gated: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < columns
    total = tl.zeros((block,), dtype=tl.float32)
    for place in range(top_k):
        use = row * top_k + place
        result = tl.load(results + use * columns + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + use) * result
    if has_shared:
        given = tl.load(shared + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        if gated:
            given *= sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
        total += given
    tl.store(out + row * columns + at, total.to(out.dtype.element_ty), mask=inside)


def route(
    logits: Tensor,
    routing: Routing,
    *,
    num_experts: int,
    correction: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [rows, experts or more]; correction, scales float32 [experts]: see the reference.

    → the chosen experts int32 and their weights float32, both [rows, top_k]. Raises ValueError.
    """
    check("logits", logits, dtypes=FLOATS, shape=(None, None), contiguous=False)
    if logits.shape[1] < num_experts:
        raise ValueError(f"logits of {logits.shape[1]} experts, not of {num_experts}")
    for name, vector in (("correction", correction), ("scales", scales)):
        if vector is not None:
            check(name, vector, dtypes=(torch.float32,), shape=(num_experts,), like=logits)
    rows, groups, top_k = logits.shape[0], routing.groups, routing.top_k
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if not rows:
        return chosen, weights
    block_groups, block_experts = padded(groups), padded(num_experts // groups)
    _route_kernel[(rows,)](
        logits, logits if correction is None else correction, logits if scales is None else scales,
        chosen, weights, logits.stride(0), num_experts, groups, routing.chosen_groups,
        float(routing.scale), float(routing.least_sum),
        top_k=top_k, is_softmax=routing.scoring == "softmax", corrected=correction is not None,
        scaled=scales is not None, renormalized=routing.renormalized, is_grouped=groups > 1,
        best_of_group=BEST_OF_GROUP, block_groups=block_groups, block_experts=block_experts,
        block_chosen=padded(top_k), **row_launch(block_groups * block_experts).options(),
    )  # fmt: skip
    return chosen, weights


def own(chosen: Tensor, held: range) -> Tensor:
    """chosen int32 [rows, top_k] of `route` → the same counted from the first that is held; −1 for
    experts that are not."""
    local = chosen - held.start
    return torch.where((local >= 0) & (local < len(held)), local, -1)


def sort_uses(chosen: Tensor, *, num_experts: int, rows: int) -> SortedUses:
    """chosen int32 [rows, top_k] of `route` or `own`; rows: of a tile, at most. Raises
    ValueError."""
    check("chosen", chosen, dtypes=(torch.int32,), shape=(None, None))
    num_uses = chosen.numel()
    most_tiles = num_uses // rows + min(num_uses, num_experts)
    uses = torch.empty(num_uses, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(3, most_tiles, dtype=torch.int32, device=chosen.device)
    if num_uses:
        block_experts = padded(num_experts)
        _sort_kernel[(num_experts,)](
            chosen, uses, tiles, num_uses, num_experts, most_tiles, tile_rows=rows,
            block_uses=min(padded(num_uses), _SORTED_AT_ONCE // block_experts),
            block_experts=block_experts, block_tiles=64, **Launch(num_stages=1).options(),
        )  # fmt: skip
    return SortedUses(uses=uses, tiles=tiles, rows=rows)


def expert_tiles(rows: int, stack: ExpertStack, *, top_k: int, element_bytes: int) -> ProductTiles:
    """The usual sizes of programs for a step of `rows` rows: of one use each, or of several."""
    mean = 1 if rows <= FEW_ROWS else triton.cdiv(rows * top_k, stack.num_experts)
    bits = _FLOAT_BITS if stack.packed is None else stack.packed.bits
    tiles = product_tiles(
        mean, stack.outputs, 1, bits=bits, processors=1, element_bytes=element_bytes
    )
    programs = triton.cdiv(rows * top_k, mean) * triton.cdiv(stack.outputs, tiles.outputs)
    if programs < _PROGRAMS_PER_PROCESSOR * num_processors(stack.table.device):
        tiles = replace(tiles, outputs=tiles.outputs // 2)
    return tiles


def expert_product(
    x: Tensor,
    stack: ExpertStack,
    chosen: Tensor,
    bias: Tensor | None = None,
    *,
    tiles: ProductTiles,
    sorted_uses: SortedUses | None = None,
    padding: int = 0,
    is_part: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [rows or uses, inputs], chosen int32 [rows, top_k], bias [experts, outputs] → [uses,
    outputs].

    padding: columns of the weight before x's first. is_part: some uses are −1, of experts that are
    elsewhere, and what they give here is 0. sorted_uses: for tiles of several uses, whose
    rows are those of it; without them each use is a product by itself. `out` may be columns of
    something wider, and so may `bias`. Raises ValueError.
    """
    check("x", x, dtypes=FLOATS, shape=(None, stack.inputs - padding), like=stack.table)
    check("chosen", chosen, dtypes=(torch.int32,), shape=(None, None), like=x)
    uses = chosen.numel()
    if x.shape[0] not in (chosen.shape[0], uses):
        raise ValueError(f"x has {x.shape[0]} rows, which is neither of {list(chosen.shape)}")
    if bias is not None:
        shape = (stack.num_experts, stack.outputs)
        check("bias", bias, dtypes=FLOATS, shape=shape, like=x, contiguous=False)
    if out is None:
        out = torch.empty(uses, stack.outputs, dtype=x.dtype, device=x.device)
    check("out", out, dtypes=FLOATS, shape=(uses, stack.outputs), like=x, contiguous=False)
    if not out.numel():
        return out
    if is_part:
        out.zero_()
    packed, first = stack.packed, stack.first
    sorted_of, num_programs = chosen, uses
    if sorted_uses is not None:
        sorted_of, num_programs = sorted_uses.uses, sorted_uses.tiles.shape[1]
    _expert_kernel[num_programs, triton.cdiv(stack.outputs, tiles.outputs)](
        x, chosen, sorted_of, chosen if sorted_uses is None else sorted_uses.tiles, stack.table,
        *stack.arrays, x if bias is None else bias, out, stack.num_experts,
        uses // x.shape[0], stack.outputs, stack.inputs, 0 if packed is None else len(packed.words),
        padding, out.stride(0), 0 if bias is None else bias.stride(0),
        bits=_FLOAT_BITS if packed is None else packed.bits,
        block_size=1 if packed is None else packed.block_size,
        has_zeros=packed is not None and packed.zero_points is not None,
        has_offsets=first.offsets is not None, has_order=first.order is not None,
        biased=bias is not None, is_sorted=sorted_uses is not None,
        is_whole=packed is not None and not padding and first.order is None and is_whole(packed),
        block_outputs=tiles.outputs,
        block_rows=tiles.rows if sorted_uses is None else sorted_uses.rows,
        **tiles.launch.options(),
    )  # fmt: skip
    return out


def mix(
    results: Tensor,
    weights: Tensor,
    *,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """results [uses, columns], weights float32 [rows, top_k] → [rows, columns].

    shared [rows, columns]: added; gate [rows]: times its sigmoid. Raises ValueError.
    """
    check("weights", weights, dtypes=(torch.float32,), shape=(None, None))
    rows, top_k = weights.shape
    check("results", results, dtypes=FLOATS, shape=(rows * top_k, None), like=weights)
    columns = results.shape[1]
    if shared is not None:
        check("shared", shared, dtypes=FLOATS, shape=(rows, columns), like=weights)
    out = output("out", out, shape=(rows, columns), like=results)
    if not out.numel():
        return out
    if gate is not None and gate.shape != (rows,):
        raise ValueError(f"gate has the shape {list(gate.shape)}, not {[rows]}")
    block = min(padded(columns), _MIX_BLOCK)
    _mix_kernel[(rows, triton.cdiv(columns, block))](
        results, weights, results if shared is None else shared, weights if gate is None else gate,
        out, columns, 0 if gate is None else gate.stride(0), top_k=top_k,
        has_shared=shared is not None, gated=gate is not None, block=block,
        **Launch(num_stages=1).options(),
    )  # fmt: skip
    return out


def _form(weight: Weight) -> tuple[object, ...]:
    """Equal for matrices that one kernel takes."""
    packed = weight.matrix if isinstance(weight.matrix, PackedWeight) else None
    kinds = [None if array is None else array.dtype for array in weight.arrays]
    blocks = None if packed is None else (packed.bits, packed.block_size)
    return *weight.shape, blocks, *kinds
