"""What benches of a GPU share: whether there is one, and a made-up model on it."""

from __future__ import annotations

import importlib.util

from edge.backends.interface import StageProgram
from edge.host.cuda_driver import num_cuda_devices
from edge.models.attention import Attention
from edge.models.gated_mlp import GatedMlp
from edge.models.rotary import Rotary
from edge.models.spec import LayerSpec, ModelSpec
from edge.partition import Plan, Shard, Stage
from edge.protocol.step import Step, StepEntry
from edge.transport import SoloCollective
from edge.weights.layout import ShardLayout, shard_layout

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


def llama(
    *,
    num_layers: int,
    hidden_size: int,
    ffn_columns: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    vocab_size: int,
) -> ModelSpec:
    """A Llama of these sizes."""
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        window=None,
        qkv_bias=False,
        output_bias=False,
        query_key_norm=False,
        rotary=Rotary(
            inverse_frequencies=tuple(
                500000.0 ** (-2 * i / head_size) for i in range(head_size // 2)
            )
        ),
    )
    feed_forward = GatedMlp(columns=ffn_columns, activation="silu", bias=False)
    return ModelSpec(
        family="llama",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        context_tokens=4096,
        norm_epsilon=1e-5,
        tied_embeddings=False,
        layers=(0,) * num_layers,
        kinds=(LayerSpec(mixer=attention, feed_forward=feed_forward),),
    )


def whole_layout(spec: ModelSpec, *, streamed_layers: int = 0) -> ShardLayout:
    """All of the model on one device."""
    whole = Shard(
        device="gpu",
        heads=range(spec.attention.num_heads),
        ffn_columns=range(spec.kinds[0].feed_forward.columns),
        vocab=range(spec.vocab_size),
        streamed_layers=streamed_layers,
    )
    stage = Stage(layers=range(spec.num_layers), shards=(whole,))
    return shard_layout(spec, Plan(model="bench", version=0, stages=(stage,)), stage=0, rank=0)


def int4_bytes(num_weights: int) -> float:
    """As a GPU keeps them: half a byte each, and two for the scale of a block."""
    return num_weights * (0.5 + 2 / GROUP_SIZE)


def decode(program: StageProgram, position: int, count: int) -> None:
    """`count` tokens from `position` on; returns when their logits are on the host."""
    entry = StepEntry(request="a", position=position, tokens=(7,) * count, logit_rows=1)
    program.forward(Step(entries=(entry,)), None, SoloCollective())
