"""Attention by Triton: prompts, chunks and decoding of several sequences, over every kind of cache.

The reference is given what the cache's codes stand for, so a cache of 4 bits is held to the same
bound as one of floats.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge.kernels.attention import reference
from edge.kernels.kv_cache import token_cache
from tests.support.operator_face import normal
from tests.support.triton_face import (
    FLOAT_DTYPES,
    TOLERANCES,
    assert_close,
    assert_only_inside_written,
    is_untouched,
    output,
    rounded,
    tensor,
)
from tests.support.triton_kv import CACHE_KINDS, CacheKind, make_cache

FEW = settings(max_examples=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """sequences: (tokens in the cache before, queries) of each."""

    seed: int
    sequences: list[tuple[int, int]]
    heads: tuple[int, int]
    head_size: int
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    splits: int = 1


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 100),
    sequences=st.one_of(
        st.lists(st.tuples(st.integers(0, 45), st.just(1)), min_size=1, max_size=3),
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 24)), min_size=1, max_size=2),
    ),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (5, 1)]),
    head_size=st.sampled_from([2, 16, 20, 64, 96, 128]),
    dtype=st.sampled_from(FLOAT_DTYPES),
    window=st.sampled_from([None, 1, 5, 16, 17]),
    soft_cap=st.sampled_from([None, 2.0, 30.0]),
    has_sinks=st.booleans(),
    splits=st.sampled_from([1, 1, 2, 5]),
)


def run(kind: CacheKind, case: Case) -> None:
    from edge.kernels.attention.triton import AttentionTiles, attention

    num_heads, num_kv_heads = case.heads
    lengths = [before + queries for before, queries in case.sequences]
    stored = [
        tuple(
            rounded(normal(case.seed + 2 * i + j, length, num_kv_heads, case.head_size), case.dtype)
            for j in range(2)
        )
        for i, length in enumerate(lengths)
    ]
    cache, meaning = make_cache(kind, stored, max(lengths) + 3, case.dtype)  # type: ignore[arg-type]
    tokens = sum(queries for _, queries in case.sequences)
    query = rounded(normal(case.seed + 90, tokens, num_heads, case.head_size), case.dtype)
    sinks = normal(case.seed + 91, num_heads) if case.has_sinks else None
    starts = np.cumsum([0] + [queries for _, queries in case.sequences]).astype(np.int32)
    # Queries as a slice of a packed product, with rows after the last sequence's.
    packed = np.full((tokens + 2, num_heads + 1, case.head_size), np.nan, np.float32)
    packed[:tokens, :num_heads] = query
    out = output(tokens + 2, num_heads, case.head_size, dtype=case.dtype)
    attention(
        tensor(packed, case.dtype)[:, :num_heads], cache,
        starts=tensor(starts), lengths=tensor(np.asarray(lengths, np.int32)),
        max_queries=max(queries for _, queries in case.sequences), max_keys=max(lengths),
        window=case.window, soft_cap=case.soft_cap, sinks=None if sinks is None else tensor(sinks),
        out=out, tiles=AttentionTiles(rows=16, keys=16, splits=case.splits),
    )  # fmt: skip
    expected = [
        reference.attention(
            query[starts[i] : starts[i + 1]], *meaning[i], position=before,
            window=case.window, soft_cap=case.soft_cap, sinks=sinks,
        )
        for i, (before, _) in enumerate(case.sequences)
    ]  # fmt: skip
    assert_close(
        out[:tokens], np.concatenate(expected), case.dtype, tolerance=TOLERANCES[case.dtype]
    )
    assert is_untouched(out)[tokens:].all()
    assert_only_inside_written(out)


@pytest.mark.parametrize("kind", CACHE_KINDS, ids=str)
@FEW
@given(case=cases)
def test_attention(kind: CacheKind, case: Case) -> None:
    run(kind, case)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", CACHE_KINDS, ids=str)
def test_attention_over_many_tiles(kind: CacheKind, splits: int) -> None:
    """Whole tiles without a mask between tiles with one, at both ends of a window.

    The first query, after 78 keys, sees all of its fifth tile of 16 keys but one.
    """
    case = Case(
        seed=splits, sequences=[(78, 20)], heads=(3, 1), head_size=64, window=50, splits=splits
    )
    run(kind, case)


def test_tiles_chosen_for_a_gpu_compute_the_same() -> None:
    """Decoding with few heads: the keys are divided."""
    from edge.kernels.attention import triton as face

    tiles = face.attention_tiles(max_queries=1, group=2, head_size=16)
    assert tiles.rows == 16
    splits = face.key_splits(tiles=2, max_keys=4096, processors=8)
    assert splits == 8
    kind = CacheKind(bits=None, paged=True)
    keys, values = normal(1, 2, 300, 1, 16)
    cache, _ = make_cache(kind, [(keys, values)], 300, "float32")
    query = normal(2, 1, 2, 16)
    result = face.attention(
        tensor(query), cache, starts=tensor(np.asarray([0, 1], np.int32)),
        lengths=tensor(np.asarray([300], np.int32)), max_queries=1,
        tiles=dataclasses.replace(tiles, splits=splits),
    )  # fmt: skip
    expected = reference.attention(query, keys, values, position=299)
    assert_close(result, expected, "float32")


def test_large_prompts_fill_a_gpu_without_divided_keys() -> None:
    from edge.kernels.attention.triton import attention_tiles, key_splits

    prompt = {"max_queries": 2048, "group": 4, "head_size": 128}
    assert attention_tiles(**prompt).rows == 64
    assert attention_tiles(**prompt, memory=227 << 10).rows == 128
    assert attention_tiles(**prompt, memory=227 << 10, element_bytes=4).rows == 64
    assert key_splits(tiles=8 * 2048 * 4 // 128, max_keys=2048, processors=132) == 1


def test_the_reference_with_a_cap_and_sinks_is_that_of_torch() -> None:
    """The score of a sink is one of the softmax's, and its weight is dropped."""
    import torch

    query, keys, values = normal(1, 3, 4, 2, 8)
    sinks = normal(2, 2)
    q, k, v = (torch.from_numpy(x).double().transpose(0, 1) for x in (query, keys, values))
    scores = 3 * torch.tanh(q @ k.transpose(1, 2) / 8**0.5 / 3)
    scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    column = torch.from_numpy(sinks).double()[:, None, None].expand(2, 4, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    expected = (weights @ v).transpose(0, 1).numpy()
    found = reference.attention(query, keys, values, position=0, soft_cap=3.0, sinks=sinks)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.5 / 127), (4, 0.5 / 7)])
