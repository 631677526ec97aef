"""Shards as Triton kernels, interpreted: what `transformers` computes, however a model is split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends import overlap
from edge.kernels.matmul_nbits.reference import dequantize, quantize
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.gguf_files import Type, write_gguf
from tests.support.packed_folders import compressed, gptq, write_packed
from tests.support.reference_model import ReferenceModel
from tests.support.triton_shards import chunk, relative_error, triton_plan

Checkpoints = Callable[..., TinyCheckpoint]

LARGEST_DIFFERENCE = 1e-4
LARGEST_ERROR_OF_CODES = 1e-3
"""Float products with rounded weights; the reference has the same weights."""

LARGEST_ERROR_OF_BFLOAT16 = 0.04
LARGEST_CACHE_ERROR = {"int8": 0.04, "int4": 0.45}
"""As on the CPU."""

TOKENS = 10
"""More than the sliding windows."""


@pytest.mark.parametrize(
    ("family", "layout", "variant"),
    [
        ("llama", "pipeline_2", {"layers": 4, "heads": (2, 1), "stored_type": "bfloat16"}),
        ("llama_with_biases", "tensor_3", {"layers": 2}),
        ("mistral", "solo", {"layers": 2, "heads": (3, 1)}),
        ("qwen2", "tensor_2", {"layers": 2, "heads": (2, 2)}),
        ("qwen3", "solo", {"layers": 2, "heads": (2, 1), "stored_type": "float16"}),
        ("gpt2", "tensor_2", {"layers": 2}),
        ("lfm2", "tensor_2", {"layers": 2}),
        ("qwen3_5", "tensor_2", {"layers": 3}),
        ("deepseek_v3", "tensor_2", {"layers": 1}),
        ("glm4_moe_lite", "solo", {"layers": 1}),
        ("gemma4", "tensor_3", {"layers": 1, "heads": (2, 1)}),
        ("gemma4_small", "mixed_2_then_3", {"layers": 6, "heads": (2, 1)}),
        ("mixtral", "solo", {"layers": 1}),
        ("glm4_moe", "tensor_2", {"layers": 3}),
        ("gpt_oss", "tensor_3", {"layers": 2}),
        ("qwen2_moe", "tensor_2", {"layers": 1}),
        ("qwen2_moe", "whole tensor_2", {"layers": 1}),
        ("gpt_oss", "whole tensor_3", {"layers": 2}),
    ],
)
def test_logits_are_those_of_transformers(
    tiny_checkpoint: Checkpoints,
    family: str,
    layout: str,
    variant: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A chunk whose last tokens want logits, and tokens after it."""
    checkpoint = tiny_checkpoint(family, **variant)
    tokens = checkpoint.prompt(TOKENS)
    with triton_plan(checkpoint, layout, tmp_path) as model:
        parts = [
            model.forward(chunk("a", tokens[:8], rows=3)),
            model.forward(chunk("a", tokens[8:9], 8)),
            model.forward(chunk("a", tokens[9:], 9)),
        ]
    found = np.concatenate(parts, axis=1)[0]
    assert np.abs(found - checkpoint.logits(tokens)[5:]).max() <= LARGEST_DIFFERENCE


@pytest.mark.parametrize("dtype", ["int4", "int4-pure", "int2", "int8"])
def test_codes_are_computed_with_as_they_stand(
    tiny_checkpoint: Checkpoints, dtype: str, tmp_path: Path
) -> None:
    """Also where a slice begins inside a block: heads of 20 are cut after 80 of 120 columns."""
    checkpoint = tiny_checkpoint("llama_with_biases", layers=2)
    tokens = checkpoint.prompt(6)
    with triton_plan(checkpoint, "tensor_2", tmp_path, dtype=dtype) as model:
        found = model.forward(chunk("a", tokens))[0]
    expected = ReferenceModel(checkpoint, dtype=dtype, packed=True).logits(tokens)
    assert relative_error(found, expected) <= LARGEST_ERROR_OF_CODES


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [
        ("mixtral", "tensor_2", "int4-pure"),
        ("gpt_oss", "tensor_2", "int8"),
        ("mixtral", "whole tensor_2", "int4-pure"),
    ],
)
def test_experts_of_codes_are_computed_with_as_they_stand(
    tiny_checkpoint: Checkpoints, family: str, layout: str, dtype: str, tmp_path: Path
) -> None:
    """In a chunk, and one by one; cut inside a block of their columns."""
    checkpoint = tiny_checkpoint(family, layers=1, heads=(2, 2))
    tokens = checkpoint.prompt(6)
    with triton_plan(checkpoint, layout, tmp_path, dtype=dtype) as model:
        many = model.forward(chunk("a", tokens))[0]
        model.forward(chunk("b", tokens[:5], rows=0))
        few = model.forward(chunk("b", tokens[5:], 5))[0]
    expected = ReferenceModel(checkpoint, dtype=dtype, packed=True).logits(tokens)
    assert relative_error(many, expected) <= LARGEST_ERROR_OF_CODES
    assert relative_error(few, expected[5:]) <= LARGEST_ERROR_OF_CODES


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_1", "Q6_K"])
def test_codes_of_a_file_are_computed_with_as_they_stand(kind: str, tmp_path: Path) -> None:
    """Also those with an offset for each block."""
    made = make_checkpoint(tmp_path / "made", "llama_in_blocks", layers=1)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, made.path, kind=Type[kind])
    tokens = meant.prompt(6)
    stored: Any = SimpleNamespace(path=path, spec=meant.spec)
    with triton_plan(stored, "tensor_2", tmp_path / "shards", dtype="auto") as model:
        found = model.forward(chunk("a", tokens))[0]
    assert relative_error(found, meant.logits(tokens)) <= LARGEST_ERROR_OF_CODES


