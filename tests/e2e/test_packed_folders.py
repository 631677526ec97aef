"""Quantised folders over real daemons give what `transformers` gives for the weights in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import edge
from edge.kernels.matmul_nbits.reference import dequantize, quantize
from tests.support.checkpoints import make_checkpoint
from tests.support.packed_folders import (
    Layout,
    awq,
    compressed,
    fp8,
    gptq,
    mlx,
    write_mxfp4,
    write_packed,
)
from tests.support.plans import make_plan, streaming

LARGEST_ERROR_OF_CODES = 1e-3
LARGEST_ERROR_OF_FLOATS = 1e-4
PROMPT_TOKENS = 24

pytestmark = pytest.mark.slow


def in_8_bits(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """A head of floats, as it is held beside codes."""
    columns = weight.shape[1]
    size = 128 if columns % 128 == 0 else 64
    return dequantize(quantize(weight, bits=8, block_size=size))


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("llama_in_blocks", gptq(group=64), "4 bits in blocks of 64"),
        (
            "qwen2_in_blocks",
            gptq(bits=8, symmetric=False),
            "8 bits in blocks of 32 with offsets",
        ),
        ("qwen3_in_blocks", awq(16), "4 bits in blocks of 16 with zero points"),
        ("llama_in_blocks", compressed(4, None), "4 bits in blocks of 128"),
        ("qwen3_in_blocks", mlx(), "as stored: 4 bits in blocks of 32 with offsets"),
        ("phi3_in_blocks", gptq(), "4 bits in blocks of 32"),
        ("qwen2_moe_in_blocks", gptq(), "4 bits in blocks of 32"),
        ("gpt_oss_in_blocks", None, "8 bits in blocks of 32"),
        ("phi3_in_blocks", mlx(), "as stored: 4 bits in blocks of 32 with offsets"),
        ("qwen3_5_in_blocks", gptq(), "4 bits in blocks of 32"),
        ("lfm2_moe_in_blocks", compressed(4, None), "4 bits in blocks of 128"),
        (
            "llama_in_blocks",
            compressed(2, 64, symmetric=False),
            "2 bits in blocks of 64 with zero points",
        ),
    ],
    ids=[
        *("gptq", "gptq of 8 bits", "awq", "compressed", "mlx"),
        *("fused gptq", "experts of gptq", "mxfp4", "fused mlx"),
        *("linear attention of gptq", "convolutions and experts of compressed", "2 bits"),
    ],
)
def test_codes_are_computed_with_as_the_folder_has_them(
    five_peers: edge.Cluster, tmp_path: Path, name: str, layout: Layout | None, words: str
) -> None:
    """However it is cut, also with layers read from disk."""
    made = make_checkpoint(tmp_path / "made", name)
    path = tmp_path / "model"
    if layout is None:
        meant = write_mxfp4(path, made.path, in_8_bits)
    else:
        meant = write_packed(path, made.path, layout, head=in_8_bits)
    prompt = meant.prompt(PROMPT_TOKENS)
    expected = meant.logits(prompt)
    tensor = make_plan(meant.spec, "tensor_3", model="model", column_multiple=128)
    pipeline = streaming(make_plan(meant.spec, "pipeline_2", model="model"), 2)
    for plan in (tensor, pipeline):
        with five_peers.load(path, plan=plan, accuracy="high") as model:
            assert model.proposal.dtype == "as stored"
            assert words in model.proposal.weights
            assert relative_error(model.logits(prompt), expected) <= LARGEST_ERROR_OF_CODES


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("llama_in_blocks", gptq(act_order=True, symmetric=False), "with offsets in act-order"),
        ("llama_in_blocks", gptq(act_order=True, of_its_own=True), "of 32 in act-order"),
        ("phi3_in_blocks", gptq(act_order=True, group=16), "of 16 in act-order"),
        ("qwen2_moe_in_blocks", gptq(act_order=True), "of 32 in act-order"),
    ],
    ids=["one order for each size", "an order for each matrix", "fused", "experts"],
)
def test_codes_in_act_order_are_computed_with_in_their_order(
    five_peers: edge.Cluster, tmp_path: Path, name: str, layout: Layout, words: str
) -> None:
    """Likewise; but what devices share by columns is in 8 bits."""
    made = make_checkpoint(tmp_path / "made", name)
    path = tmp_path / "model"

    def cut(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        return dequantize(quantize(weight, bits=8, block_size=block_size))

    block_size = 32 if name == "phi3_in_blocks" else 64
    meant = write_packed(path, made.path, layout, head=in_8_bits, cut=cut)
    prompt = meant.prompt(PROMPT_TOKENS)
    expected = meant.logits(prompt)
    tensor = make_plan(meant.spec, "tensor_3", model="model", column_multiple=64)
    pipeline = streaming(make_plan(meant.spec, "pipeline_2", model="model"), 2)
    for plan in (tensor, pipeline):
        with five_peers.load(path, plan=plan, accuracy="high") as model:
            assert model.proposal.dtype == "as stored"
            assert words in model.proposal.weights
            assert relative_error(model.logits(prompt), expected) <= LARGEST_ERROR_OF_CODES


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama_in_blocks", gptq(act_order=True, symmetric=False)),
        ("llama_in_blocks", fp8()),
        ("llama_in_blocks", awq()),
        ("phi3_in_blocks", fp8()),
    ],
    ids=["gptq in act-order", "fp8", "awq", "fused fp8"],
)
def test_floats_are_those_that_the_folder_stands_for(
    five_peers: edge.Cluster, tmp_path: Path, name: str, layout: Layout
) -> None:
    made = make_checkpoint(tmp_path / "made", name)
    path = tmp_path / "model"
    meant = write_packed(path, made.path, layout)
    prompt = meant.prompt(PROMPT_TOKENS)
    plan = make_plan(meant.spec, "tensor_3", model="model")
    with five_peers.load(path, plan=plan, dtype="float32") as model:
        assert relative_error(model.logits(prompt), meant.logits(prompt)) <= LARGEST_ERROR_OF_FLOATS


def relative_error(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