def test_codes_stand_for_the_nearest_of_their_group(bits: int, bound: float) -> None:
    x = normal(bits, 5, 3, 64)
    x[0, 0] = 0
    codes, scales = token_cache.quantize_heads(x, bits=bits, group_size=32)
    found = token_cache.dequantize_heads(codes, scales)
    assert codes.shape == (5, 3, 64 * bits // 8)
    peak = np.abs(x.reshape(5, 3, 2, 32)).max(axis=-1)
    limit = np.repeat(peak, 32, axis=-1) * bound * (1 + 1e-5)
    assert (np.abs(found - x) <= limit).all()
    assert (found[0, 0] == 0).all()


def test_codes_that_cannot_be_are_refused() -> None:
    x = normal(1, 2, 10)
    with pytest.raises(ValueError, match="a KV cache of 2 bits is not supported"):
        token_cache.quantize_heads(x, bits=2, group_size=10)
    with pytest.raises(ValueError, match="heads of 10 do not divide into groups of 4"):
        token_cache.quantize_heads(x, bits=8, group_size=4)
    with pytest.raises(ValueError, match="heads of 5 do not divide into groups of 5"):
        token_cache.quantize_heads(x[:, :5], bits=4, group_size=5)


def test_what_does_not_fit_is_refused() -> None:
    import torch

    from edge.kernels.attention.triton import attention
    from edge.kernels.kv_cache.gpu_cache import KvCache

    stores = torch.zeros(2, 2, 8, 16)
    cache = KvCache(keys=stores, values=stores)
    one, two = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def call(heads: int = 4, head_size: int = 16, **changed: Any) -> torch.Tensor:
        arguments: dict[str, Any] = {"starts": one, "lengths": two, "max_queries": 1} | changed
        return attention(torch.zeros(1, heads, head_size), cache, **arguments)

    with pytest.raises(ValueError, match="3 query heads of 16 do not go with 2 KV heads of 16"):
        call(heads=3)
    with pytest.raises(ValueError, match="4 query heads of 8 do not go with"):
        call(head_size=8)
    with pytest.raises(ValueError, match="a window of 0 keys shows none"):
        call(window=0)
    with pytest.raises(ValueError, match=r"scale is 0\.0, not above 0"):
        call(scale=0.0)
    with pytest.raises(ValueError, match="soft_cap is 0, not above 0"):
        call(soft_cap=0)
    with pytest.raises(ValueError, match=r"starts has the shape \[2\], not \[4\]"):
        call(lengths=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="3 sequences, but a cache of 2"):
        call(lengths=torch.zeros(3, dtype=torch.int32), starts=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="lengths is int64; pass int32"):
        call(lengths=two.long())
    with pytest.raises(ValueError, match=r"sinks has the shape \[3\], not \[4\]"):
        call(sinks=torch.zeros(3))


def test_a_call_without_queries_writes_nothing() -> None:
    from edge.kernels.attention.triton import attention
    from edge.kernels.kv_cache.gpu_cache import KvCache

    stores = tensor(np.zeros((1, 1, 8, 16), np.float32))
    none: NDArray[Any] = np.zeros((0, 1, 16), np.float32)
    result = attention(
        tensor(none), KvCache(keys=stores, values=stores), max_queries=0,
        starts=tensor(np.zeros(2, np.int32)), lengths=tensor(np.zeros(1, np.int32)),
    )  # fmt: skip
    assert result.shape == (0, 1, 16)
