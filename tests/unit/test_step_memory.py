"""What a shard takes beside its weights is bounded beforehand, whichever part of a model it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.backends.base import StepLimits
from edge.formats import weight_format
from edge.layout import shard_layout
from edge.models.spec import ModelSpec
from edge.reservation import most_beside, with_streamed
from edge.step_memory import Widths, buffer_bytes, head_load_bytes, load_bytes, most_logits
from tests.support.plans import LAYOUTS, make_plan

SPEC = ModelSpec(
    family="llama",
    num_layers=4,
    hidden_size=64,
    num_heads=6,
    num_kv_heads=3,
    head_size=16,
    ffn_columns=96,
    vocab_size=100,
    context_tokens=256,
    norm_epsilon=1e-6,
    activation="silu",
    inverse_frequencies=(1.0,) * 8,
    windows=(None,) * 4,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    query_key_norm=False,
    tied_embeddings=False,
)
LIMITS = StepLimits(context_tokens=256, chunk_tokens=64, requests=16, cached_tokens=512)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("streamed", [0, 1])
def test_no_shard_of_any_plan_takes_more_than_was_planned(name: str, streamed: int) -> None:
    plan = make_plan(SPEC, name, model="m")
    shards = [(s, r) for s, stage in enumerate(plan.stages) for r in range(len(stage.shards))]
    most = most_beside(SPEC, LIMITS, may_split=len(shards) > 1, stream=bool(streamed))
    for stage, rank in shards:
        layout = shard_layout(
            SPEC, with_streamed(plan, stage, rank, streamed), stage=stage, rank=rank
        )
        widths = Widths.of_shard(SPEC, layout)
        assert 0 < buffer_bytes(widths, LIMITS) <= most


@pytest.mark.parametrize("limit", ["context_tokens", "chunk_tokens", "requests"])
def test_larger_steps_take_more(limit: str) -> None:
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    widths = Widths.of_shard(SPEC, layout)
    larger = replace(LIMITS, **{limit: 20 * getattr(LIMITS, limit)})
    assert buffer_bytes(widths, larger) > buffer_bytes(widths, LIMITS)


def test_what_is_known_to_be_there_is_counted() -> None:
    """Against the numbers: logits of every request, attention scores of a chunk."""
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    widths = Widths.of_shard(SPEC, layout)
    assert most_logits(widths, LIMITS) == 64 * 100, "an evaluated chunk; 16 requests have fewer"
    scores = 6 * 64 * 256
    assert buffer_bytes(widths, LIMITS) > 4 * (scores + 2 * 64 * 100 + 4 * 64 * 64)


def test_packing_the_head_takes_what_it_is_packed_from() -> None:
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    assert head_load_bytes(layout, weight_format("int4", 32, "fast")) == 100 * 64 // 2 + 100 * 8
    assert head_load_bytes(layout, weight_format("float32", 32, "fast")) == 4 * 100 * 64


def test_loading_a_whole_takes_its_scales_and_the_largest_matrix() -> None:
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    sizes = [64 * (96 + 2 * 48), 96 * 64, 64 * 2 * 96, 96 * 64] * 4 + [100 * 64]
    assert layout.num_weights == sum(sizes)
    assert load_bytes(layout, weight_format("int4", 32, "fast")) == (
        4 * sum(sizes) // 32 + max(sizes) // 2
    )
    assert load_bytes(layout, weight_format("float32", 32, "fast")) == 4 * max(sizes)
