"""Experts by Triton: routing, sorting, grouped products and sums, against the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.kernels.experts import reference
from edge.kernels.experts.reference import Routing
from edge.kernels.gated_mlp.reference import Clamp
from edge.kernels.gated_mlp.reference import gated as gated_reference
from edge.kernels.matmul_nbits.reference import quantize
from tests.support.gpu_weights import packed_weight, with_zero_points, zero_points
from tests.support.operator_face import normal
from tests.support.triton_face import (
    array,
    assert_close,
    assert_only_inside_written,
    is_untouched,
    output,
    rounded,
    tensor,
)

Array = NDArray[np.float32]

FEW, MANY = 3, 9
"""Rows of a step on each side of where uses are sorted."""

ROUTINGS = {
    "softmax": Routing(top_k=2, renormalized=False),
    "renormalized": Routing(top_k=3, renormalized=True),
    "one": Routing(top_k=1, renormalized=True, least_sum=0.1),
    "all": Routing(top_k=6, renormalized=True),
    "sigmoid": Routing(top_k=3, renormalized=True, scoring="sigmoid", scale=2.5, least_sum=1e-2),
    "groups": Routing(
        top_k=3, renormalized=True, scoring="sigmoid", groups=3, chosen_groups=2, scale=1.5
    ),
}
EXPERTS = 6


@pytest.mark.parametrize("has_vectors", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_are_routed(name: str, has_vectors: bool) -> None:
    from edge.kernels.experts.triton import route

    routing, count = ROUTINGS[name], EXPERTS
    logits = normal(1, 7, count + 1)  # a shared expert's gate beside them
    logits[3] = logits[3, 0]  # all alike: then it is their order
    logits[4] *= 40  # and scores that are 0
    correction = normal(2, count) if has_vectors else None
    scales = np.abs(normal(3, count)) if has_vectors else None
    chosen, weights = route(
        tensor(logits), routing, num_experts=count,
        correction=None if correction is None else tensor(correction),
        scales=None if scales is None else tensor(scales),
    )  # fmt: skip
    expected, wanted = reference.route(logits[:, :count], routing, correction, scales)
    np.testing.assert_array_equal(chosen.cpu().numpy(), expected)
    assert_close(weights, wanted.astype(np.float32), "float32")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, where it is interpreted
def test_logits_that_are_no_numbers_choose_experts_that_there_are() -> None:
    """The result is nonsense, and nothing outside is read."""
    from edge.kernels.experts.triton import route

    logits = np.full((2, EXPERTS), np.nan, np.float32)
    for routing in ROUTINGS.values():
        chosen, _weights = route(tensor(logits), routing, num_experts=EXPERTS)
        assert ((chosen >= 0) & (chosen < EXPERTS)).all()


@pytest.mark.parametrize(("rows", "top_k", "tile"), [(1, 2, 16), (30, 3, 4), (1100, 2, 8)])
def test_uses_are_sorted_by_expert(rows: int, top_k: int, tile: int) -> None:
    """One expert, the first, has none; tiles after the last one say that they are none."""
    from edge.kernels.experts.triton import sort_uses

    count = 5
    chosen = np.random.default_rng(rows).integers(1, count, (rows, top_k)).astype(np.int32)
    found = sort_uses(tensor(chosen), num_experts=count, rows=tile)
    each = chosen.reshape(-1)
    np.testing.assert_array_equal(found.uses.cpu().numpy(), np.argsort(each, kind="stable"))
    experts, begins, ends = found.tiles.cpu().numpy()
    start, expected = 0, []
    for expert, size in enumerate(np.bincount(each, minlength=count)):
        for begin in range(0, size, tile):
            expected.append((expert, start + begin, start + min(size, begin + tile)))
        start += size
    used = len(expected)
    found_tiles = zip(experts[:used], begins[:used], ends[:used], strict=True)
    assert list(found_tiles) == expected
    assert (experts[used:] == -1).all()


def test_no_routing_has_more_tiles_than_there_are() -> None:
    """One use of each expert and all others of one: as many tiles as there may be."""
    from edge.kernels.experts.triton import sort_uses

    chosen = np.asarray([*range(5), *[0] * 12], np.int32).reshape(-1, 1)
    found = sort_uses(tensor(chosen), num_experts=5, rows=4)
    assert found.tiles.shape[1] >= 4 + 4
    assert (found.tiles[0] >= 0).sum() == 4 + 4


def stack_of(kind: str, count: int, outputs: int, inputs: int, seed: int) -> tuple[Any, Array]:
    """Matrices of experts on the device, and what they stand for [experts, outputs, inputs]."""
    from edge.kernels.experts.triton import ExpertStack
    from edge.kernels.matmul_nbits.triton import Weight

    weights, values = [], []
    random = np.random.default_rng(seed)
    for number in range(count):
        plain = normal(seed + number, outputs, inputs)
        if kind == "float":
            weights.append(Weight(matrix=tensor(plain)))
            values.append(plain)
            continue
        bits, *more = kind.split()
        matrix = quantize(plain, bits=int(bits), block_size=32)
        zeros = zero_points(seed + number, matrix) if "zeros" in more else None
        half = "half" in more
        scales = matrix.scales.astype(np.float16 if half else np.float32).astype(np.float32)
        value = with_zero_points(matrix, scales, zeros)
        offsets = order = None
        if "offsets" in more:
            offsets = normal(seed + 50 + number, *matrix.scales.shape)
            value = value + np.repeat(offsets, 32, axis=1)[:, :inputs]
        if "sorted" in more:
            order = random.permutation(inputs).astype(np.int32)
            turned = np.empty_like(value)
            turned[:, order] = value
            value = turned
        weights.append(
            Weight(
                matrix=packed_weight(matrix, zeros, half_scales=half),
                offsets=None if offsets is None else tensor(offsets),
                order=None if order is None else tensor(order),
            )
        )
        values.append(value)
    return ExpertStack(weights), np.stack(values)


def multiplied(
    x: Any, stack: Any, chosen: Any, bias: Any, *, small: bool = True, **named: Any
) -> Any:
    """By the kernel for so many rows; small: several programs for each use, and steps in them."""
    from edge.kernels.experts.triton import FEW_ROWS, expert_product, expert_tiles, sort_uses
    from edge.kernels.matmul_nbits.triton import ProductTiles

    rows, top_k = chosen.shape
    tiles = expert_tiles(rows, stack, top_k=top_k, element_bytes=x.element_size())
    if small:
        tiles = ProductTiles(rows=8 if rows <= FEW_ROWS else 4, outputs=16)
    found = None
    if rows > FEW_ROWS:
        found = sort_uses(chosen, num_experts=stack.num_experts, rows=tiles.rows)
    return expert_product(x, stack, chosen, bias, tiles=tiles, sorted_uses=found, **named)


KINDS = ("float", "4", "8", "2 zeros", "4 zeros half", "4 offsets", "8 sorted", "4 zeros sorted")


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each_has_rows", [False, True])
def test_each_use_is_multiplied_by_its_expert(kind: str, rows: int, each_has_rows: bool) -> None:
    """Of a row for all its experts, and of one for each; some expert has nothing to do."""
    count, top_k, outputs, inputs = 5, 2, 21, 75
    stack, weights = stack_of(kind, count, outputs, inputs, seed=7)
    chosen = np.random.default_rng(1).integers(1, count, (rows, top_k)).astype(np.int32)
    bias = normal(3, count, outputs) if each_has_rows else None
    padding = 0 if "sorted" in kind else 5
    x = normal(4, rows * top_k if each_has_rows else rows, inputs - padding)
    whole = np.pad(x, ((0, 0), (padding, 0)))
    given = whole if each_has_rows else np.repeat(whole, top_k, axis=0)
    each = chosen.reshape(-1)
    expected = np.einsum("un,uon->uo", given, weights[each])
    if bias is not None:
        expected += bias[each]
    wide = output(rows * top_k, outputs + 2)
    found = multiplied(
        tensor(x), stack, tensor(chosen), None if bias is None else tensor(bias),
        padding=padding, out=wide[:, 1:-1],
    )  # fmt: skip
    assert_close(found.contiguous(), expected, "float32")
    assert is_untouched(wide[:, [0, -1]]).all()
    assert_only_inside_written(wide)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_the_usual_tiles_compute_the_same_in_bfloat16(rows: int) -> None:
    stack, weights = stack_of("4", 4, 40, 96, seed=2)
    chosen = np.random.default_rng(1).integers(0, 4, (rows, 2)).astype(np.int32)
    x = rounded(normal(4, rows, 96), "bfloat16")
    given = multiplied(tensor(x, "bfloat16"), stack, tensor(chosen), None, small=False)
    each = chosen.reshape(-1)
    expected = np.einsum("un,uon->uo", np.repeat(x, 2, axis=0), weights[each])
    assert_close(given, expected, "bfloat16")


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_what_a_row_gets_depends_on_no_other_row(rows: int) -> None:
    """To the last bit, in every order of the rows and beside any others."""
    stack, _weights = stack_of("4", 4, 10, 40, seed=3)
    chosen = np.random.default_rng(1).integers(0, 4, (rows, 2)).astype(np.int32)
    x = normal(4, rows, 40)
    found = array(multiplied(tensor(x), stack, tensor(chosen), None)).reshape(rows, 2, -1)
    turned = np.random.default_rng(2).permutation(rows)
    again = array(multiplied(tensor(x[turned]), stack, tensor(chosen[turned]), None))
    np.testing.assert_array_equal(again.reshape(rows, 2, -1), found[turned])
    chosen[1:] = 0
    alone = array(multiplied(tensor(x), stack, tensor(chosen), None)).reshape(rows, 2, -1)
    np.testing.assert_array_equal(alone[0], found[0])


@pytest.mark.parametrize("shared", ["", "shared", "gated"])
def test_results_are_weighted_and_added(shared: str) -> None:
    from edge.kernels.experts.triton import mix

    rows, top_k, columns = 3, 4, 1100
    results, weights = normal(1, rows * top_k, columns), normal(2, rows, top_k)
    expected = (results.reshape(rows, top_k, -1) * weights[..., None]).sum(1)
    logits = normal(4, rows, 6)
    given = gate = None
    if shared:
        given = normal(3, rows, columns)
        gate = logits[:, 5] if shared == "gated" else None
        expected += given if gate is None else given / (1 + np.exp(-gate))[:, None]
    out = output(rows, columns)
    mix(
        tensor(results), tensor(weights), shared=None if given is None else tensor(given),
        gate=None if gate is None else tensor(logits)[:, 5], out=out,
    )  # fmt: skip
    assert_close(out, expected, "float32")
    assert_only_inside_written(out)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_a_row_goes_through_whole_blocks_as_in_the_formula(rows: int) -> None:
    from edge.kernels.experts.triton import mix, route
    from edge.kernels.gated_mlp.triton import gated

    count, size, columns = 6, 20, 9
    clamp = Clamp(limit=1.5, slope=1.7)
    up, ups = stack_of("float", count, 2 * columns, size, seed=1)
    down, downs = stack_of("float", count, size, columns, seed=20)
    biases = normal(2, count, 2 * columns), normal(3, count, size)
    x, logits, routing = normal(5, rows, size), normal(6, rows, count), ROUTINGS["groups"]

    def expert(number: int, given: Array) -> Array:
        active = gated_reference(
            given @ ups[number].T + biases[0][number], activation="silu", clamp=clamp
        )
        given = active @ downs[number].T + biases[1][number]
        return given.astype(np.float32)

    expected = reference.experts(x, logits, routing=routing, expert=expert)
    chosen, weights = route(tensor(logits), routing, num_experts=count)
    gate_up = multiplied(tensor(x), up, chosen, tensor(biases[0]))
    active = gated(gate_up, activation="silu", clamp=clamp)
    results = multiplied(active, down, chosen, tensor(biases[1]))
    assert_close(mix(results, weights), expected, "float32")


def test_what_does_not_fit_is_refused() -> None:
    import torch

    from edge.kernels.experts.triton import (
        ExpertStack,
        expert_product,
        mix,
        route,
        sort_uses,
    )
    from edge.kernels.gated_mlp.triton import gated
    from edge.kernels.matmul_nbits.triton import ProductTiles, Weight

    one, other = (Weight(matrix=torch.zeros(3, columns)) for columns in (8, 7))
    with pytest.raises(ValueError, match="unlike matrices"):
        ExpertStack([one, other])
    stack, chosen = ExpertStack([one, one]), torch.zeros(2, 2, dtype=torch.int32)
    few = ProductTiles(outputs=16)
    with pytest.raises(ValueError, match=r"x has the shape \[2, 7\], not \[any, 8\]"):
        expert_product(torch.zeros(2, 7), stack, chosen, tiles=few)
    with pytest.raises(ValueError, match=r"x has 3 rows, which is neither of \[2, 2\]"):
        expert_product(torch.zeros(3, 8), stack, chosen, tiles=few)
    with pytest.raises(ValueError, match=r"bias has the shape \[2, 2\], not \[2, 3\]"):
        expert_product(torch.zeros(2, 8), stack, chosen, torch.zeros(2, 2), tiles=few)
    with pytest.raises(ValueError, match="logits of 5 experts, not of 6"):
        route(torch.zeros(2, 5), ROUTINGS["one"], num_experts=6)
    with pytest.raises(ValueError, match=r"gate has the shape \[1\], not \[2\]"):
        mix(torch.zeros(4, 3), torch.zeros(2, 2), gate=torch.zeros(1))
    with pytest.raises(ValueError, match="gelu is not clamped"):
        gated(torch.zeros(2, 2), activation="gelu", clamp=Clamp(limit=1.0, slope=1.0))
    nothing = torch.zeros(0, 2, dtype=torch.int32)
    assert sort_uses(nothing, num_experts=2, rows=4).tiles.shape == (3, 0)
    assert expert_product(torch.zeros(0, 8), stack, nothing, tiles=few).shape == (0, 3)
    assert route(torch.zeros(0, 6), ROUTINGS["one"], num_experts=6)[0].shape == (0, 1)