def test_codes_of_2_bits_are_computed_with_as_they_stand(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama_in_blocks", layers=1)

    def in_8_bits(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        return dequantize(quantize(weight, bits=8, block_size=128))

    path = tmp_path / "model"
    meant = write_packed(path, made.path, compressed(2, 64, symmetric=False), head=in_8_bits)
    tokens = meant.prompt(6)
    stored: Any = SimpleNamespace(path=path, spec=meant.spec)
    with triton_plan(stored, "tensor_2", tmp_path / "shards", dtype="auto") as model:
        found = model.forward(chunk("a", tokens))[0]
    assert relative_error(found, meant.logits(tokens)) <= LARGEST_ERROR_OF_CODES


def test_codes_in_act_order_are_computed_with_in_their_order(tmp_path: Path) -> None:
    """What devices share by columns is in 8 bits."""
    made = make_checkpoint(tmp_path / "made", "llama_in_blocks", layers=1)

    def in_8_bits(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        size = 128 if weight.shape[0] == 131 else 64
        return dequantize(quantize(weight, bits=8, block_size=size))

    layout = gptq(act_order=True, symmetric=False, of_its_own=True)
    path = tmp_path / "model"
    meant = write_packed(path, made.path, layout, head=in_8_bits, cut=in_8_bits)
    tokens = meant.prompt(6)
    stored: Any = SimpleNamespace(path=path, spec=meant.spec)
    with triton_plan(stored, "tensor_2", tmp_path / "shards", dtype="auto") as model:
        found = model.forward(chunk("a", tokens))[0]
    assert relative_error(found, meant.logits(tokens)) <= LARGEST_ERROR_OF_CODES


def test_products_in_bfloat16_err_as_little_as_that_allows(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """What a GPU computes with when accuracy is fast; caches and all."""
    checkpoint = tiny_checkpoint("llama", layers=2, heads=(2, 1))
    tokens = checkpoint.prompt(6)
    with triton_plan(checkpoint, "solo", tmp_path, dtype="int4", activations="bfloat16") as model:
        found = model.forward(chunk("a", tokens))[0]
    expected = ReferenceModel(checkpoint, dtype="int4", packed=True).logits(tokens)
    assert 1e-4 < relative_error(found, expected) <= LARGEST_ERROR_OF_BFLOAT16


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_caches_of_codes_err_within_their_bounds(
    tiny_checkpoint: Checkpoints, kv_dtype: str, tmp_path: Path
) -> None:
    """They need no calibration: it only releases its request."""
    checkpoint = tiny_checkpoint("qwen3", layers=1, heads=(2, 1))
    tokens = checkpoint.prompt(7)
    with triton_plan(checkpoint, "solo", tmp_path, kv_dtype=kv_dtype) as model:
        model.forward(chunk("calibration", [1, 2, 3], rows=0))
        model.programs[0][0].calibrate("calibration")
        found = np.concatenate(
            [model.forward(chunk("a", tokens[:6])), model.forward(chunk("a", tokens[6:], 6))],
            axis=1,
        )[0]
    error = relative_error(found, checkpoint.logits(tokens))
    assert 1e-4 < error < LARGEST_CACHE_ERROR[kv_dtype]


@pytest.mark.parametrize(("family", "layers"), [("qwen3", 1), ("lfm2", 2)])
def test_halves_of_a_chunk_have_the_bits_of_two_chunks(
    tiny_checkpoint: Checkpoints,
    family: str,
    layers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk of 12 as one of 8 and one of 4, whose sums are exchanged in turn."""
    checkpoint = tiny_checkpoint(family, layers=layers, heads=(2, 1))
    tokens = checkpoint.prompt(12)
    with triton_plan(checkpoint, "tensor_2", tmp_path) as model:
        model.forward(chunk("a", tokens[:8], rows=0))
        second = model.forward(chunk("a", tokens[8:], 8))
        monkeypatch.setattr(overlap, "MIN_TOKENS", 12)
        monkeypatch.setattr(overlap, "_ROWS", 4)
        halves = model.forward(chunk("b", tokens, rows=6))
    assert halves.shape[1] == 6
    assert halves[0, 2:].tobytes() == second[0].tobytes()
    assert np.abs(halves[0] - checkpoint.logits(tokens)[-6:]).max() <= LARGEST_DIFFERENCE
