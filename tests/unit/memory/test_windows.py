"""What layers keep that have a sliding window, and whom all shards have room for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import pytest

from edge.kernels.kv_cache.cache_size import kept_tokens
from edge.memory.model_sizes import model_facts
from edge.memory.step_memory import cache_token_bytes, window_bytes
from edge.memory.windows import cut_end, kv_memory, room_token_bytes, with_windows
from edge.partition import Plan, Shard, Workload, memory_use
from edge.planning.load_options import LoadOptions
from edge.weights.formats import weight_format
from edge.weights.layout import shard_layout
from tests.support.plans import LAYOUTS, make_plan
from tests.support.specs import plain_spec

SPEC = plain_spec(
    num_layers=6,
    num_heads=6,
    num_kv_heads=3,
    head_size=16,
    windows=(8, 8, None, 8, 8, 8),
    context_tokens=400,
)
LIMITS = replace(
    LoadOptions(context_tokens=300, concurrency=2).limits(SPEC), cached_tokens=600, requests=9
)


@pytest.mark.parametrize(
    ("window", "head_size", "chunk_tokens", "kept"),
    [(512, 256, 256, 639), (128, 64, 256, 383), (4096, 128, 256, 4223), (8, 16, 32, 23)],
)
def test_rows_move_by_what_products_sum_up_at_once(
    window: int, head_size: int, chunk_tokens: int, kept: int
) -> None:
    """Gemma 3, gpt-oss, OLMo 3; and a model so small that all its rows are one block."""
    assert kept_tokens(window, head_size, chunk_tokens) == kept


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_shard_has_room_for_what_scheduling_admits(name: str) -> None:
    spec = with_windows(SPEC, LIMITS)
    plan = make_plan(spec, name, model="m")
    facts = model_facts(spec, weight_format(spec, "float32"), name="m", embedding_itemsize=4)
    workload = Workload(reserved_tokens=LIMITS.cached_tokens, windows=LIMITS.windows)
    uses = memory_use(plan, facts, workload)
    found = kv_memory(spec, LIMITS, "float32")
    assert found is not None
    memory, held = found
    draw, seats = random.Random(4), Counter(map(attrgetter("device"), all_shards(plan)))
    for stage, each in enumerate(plan.stages):
        for rank, shard in enumerate(each.shards):
            layout = shard_layout(spec, plan, stage=stage, rank=rank)
            token_bytes = cache_token_bytes(layout, "float32")
            one_window, room = window_bytes(layout, "float32"), LIMITS.windows
            kept_bytes = LIMITS.cached_tokens * room_token_bytes(spec, layout, "float32")
            if seats[shard.device] == 1:
                use = uses[shard.device]
                assert use.kv_bytes + use.state_bytes == kept_bytes + room * one_window
            (kept,) = {mixer.kept_tokens for mixer in layout.caches.values()} - {None} or {1}
            assert kept is not None
            for _ in range(200):
                lengths = admitted(draw, held, memory)
                taken = sum(
                    each * token_bytes + one_window * min(each, kept) // kept for each in lengths
                )
                assert taken <= kept_bytes + room * one_window


def all_shards(plan: Plan) -> list[Shard]:
    return [shard for stage in plan.stages for shard in stage.slices]


def admitted(draw: random.Random, held: Callable[[int, int], int], memory: int) -> list[int]:
    """Lengths of requests that all fit, short and long ones."""
    lengths: list[int] = []
    while True:
        lengths.append(draw.choice([draw.randint(1, 300), draw.randint(1, 30)]))
        if sum(held(each, each) for each in lengths) > memory:
            return lengths[:-1]


def test_a_load_decides_by_its_context() -> None:
    spec = replace(SPEC, context_tokens=4000)
    for context, windows in ((202, 0), (203, 1)):
        assert LoadOptions(context_tokens=context).limits(spec).windows == windows, "135 are kept"
    assert LoadOptions(context_tokens=4000).limits(spec).windows == 1
    assert LoadOptions(context_tokens=4000, concurrency=3).limits(spec).windows == 3
    assert LoadOptions(context_tokens=4000).limits(spec, may_keep_windows=False).windows == 0
    for options in (
        LoadOptions(context_tokens=4000, kv_dtype="int4"),
        LoadOptions(context_tokens=4000, observes=True),
        LoadOptions(context_tokens=4000, keeps_all_tokens=True),
    ):
        assert options.limits(spec).windows == 0
    assert cut_end(spec) is None
    every = plain_spec(windows=(8, 8), num_layers=2, context_tokens=4000)
    assert LoadOptions(context_tokens=4000).limits(every).windows == 2, "one for a saved copy"
