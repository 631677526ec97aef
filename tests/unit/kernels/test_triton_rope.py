"""Rotary embedding by Triton, on a packed product's way into every kind of cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge.kernels.attention.reference import PackedAttention
from edge.kernels.kv_cache.token_cache import quantize_heads
from edge.models.config import Config
from edge.models.rope import read_rotary
from tests.support.operator_face import normal
from tests.support.triton_face import (
    FLOAT_DTYPES,
    TOLERANCES,
    array,
    assert_close,
    assert_only_inside_written,
    device,
    is_untouched,
    output,
    rounded,
    tensor,
)
from tests.support.triton_kv import CACHE_KINDS, CacheKind, read_cache, sentinel_cache

EPSILON = 1e-5
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
seeds = st.integers(0, 2**32 - 3)


def tables(rotary: int, length: int, *, llama3: bool = False) -> tuple[NDArray[Any], NDArray[Any]]:
    """(cos, sin) of the frequencies that a checkpoint's config asks for."""
    config = {"rope_theta": 100.0} | ({"rope_scaling": LLAMA3} if llama3 else {})
    if not rotary:
        return np.zeros((length, 0), np.float32), np.zeros((length, 0), np.float32)
    return read_rotary(Config(config, source="config.json"), rotary).tables(length)


@pytest.mark.parametrize("kind", CACHE_KINDS, ids=str)
@settings(max_examples=4)
@given(
    seed=seeds, dtype=st.sampled_from(FLOAT_DTYPES),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 2)]),
    sizes=st.sampled_from([(6, 6), (20, 20), (64, 64), (64, 32), (96, 96), (20, 0), (20, 8)]),
    interleaved=st.booleans(), normed=st.booleans(), gated=st.booleans(),
    value_norm=st.booleans(), llama3=st.booleans(),
)  # fmt: skip
def test_rope_store(
    seed: int, kind: CacheKind, dtype: str, heads: tuple[int, int], sizes: tuple[int, int],
    interleaved: bool, normed: bool, gated: bool,
    value_norm: bool, llama3: bool,
) -> None:  # fmt: skip
    """Two sequences' tokens, one that is left out, into a cache where nothing else changes."""
    from edge.kernels.rope.triton import rope_store

    num_heads, num_kv_heads = heads
    head_size, rotary = sizes
    cache = sentinel_cache(kind, 2, num_kv_heads, 32, head_size, dtype)
    cos, sin = tables(rotary, 40, llama3=llama3)
    positions = np.asarray([0, 1, 31, 7, -1, 32])
    sequences = np.asarray([0, 0, 0, 1, 1, 1], np.int32)
    form = PackedAttention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        turned_elements=rotary, interleaved=interleaved, value_norm=value_norm, gated=gated,
        epsilon=EPSILON,
    )  # fmt: skip
    packed = rounded(normal(seed, 6, form.columns), dtype)
    norms = tuple(normal(seed + 1, 2, head_size)) if normed else None
    query = output(6, num_heads, head_size, dtype=dtype)
    fused = packed.copy()
    fused[:, num_heads * head_size :][:, : gated * num_heads * head_size] = np.nan
    rope_store(
        tensor(fused, dtype), cache, tensor(cos), tensor(sin),
        positions=tensor(positions), sequences=tensor(sequences), interleaved=interleaved,
        gated=gated, value_norm=value_norm, epsilon=EPSILON, out=query,
        norms=None if norms is None else (tensor(norms[0]), tensor(norms[1])),
    )  # fmt: skip

    real = positions[:4]
    made = form.heads(packed[:4], cos[real], sin[real], norms)
    assert_close(query[:4], made.query, dtype)
    assert is_untouched(query)[4:].all()
    assert_only_inside_written(query)
    written = np.zeros((2, 32), bool)
    written[sequences[:4], real] = True
    for stored, scales, expected in (
        (cache.keys, cache.key_scales, made.keys),
        (cache.values, cache.value_scales, made.values),
    ):  # fmt: skip
        found, is_new = read_cache(kind, cache, stored, scales)
        np.testing.assert_array_equal(is_new, written)
        tolerance = TOLERANCES[dtype] + {None: 0, 8: 0.005, 4: 0.1}[kind.bits]
        in_order = tensor(found[sequences[:4], real])
        assert_close(in_order, expected, "float32", tolerance=tolerance)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("head_size", "group_size"), [(64, 32), (20, 20), (96, 32), (16, 16)])
