"""Quantised folders over real daemons give what `transformers` gives for the weights in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edge
from edge.kernels.matmul_nbits.reference import dequantize, quantize
from edge.partition import Plan
from tests.support.checkpoints import TinyCheckpoint
from tests.support.packed_folders import (
    Layout,
    awq,
    compressed,
    fp8,
    gptq,
    mlx,
    nvfp4,
    write_mxfp4,
    write_packed,
)
from tests.support.plans import make_plan, streaming
from tests.support.slow_cases import repeats_are_slow, shown_in_parts

LARGEST_ERROR_OF_CODES = 1e-3
LARGEST_ERROR_OF_FLOATS = 1e-4
PROMPT_TOKENS = 24

Checkpoints = Callable[..., TinyCheckpoint]


def in_8_bits(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """A head of floats, as it is held beside codes."""
    columns = weight.shape[1]
    size = 128 if columns % 128 == 0 else 64
    return dequantize(quantize(weight, bits=8, block_size=size))


Case = tuple[str, Layout | None, str]

IN_ORDER: dict[str, Case] = {
    "gptq": ("llama_in_blocks", gptq(group=64), "4 bits in blocks of 64"),
    "gptq of 8 bits": (
        "qwen2_in_blocks",
        gptq(bits=8, symmetric=False),
        "8 bits in blocks of 32 with offsets",
    ),
    "awq": ("qwen3_in_blocks", awq(16), "4 bits in blocks of 16 with zero points"),
    "awq of 128": ("llama_in_blocks", awq(128), "4 bits in blocks of 128 with zero points"),
    "compressed": ("llama_in_blocks", compressed(4, None), "4 bits in blocks of 128"),
    "compressed of 64": (
        "llama_in_blocks",
        compressed(4, 64, symmetric=False),
        "4 bits in blocks of 64 with zero points",
    ),
    "compressed of 128": ("llama_in_blocks", compressed(4, 128), "4 bits in blocks of 128"),
    "mlx": ("qwen3_in_blocks", mlx(), "as stored: 4 bits in blocks of 32 with offsets"),
    "fused gptq": ("phi3_in_blocks", gptq(), "4 bits in blocks of 32"),
    "experts of gptq": ("qwen2_moe_in_blocks", gptq(), "4 bits in blocks of 32"),
    "mxfp4": ("gpt_oss_in_blocks", None, "blocks of MXFP4"),
    "nvfp4": ("llama_in_blocks", nvfp4(), "blocks of NVFP4"),
    "fused mlx": ("phi3_in_blocks", mlx(), "as stored: 4 bits in blocks of 32 with offsets"),
    "linear attention of gptq": ("qwen3_5_in_blocks", gptq(), "4 bits in blocks of 32"),
    "convolutions and experts of compressed": (
        "lfm2_moe_in_blocks",
        compressed(4, None),
        "4 bits in blocks of 128",
    ),
    "2 bits": (
        "llama_in_blocks",
        compressed(2, 64, symmetric=False),
        "2 bits in blocks of 64 with zero points",
    ),
}

IN_ACT_ORDER: dict[str, Case] = {
    "one order for each size": (
        "llama_in_blocks",
        gptq(act_order=True, symmetric=False),
        "with offsets in act-order",
    ),
    "an order for each matrix": (
        "llama_in_blocks",
        gptq(act_order=True, of_its_own=True),
        "of 32 in act-order",
    ),
    "compressed": (
        "llama_in_blocks",
        compressed(act_order=True, symmetric=False),
        "of 32 with zero points in act-order",
    ),
    "fused": ("phi3_in_blocks", gptq(act_order=True, group=16), "of 16 in act-order"),
    "experts": ("qwen2_moe_in_blocks", gptq(act_order=True), "of 32 in act-order"),
}

LIKE_OTHERS = {
    *("awq of 128", "compressed of 64", "compressed of 128", "fused gptq", "fused mlx", "experts"),
    "convolutions and experts of compressed",
}
"""Read in a way that is shown for files alone, and computed with as in other cases."""

PLANS = ("tensor_2", "tensor_3", "pipeline_2")


def of_plans(cases: Iterable[str]) -> list[Any]:
    mark = shown_in_parts("unit/weights/test_packed_folders.py", "e2e/test_packed_folders.py")
    alike = [case for case in cases if case in LIKE_OTHERS]
    return [
        *repeats_are_slow(product((case for case in cases if case not in LIKE_OTHERS), PLANS)),
        *(pytest.param(*each, marks=mark) for each in product(alike, PLANS)),
    ]


def check(cluster: edge.Cluster, path: Path, meant: TinyCheckpoint, plan: Plan, words: str) -> None:
    prompt = meant.prompt(PROMPT_TOKENS)
    with cluster.load(path, plan=plan, accuracy="high") as model:
        assert model.proposal.dtype == "as stored"
        assert words in model.proposal.weights
        logits = model.logits(prompt)
    assert relative_error(logits, meant.logits(prompt)) <= LARGEST_ERROR_OF_CODES


def cut(meant: TinyCheckpoint, name: str, column_multiple: int) -> Plan:
    """In stages, with layers read from disk."""
    if name.startswith("tensor"):
        return make_plan(meant.spec, name, model="model", column_multiple=column_multiple)
    return streaming(make_plan(meant.spec, name, model="model"), 2)


@pytest.mark.parametrize(("case", "plan"), of_plans(IN_ORDER))
@pytest.mark.linux_ways
def test_codes_are_computed_with_as_the_folder_has_them(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, tmp_path: Path, case: str, plan: str
) -> None:
    name, layout, words = IN_ORDER[case]
    made = tiny_checkpoint(name)
    path = tmp_path / "model"
    if layout is None:
        meant = write_mxfp4(path, made.path, in_8_bits)
    else:
        meant = write_packed(path, made.path, layout, head=in_8_bits)
    check(five_peers, path, meant, cut(meant, plan, 256 if case == "nvfp4" else 128), words)


@pytest.mark.parametrize(("case", "plan"), of_plans(IN_ACT_ORDER))
@pytest.mark.linux_ways
def test_codes_in_act_order_are_computed_with_in_their_order(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, tmp_path: Path, case: str, plan: str
) -> None:
    """What devices share by columns is in 8 bits."""
    name, layout, words = IN_ACT_ORDER[case]
    assert layout is not None
    made = tiny_checkpoint(name)
    path = tmp_path / "model"
    size = 32 if name == "phi3_in_blocks" else 64

    def shared(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        return dequantize(quantize(weight, bits=8, block_size=size))

    meant = write_packed(path, made.path, layout, head=in_8_bits, cut=shared)
    check(five_peers, path, meant, cut(meant, plan, 64), words)


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
    five_peers: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    name: str,
    layout: Layout,
) -> None:
    made = tiny_checkpoint(name)
    path = tmp_path / "model"
    meant = write_packed(path, made.path, layout)
    prompt = meant.prompt(PROMPT_TOKENS)
    plan = make_plan(meant.spec, "tensor_2", model="model")
    with five_peers.load(path, plan=plan, dtype="float32") as model:
        assert relative_error(model.logits(prompt), meant.logits(prompt)) <= LARGEST_ERROR_OF_FLOATS


def relative_error(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
