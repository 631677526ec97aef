"""What a shard takes beside its weights is bounded beforehand, whichever part of a model it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge.memory.shard_memory import most_overhead, with_streamed
from edge.memory.step_memory import (
    Widths,
    activation_bytes,
    buffer_bytes,
    head_load_bytes,
    held_tokens,
    load_bytes,
    most_logits,
    stacked_experts_fit,
)
from edge.models.experts import Experts
from edge.models.spec import LayerSpec
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype
from edge.weights.layout import shard_layout, whole_layout
from tests.support.formats import uniform_format
from tests.support.plans import LAYOUTS, make_plan
from tests.support.specs import plain_layer, plain_spec, spec_of

SPEC = plain_spec(
    hidden_size=64, num_heads=6, head_size=16, ffn_columns=96, vocab_size=100, context_tokens=256
)
LIMITS = StepLimits(context_tokens=256, chunk_tokens=64, requests=16, cached_tokens=512)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("streamed", [0, 1])
def test_no_shard_of_any_plan_takes_more_than_was_planned(name: str, streamed: int) -> None:
    plan = make_plan(SPEC, name, model="m")
    shards = [(s, r) for s, stage in enumerate(plan.stages) for r in range(len(stage.shards))]
    limits = replace(LIMITS, disk_tokens=512, observes=True)
    most = most_overhead(
        SPEC, limits, may_split=len(shards) > 1, stream=bool(streamed), kv_dtype="int8"
    )
    for stage, rank in shards:
        layout = shard_layout(
            SPEC, with_streamed(plan, stage, rank, streamed), stage=stage, rank=rank
        )
        widths = Widths.of_shard(SPEC, layout, kv_dtype="int8", observes=True)
        assert 0 < buffer_bytes(widths, limits) <= most


@pytest.mark.parametrize("limit", ["context_tokens", "chunk_tokens", "requests"])
def test_larger_steps_take_more(limit: str) -> None:
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    widths = Widths.of_shard(SPEC, layout)
    larger = replace(LIMITS, **{limit: 20 * getattr(LIMITS, limit)})
    assert buffer_bytes(widths, larger) > buffer_bytes(widths, LIMITS)


def test_sums_of_inputs_are_counted_where_they_are_asked_for() -> None:
    """For each layer the inputs of four matrices, of 64, 96, 64 and 96 columns; and of the head."""
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    widths = Widths.of_shard(SPEC, layout)
    observed = Widths.of_shard(SPEC, layout, observes=True)
    more = buffer_bytes(observed, LIMITS) - buffer_bytes(widths, LIMITS)
    assert more == 4 * (SPEC.num_layers * 2 * (64**2 + 96**2) + 64**2)


def test_what_is_known_to_be_there_is_counted() -> None:
    """Against the numbers: logits of every request, attention scores of a chunk."""
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    widths = Widths.of_shard(SPEC, layout)
    assert most_logits(widths, LIMITS) == 64 * 100, "an evaluated chunk; 16 requests have fewer"
    scores = 6 * 64 * 256
    assert buffer_bytes(widths, LIMITS) > 4 * (scores + 2 * 64 * 100 + 4 * 64 * 64)


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "is_in_tiles"),
    [
        ({}, "float32", True),
        ({}, "int8", True),
        ({"has_sinks": True}, "float32", True),
        ({}, "int4", True),
        ({"window": 64}, "float32", True),
        ({"soft_cap": 20.0}, "float32", True),
        ({"sees_pictures": True}, "float32", True),
        ({"head_size": 1024}, "float32", False),
    ],
)
def test_attention_in_tiles_takes_nothing_for_scores(
    changes: dict[str, Any], kv_dtype: KvDtype, is_in_tiles: bool
) -> None:
    """Only turned queries, and results of each part of the keys, of the forms that the operator of
    kernels/native computes."""
    form = {"num_heads": 6, "num_kv_heads": 6, "head_size": 16, "ffn_columns": 96, **changes}
    kind = plain_layer(**form)
    spec = spec_of([kind, kind], hidden_size=64, vocab_size=100, context_tokens=8192)
    layout = whole_layout(spec)
    limits = replace(LIMITS, context_tokens=8192, chunk_tokens=64)
    had = activation_bytes(Widths.of_shard(spec, layout, kv_dtype=kv_dtype), limits)
    tiled = Widths.of_shard(spec, layout, kv_dtype=kv_dtype, has_tiles=True)
    found = activation_bytes(tiled, limits)
    if not is_in_tiles:
        assert found == had
        return
    turned, parts = 64 * 6 * 16, 64 * 6 * (2 if "window" in changes else 8192 // 512) * (2 + 16)
    unrounded = 2 * 64 * 6 * 16 if kv_dtype == "int4" else 0
    assert had - found == 4 * (64 * 6 * 8192 - turned - parts - unrounded)


def test_a_block_of_a_prompt_on_its_way_to_disk_is_counted() -> None:
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    kept = replace(LIMITS, disk_tokens=512)
    rows: dict[KvDtype, int] = {"float32": 4 * 16, "int8": 16, "int4": 8}
    for kv_dtype, row_bytes in rows.items():
        widths = Widths.of_shard(SPEC, layout, kv_dtype=kv_dtype)
        block_bytes = 64 * 4 * 3 * 2 * row_bytes
        assert buffer_bytes(widths, kept) - buffer_bytes(widths, LIMITS) == block_bytes


def test_packing_the_head_takes_what_it_is_packed_from() -> None:
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    assert head_load_bytes(layout, uniform_format("int4", 32, "fast")) == 100 * 64 // 2 + 100 * 8
    assert head_load_bytes(layout, uniform_format("float32", 32, "fast")) == 4 * 100 * 64


def test_loading_a_whole_takes_its_scales_and_the_largest_matrix() -> None:
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    sizes = [64 * (96 + 2 * 48), 96 * 64, 64 * 2 * 96, 96 * 64] * 4 + [100 * 64]
    assert layout.num_weights == sum(sizes)
    assert load_bytes(layout, uniform_format("int4", 32, "fast")) == (
        4 * sum(sizes) // 32 + max(sizes) // 2
    )
    assert load_bytes(layout, uniform_format("float32", 32, "fast")) == 4 * max(sizes)


def test_experts_of_a_layer_may_be_packed_as_one() -> None:
    part = Experts(num_experts=5, top_k=2, columns=64, activation="silu", renormalized=True)
    mixer = plain_layer(num_heads=2, num_kv_heads=1, head_size=16).mixer
    spec = spec_of([LayerSpec(mixer=mixer, feed_forward=part)], hidden_size=64, vocab_size=40)
    layout = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)
    form = uniform_format("int4", 32, "fast")
    one, scales = 2 * 64 * 64 // 2, 4 * layout.num_weights // 32
    assert load_bytes(layout, form, stacks_experts=False) == scales + one
    assert load_bytes(layout, form) == scales + 5 * one


def test_each_thread_of_a_node_of_all_experts_has_results_of_its_own() -> None:
    part = Experts(num_experts=48, top_k=4, columns=768, activation="silu", renormalized=True)
    assert stacked_experts_fit(part, 1536, threads=2)
    assert not stacked_experts_fit(part, 1536, threads=8)


def test_what_scales_are_chosen_by_is_counted_where_codes_take_less() -> None:
    layout = shard_layout(SPEC, make_plan(SPEC, "solo", model="m"), stage=0, rank=0)
    widths = Widths.of_shard(SPEC, layout, kv_dtype="int4")
    rows = 2 * 4 * 3
    few, many = replace(LIMITS, cached_tokens=64), replace(LIMITS, cached_tokens=512)
    assert buffer_bytes(widths, few) - buffer_bytes(widths, many) == 64 * rows * (4 * 16 - 8)


def test_requests_hold_whole_pages() -> None:
    """Rows of 64 bytes, 64 in a page; runs that begin at pages, or anywhere."""
    aligned, other = replace(LIMITS, context_tokens=256), replace(LIMITS, context_tokens=250)

    def held(tokens: int, limits: StepLimits, kv_dtype: KvDtype = "float32") -> int:
        return held_tokens(tokens, SPEC, limits, kv_dtype)

    assert [held(n, aligned) for n in (1, 64, 65, 256)] == [64, 64, 128, 256]
    assert [held(n, other) for n in (1, 64, 65, 250)] == [128, 128, 192, 250]
    assert held(1, aligned, "int4") == 256, "no more than the whole context"
