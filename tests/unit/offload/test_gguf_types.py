"""Blocks of every type stand for the weights that the format's own package makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from edge.offload import BLOCK_TYPES, READ_TYPES
from tests.support.gguf_files import Type, raw_blocks

WANTED = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "NVFP4",
)  # fmt: skip


def test_the_types_that_are_read() -> None:
    assert set(WANTED) == set(READ_TYPES)


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_names_and_sizes(number: int) -> None:
    known = BLOCK_TYPES[number]
    kind = Type(number)
    assert known.name == kind.name
    assert (known.block_size, known.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", WANTED)
def test_rounded_weights_are_read_exactly(name: str) -> None:
    kind = Type[name]
    values = np.random.default_rng(1).standard_normal((7, 768)).astype(np.float32)
    raw = raw_blocks(values, kind)
    expected = np.asarray(gguf.quants.dequantize(raw, kind), np.float32)
    known = BLOCK_TYPES[int(kind)]
    found = known.dequantize(raw.reshape(7, -1, known.block_bytes))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected, strict=True)
    assert 0.1 < np.std(found) < 10


@pytest.mark.parametrize("name", WANTED)
def test_any_bytes_are_read_exactly(name: str) -> None:
    """Every code, every scale: also those that are no numbers, without a warning."""
    kind, known = Type[name], BLOCK_TYPES[int(Type[name])]
    shape = (64, 5, known.block_bytes)
    raw = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(64, -1), kind)
    found = known.dequantize(raw)
    np.testing.assert_array_equal(found, np.asarray(expected, np.float32))


def test_a_type_that_is_only_known_by_its_size() -> None:
    with pytest.raises(ValueError, match="IQ1_S are not read"):
        BLOCK_TYPES[19].dequantize(np.zeros((1, 1, 50), np.uint8))