def test_stored_codes_are_those_of_the_formula(bits: int, head_size: int, group_size: int) -> None:
    """To the bit, also for a head of zeros."""
    import torch

    from edge.kernels.kv_cache.gpu_cache import KvCache
    from edge.kernels.rope.triton import rope_store

    qkv = normal(bits, 3, 3, head_size)
    qkv[1] = 0
    width = head_size if bits == 8 else head_size // 2
    dtype = torch.int8 if bits == 8 else torch.uint8
    groups = head_size // group_size
    stores = [torch.zeros(1, 1, 3, width, dtype=dtype, device=device()) for _ in range(2)]
    scales = [torch.zeros(1, 1, 3, groups, device=device()) for _ in range(2)]
    cache = KvCache(keys=stores[0], values=stores[1], key_scales=scales[0], value_scales=scales[1])
    cos, sin = np.ones((3, 1), np.float32), np.zeros((3, 1), np.float32)
    rope_store(
        tensor(qkv.reshape(3, -1)), cache, tensor(cos), tensor(sin),
        positions=tensor(np.arange(3)), sequences=tensor(np.zeros(3, np.int32)),
    )  # fmt: skip
    for index, (codes, scale) in enumerate(zip(stores, scales, strict=True), start=1):
        expected, expected_scales = quantize_heads(qkv[:, index], bits=bits, group_size=group_size)
        np.testing.assert_array_equal(array(codes)[0, 0], expected)
        np.testing.assert_allclose(array(scale)[0, 0], expected_scales, rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    import torch

    from edge.kernels.kv_cache.gpu_cache import KvCache
    from edge.kernels.rope.triton import rope_store

    qkv, table = torch.zeros(2, 24), torch.zeros(5, 4)
    positions = torch.zeros(2, dtype=torch.int64)
    stores = torch.zeros(2, 1, 4, 8)
    cache = KvCache(keys=stores, values=stores.clone())
    with pytest.raises(ValueError, match="qkv has 16 columns, not a query, 1 keys"):
        rope_store(
            torch.zeros(2, 16), cache, table, table, positions=positions, sequences=positions
        )
    odd = torch.zeros(5, 5)
    with pytest.raises(ValueError, match="rotate 10 elements; a head has 8"):
        rope_store(qkv, cache, odd, odd, positions=positions, sequences=positions)
    with pytest.raises(ValueError, match=r"positions has the shape \[2\], not \[3\]"):
        rope_store(
            torch.zeros(3, 24), cache, table, table, positions=positions, sequences=positions
        )
    with pytest.raises(ValueError, match="a cache of 8 bits needs key_scales and value_scales"):
        KvCache(keys=stores.to(torch.int8), values=stores.to(torch.int8))
    with pytest.raises(ValueError, match=r"a cache of torch.float32 has no scales"):
        KvCache(keys=stores, values=stores, key_scales=stores)
    odd, blocks = torch.zeros(2, 1, 3, 8), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="a block holds 3 tokens, not a power of two"):
        KvCache(keys=odd, values=odd, block_table=blocks)
    codes, scales = stores.to(torch.int8), torch.zeros(2, 1, 4, 3)
    with pytest.raises(ValueError, match="heads of 8 do not divide into 3 groups"):
        KvCache(keys=codes, values=codes, key_scales=scales, value_scales=scales)
    with pytest.raises(ValueError, match="pass both in one layout"):
        KvCache(keys=stores, values=torch.zeros(2, 4, 1, 8).transpose(1, 2))
