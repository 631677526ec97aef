"""What benches of a GPU share: whether there is one, times on it, and a made-up model."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from itertools import pairwise
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

DEVICE = "cuda"
CACHES = 3
"""As many times a GPU's cache are the operands of the calls that are timed, where they can be."""
MOST_COPIES = 4096
LEAST_CALLS = 32
"""In a graph, whose own start takes a microsecond or two."""
REPLAYS = 20

Make = Callable[[int], Callable[[], object]]
"""A call of each number from 0 on, with operands of its own: no call finds another's in a cache."""


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


def times_ms(make: Make, nbytes: int) -> list[float]:
    """Times of a call as it is one of many in a step of decoding: in a CUDA graph, where nobody
    waits for Python to launch it, and with operands that are not in the GPU's cache.

    nbytes: of one call's operands.
    """
    import torch

    cache_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    copies = min(MOST_COPIES, math.ceil(CACHES * cache_bytes / nbytes))
    calls = [make(number) for number in range(copies)]
    calls[0]()  # compiles
    calls *= math.ceil(LEAST_CALLS / copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / len(calls) for first, second in pairwise(events)]


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
