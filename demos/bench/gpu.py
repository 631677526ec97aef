"""What benches of a GPU share: whether there is one, and a made-up model on it."""

from __future__ import annotations

import importlib.util
from typing import Any

from edge.backends.interface import StageProgram
from edge.host.cuda_driver import num_cuda_devices
from edge.models.families import read_family
from edge.models.spec import ModelSpec
from edge.protocol.step import Step, StepEntry
from edge.transport import SoloCollective

NO_GPU = "not run: there is no CUDA device"
GROUP_SIZE = 128
"""Weights of an int4 block."""


def is_there_a_gpu() -> bool:
    """False without torch or Triton too; importing them takes seconds, asking the driver none."""
    if not num_cuda_devices():
        return False
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return False
    import torch

    return bool(torch.cuda.is_available())


def software() -> str:
    """The GPU, and versions, in the words of results.csv."""
    import torch
    import triton

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreted"
    return f"{where}, torch {torch.__version__}, Triton {triton.__version__}"


def config(
    layers: int, hidden: int, columns: int, heads: int, kv_heads: int, head: int, vocab: int
) -> dict[str, Any]:
    """The config.json of a Llama of these sizes."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": columns,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }


def described(config: dict[str, Any]) -> ModelSpec:
    return read_family(config, source="a bench")[1]


def int4_bytes(num_weights: int) -> float:
    """As a GPU keeps them: half a byte each, and two for the scale of a block."""
    return num_weights * (0.5 + 2 / GROUP_SIZE)


def decode(program: StageProgram, position: int, count: int) -> None:
    """`count` tokens from `position` on; returns when their logits are on the host."""
    entry = StepEntry(request="a", position=position, tokens=(7,) * count, logit_rows=1)
    program.forward(Step(entries=(entry,)), None, SoloCollective())
