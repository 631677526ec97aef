"""How fast does the back end for GPUs decode, from token to logits, beside what memory allows?

Run by gpu_kernels.py; a model of 8 B parameters with made-up weights, in int4.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from demos.bench.results import Metric
from edge.backends.base import Step, StepEntry, StepLimits, open_backend
from edge.formats import weight_format
from edge.layout import shard_layout
from edge.made_up_weights import written_weights
from edge.models.spec import ModelSpec
from partition import Plan, Shard, Stage
from transport import SoloCollective

LAYERS = 32
GROUP_SIZE = 128
PROMPT_TOKENS = 512
WARM_UPS, STEPS = 8, 64
SCALE_BYTES = 2
"""Of a block of weights, as a GPU keeps it."""

SPEC = ModelSpec(
    family="llama", num_layers=LAYERS, hidden_size=4096, num_heads=32, num_kv_heads=8,
    head_size=128, ffn_columns=14336, vocab_size=128256, context_tokens=4096, norm_epsilon=1e-5,
    activation="silu", inverse_frequencies=tuple(500000.0 ** -(i / 64) for i in range(64)),
    windows=(None,) * LAYERS, qkv_bias=False, output_bias=False, mlp_bias=False,
    query_key_norm=False, tied_embeddings=False,
)  # fmt: skip


def decoding_of_8b(copy_rate: float) -> Iterator[Metric]:
    """Tokens per second of one request, and the share of the copy's rate its weights are read at.

    copy_rate: in GB/s.
    """
    chosen = weight_format("int4", GROUP_SIZE)
    whole = Shard(
        device="gpu",
        heads=range(SPEC.num_heads),
        ffn_columns=range(SPEC.ffn_columns),
        vocab=range(SPEC.vocab_size),
    )
    plan = Plan(model="8B", version=0, stages=(Stage(layers=range(LAYERS), shards=(whole,)),))
    layout = shard_layout(SPEC, plan, stage=0, rank=0)
    limits = StepLimits(
        context_tokens=1024, chunk_tokens=PROMPT_TOKENS, requests=1, cached_tokens=1024
    )
    backend = open_backend("triton", threads=1)
    with tempfile.TemporaryDirectory() as folder:
        with written_weights(layout, chosen, Path(folder)) as weights:
            program = backend.load(SPEC, layout, weights, chosen, limits=limits)
        seconds = []
        try:
            for position in (0, *range(PROMPT_TOKENS, PROMPT_TOKENS + WARM_UPS + STEPS)):
                count = PROMPT_TOKENS if position == 0 else 1
                entry = StepEntry(request="a", position=position, tokens=(7,) * count, logit_rows=1)
                start_s = time.perf_counter()
                program.forward(Step(entries=(entry,)), None, SoloCollective())
                seconds.append(time.perf_counter() - start_s)
        finally:
            program.close()
    read_gb = layout.num_weights * (0.5 + SCALE_BYTES / GROUP_SIZE) / 1e9
    decoded = seconds[1 + WARM_UPS :]
    name = f"8 B shape, int4, decode after {PROMPT_TOKENS} tokens"
    yield Metric(name=f"{name}, speed", unit="tok/s", values=[1 / each for each in decoded])
    yield Metric(
        name=f"{name}, weights / copy",
        unit="ratio",
        values=[read_gb / each / copy_rate for each in decoded],
    )
