"""A folder whose experts are not all there, or lie otherwise than in its family, is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edge.errors import CheckpointError
from edge.weights.checkpoint import Checkpoint
from tests.support.checkpoints import TinyCheckpoint
from tests.support.packed_folders import write_mxfp4

Tensors = dict[str, Any]
Change = Callable[[Tensors], object]

ONE = "model.layers.3.block_sparse_moe.experts.4.w3.weight"
"""Of mixtral."""
TOGETHER = "model.layers.2.mlp.experts.down_proj"
"""Of gpt-oss."""


def refused(folder: Path, change: Change) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught, Checkpoint.open(folder):
        pass
    sentence = str(caught.value)
    assert str(folder) in sentence
    return sentence


def stacked(tensors: Tensors) -> None:
    """Experts of a layer in one tensor where each has its own."""
    before = ONE.partition("4.w3")[0]
    names = [name for name in tensors if name.startswith(before) and name.endswith(".w3.weight")]
    tensors[f"{before}w3"] = np.stack([tensors.pop(name) for name in names])


def fewer(tensors: Tensors) -> None:
    """Codes of MXFP4 that are right in themselves, but for an expert less."""
    for suffix in ("_blocks", "_scales"):
        tensors[f"{TOGETHER}{suffix}"] = tensors[f"{TOGETHER}{suffix}"][:-1]


def shorter(tensors: Tensors) -> None:
    tensors[f"{TOGETHER}_blocks"] = tensors[f"{TOGETHER}_blocks"][..., :8].copy()


@pytest.mark.parametrize(
    ("family", "change", "cause"),
    [
        ("mixtral", lambda tensors: tensors.pop(ONE), f"tensor {ONE} is missing"),
        (
            "mixtral",
            stacked,
            "tensor model.layers.3.block_sparse_moe.experts.w3 has all experts of a layer, where "
            "models of family 'mixtral' have tensors for each: model.layers.3.block_sparse_moe."
            "experts.0.w3.weight is missing",
        ),
        (
            "qwen3_5_moe",
            lambda tensors: tensors.pop("model.layers.3.mlp.experts.5.up_proj.weight"),
            "tensor model.layers.3.mlp.experts.5.up_proj.weight is missing",
        ),
        (
            "gpt_oss",
            lambda tensors: tensors.pop(TOGETHER),
            f"tensor {TOGETHER}, with all experts of a layer, is missing",
        ),
    ],
)
def test_experts_that_are_not_there(
    family: str,
    change: Change,
    cause: str,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(family).path, tmp_path / "model"))
    sentence = refused(folder, change)
    assert f"{cause}; take the folder as the model's makers publish it" in sentence


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (fewer, f"tensor {TOGETHER}_blocks has no expert 3, and config.json counts more; take"),
        (shorter, f"{TOGETHER}_blocks in"),
        (
            lambda tensors: tensors.pop(f"{TOGETHER}_scales"),
            f"has no {TOGETHER}_scales beside it; download",
        ),
    ],
)
def test_mxfp4_of_another_length(
    change: Change, cause: str, tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_mxfp4(folder, tiny_checkpoint("gpt_oss_in_blocks").path, lambda head: head)
    assert cause in refused(folder, change)
