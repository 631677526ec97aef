"""The Triton faces of operators with a state: sequences of any lengths, each with its own slot."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge.kernels.linear_attention import reference as linear_reference
from edge.kernels.short_convolution import reference as short_reference
from tests.support.operator_face import normal
from tests.support.triton_face import (
    FLOAT_DTYPES,
    array,
    assert_close,
    assert_only_inside_written,
    output,
    rounded,
    tensor,
)

FEW = settings(max_examples=12)
EPSILON = 1e-5
SLOTS = 5
seeds = st.integers(0, 2**32 - 9)
dtypes = st.sampled_from(FLOAT_DTYPES)
lengths = st.lists(st.integers(1, 5), min_size=1, max_size=2)

Array = NDArray[np.float32]


def places(seed: int, counts: list[int]) -> tuple[list[int], dict[str, Any]]:
    """A slot for each sequence of so many rows, in no order; and how kernels are told."""
    slots = np.random.default_rng(seed).permutation(SLOTS)[: len(counts)]
    told = {
        "slots": tensor(slots.astype(np.int32)),
        "sequences": tensor(np.repeat(np.arange(len(counts)), counts).astype(np.int32)),
        "starts": tensor(np.cumsum([0, *counts]).astype(np.int32)),
        "max_tokens": max(counts),
    }
    return [int(slot) for slot in slots], told


def states_of(before: Array) -> Any:
    """A copy on the device, between what nobody may write."""
    return output(*before.shape).copy_(tensor(before))


def assert_states(states: Any, before: Array, expected: dict[int, Array]) -> None:
    """By slot; those of others stay."""
    wanted = before.copy()
    for slot, state in expected.items():
        wanted[slot] = state
    others = [slot for slot in range(len(before)) if slot not in expected]
    np.testing.assert_array_equal(array(states)[others], before[others])
    assert_close(states, wanted, "float32")
    assert_only_inside_written(states)


@FEW
@given(
    seed=seeds, counts=lengths, channels=st.integers(1, 140), width=st.integers(2, 5),
    has_bias=st.booleans(), dtype=dtypes,
)  # fmt: skip
def test_short_convolution(
    seed: int, counts: list[int], channels: int, width: int, has_bias: bool, dtype: str
) -> None:
    """Where a sequence is cut changes no bit, nor who else is in the step."""
    from edge.kernels.short_convolution.triton import short_convolution

    rows = sum(counts)
    mixed = rounded(normal(seed, rows, 3 * channels), dtype)
    before = normal(seed + 1, SLOTS, width - 1, channels)
    weights = normal(seed + 2, channels, width)
    bias = normal(seed + 3, channels) if has_bias else None
    slots, told = places(seed, counts)
    states, out = states_of(before), output(rows, channels, dtype=dtype)
    own = {
        "weights": tensor(weights),
        "bias": None if bias is None else tensor(bias),
    }
    short_convolution(tensor(mixed, dtype), states, **own, **told, out=out)
    starts = np.cumsum([0, *counts])
    parts, kept = [], {}
    for slot, (first, last) in zip(slots, itertools.pairwise(starts), strict=True):
        found, kept[slot] = short_reference.short_convolution(
            mixed[first:last], before[slot], weights, bias
        )
        parts.append(found)
    assert_close(out, np.concatenate(parts), dtype)
    assert_only_inside_written(out)
    assert_states(states, before, kept)

    one_by_one = states_of(before)
    for slot, (first, last) in zip(slots, itertools.pairwise(starts), strict=True):
        for row in range(first, last):
            _, alone = places(seed, [1])
            alone["slots"] = tensor(np.asarray([slot], np.int32))
            found = short_convolution(
                tensor(mixed[row : row + 1], dtype), one_by_one, **own, **alone
            )
            np.testing.assert_array_equal(array(found), array(out)[row : row + 1])
    np.testing.assert_array_equal(array(one_by_one), array(states))


@FEW
@given(
    seed=seeds, counts=lengths, key_heads=st.integers(1, 2), each=st.integers(1, 2),
    key_size=st.integers(1, 40), value_size=st.integers(1, 40), width=st.integers(2, 4),
    dtype=dtypes, columns=st.sampled_from([8, 4096]),
)  # fmt: skip
def test_linear_attention(
    seed: int, counts: list[int], key_heads: int, each: int, key_size: int, value_size: int,
    width: int, dtype: str, columns: int,
) -> None:  # fmt: skip
    """Where a sequence is cut changes no bit, nor who else is in the step; also where a program has
    but some columns of a head."""
    from edge.kernels.linear_attention import triton as face

    rows, value_heads = sum(counts), key_heads * each
    values = value_heads * value_size
    channels = 2 * key_heads * key_size + values
    mixed = rounded(normal(seed, rows, channels + values), dtype)
    gates = 2 * normal(seed + 1, rows, 2 * value_heads)
    before = (
        normal(seed + 2, SLOTS, width - 1, channels),
        normal(seed + 3, SLOTS, value_heads, key_size, value_size),
    )
    convolution = normal(seed + 4, channels, width)
    bias, rate, scale = (
        normal(seed + n, size) for n, size in ((5, value_heads), (6, value_heads), (7, value_size))
    )
    own = {
        "convolution": tensor(convolution), "decay_bias": tensor(bias),
        "decay_rate": tensor(rate), "scale": tensor(scale),
        "key_heads": key_heads, "epsilon": EPSILON,
    }  # fmt: skip
    slots, told = places(seed, counts)
    starts = np.cumsum([0, *counts])
    parts, kept = [], []
    for slot, (first, last) in zip(slots, itertools.pairwise(starts), strict=True):
        found, *past = linear_reference.linear_attention(
            mixed[first:last], gates[first:last], before[0][slot], before[1][slot],
            convolution, bias, rate, scale,
            key_heads=key_heads, key_size=key_size, epsilon=EPSILON,
        )  # fmt: skip
        parts.append(found)
        kept.append(past)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(face, "_TILE", columns)
        states, out = tuple(map(states_of, before)), output(rows, values, dtype=dtype)
        face.linear_attention(
            tensor(mixed, dtype), tensor(gates), (states[0], states[1]), **own, **told, out=out
        )
        assert_close(
            out, np.concatenate(parts), dtype, tolerance=3e-4 if dtype == "float32" else None
        )
        assert_only_inside_written(out)
        for number, (state, old) in enumerate(zip(states, before, strict=True)):
            new = {slot: past[number] for slot, past in zip(slots, kept, strict=True)}
            assert_states(state, old, new)

        alone = tuple(map(states_of, before))
        for slot, (first, last) in zip(slots, itertools.pairwise(starts), strict=True):
            for row in range(first, last):
                _, of_one = places(seed, [1])
                of_one["slots"] = tensor(np.asarray([slot], np.int32))
                found = face.linear_attention(
                    tensor(mixed[row : row + 1], dtype), tensor(gates[row : row + 1]),
                    (alone[0], alone[1]), **own, **of_one,
                )  # fmt: skip
                np.testing.assert_array_equal(array(found), array(out)[row : row + 1])
        for one, other in zip(alone, states, strict=True):
            np.testing.assert_array_equal(array(one), array(other))
