"""Tokens of keys and values that a plan has memory and disk for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edge.errors import CapacityError
from edge.memory.model_sizes import model_facts
from edge.memory.step_memory import state_bytes
from edge.models.linear_attention import LinearAttention
from edge.partition import ClusterSpec, Plan, Shard, Stage, Workload, memory_use
from edge.planning.kv_limits import kv_limits, longest_tokens, with_kv_memory, with_less_kv_memory
from edge.planning.load_options import STATES_AT_ONCE, LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step import StepLimits
from edge.weights.layout import shard_layout
from tests.support.checkpoints import TinyCheckpoint
from tests.support.formats import uniform_format
from tests.support.peer_infos import peer_info
from tests.support.plans import make_plan
from tests.support.specs import plain_spec, shape

Make = Callable[..., TinyCheckpoint]

SPEC = plain_spec()
FORMAT = uniform_format("float32", 32, "fast")
FACTS = model_facts(SPEC, FORMAT, name="m", embedding_itemsize=4)
LAYER_BYTES = FACTS.kinds[0].token_bytes
"""Of one token in one layer."""


def peer(
    name: str, *, kv_memory: int | None = None, kv_disk: int = 0, free: int = 1 << 40
) -> PeerInfo:
    return peer_info(
        name,
        free_bytes=free,
        model_free_bytes=free,
        kv_memory_bytes=kv_memory,
        kv_disk_bytes=kv_disk,
    )


def pipeline(*layers: int) -> Plan:
    first, stages = 0, []
    for number, count in enumerate(layers):
        shard = Shard(
            device="abc"[number],
            heads=range(shape(SPEC).num_heads),
            ffn_columns=range(shape(SPEC).ffn_columns),
            vocab=range(SPEC.vocab_size),
        )
        stages.append(Stage(layers=range(first, first + count), shards=(shard,)))
        first += count
    return Plan(model="m", version=0, stages=tuple(stages))


def limits(context: int, concurrency: int = 1) -> StepLimits:
    return StepLimits(
        context_tokens=context, chunk_tokens=8, requests=4, cached_tokens=context * concurrency
    )


def found_limits(
    wished: StepLimits, plan: Plan, peers: list[PeerInfo], *, buffer_bytes: int = 0
) -> StepLimits:
    cluster = ClusterSpec(devices=tuple(each.device(buffer_bytes=buffer_bytes) for each in peers))
    return kv_limits(wished, plan, FACTS, cluster, peers)


def test_without_limits_all_is_in_memory() -> None:
    found = found_limits(limits(100, 3), pipeline(4), [peer("a")])
    assert (found.cached_tokens, found.disk_tokens) == (300, 0)
    assert not found.exceeds_memory


def test_the_shard_with_least_room_decides() -> None:
    plan = pipeline(1, 3)
    peers = [
        peer("a", kv_memory=90 * LAYER_BYTES, kv_disk=150 * LAYER_BYTES),
        peer("b", kv_memory=3 * 80 * LAYER_BYTES, kv_disk=3 * 170 * LAYER_BYTES),
    ]
    found = found_limits(limits(80), plan, peers)
    assert (found.cached_tokens, found.disk_tokens) == (80, 150)
    found = found_limits(limits(79), plan, peers)
    assert (found.cached_tokens, found.disk_tokens) == (79, 150)


def test_memory_that_is_free_beside_the_weights() -> None:
    plan = pipeline(4)
    weights = memory_use(plan, FACTS, Workload(prompt_tokens=1, output_tokens=0))["a"].weight_bytes
    free = weights + 4 * 50 * LAYER_BYTES + 5
    found = found_limits(limits(100), plan, [peer("a", kv_disk=1 << 40, free=free)])
    assert (found.cached_tokens, found.disk_tokens) == (50, 400)
    assert found.exceeds_memory
    assert longest_tokens(found.cached_tokens, plan, FACTS) == 200
    steps = 4 * 10 * LAYER_BYTES
    peers = [peer("a", kv_disk=1 << 40, free=free)]
    assert found_limits(limits(100), plan, peers, buffer_bytes=steps).cached_tokens == 40


@pytest.mark.parametrize(
    ("memory", "disk", "longest"), [(30, 1000, 120), (30, 70, 70), (30, 20, 30), (0, 1000, 0)]
)
def test_a_context_for_which_there_is_no_room(memory: int, disk: int, longest: int) -> None:
    peers = [peer("a", kv_memory=4 * memory * LAYER_BYTES, kv_disk=4 * disk * LAYER_BYTES)]
    with pytest.raises(CapacityError, match=rf"context of 121 .* so {longest} is the longest"):
        found_limits(limits(121), pipeline(4), peers)
    if longest:
        found_limits(limits(longest), pipeline(4), peers)


def test_what_is_planned_for() -> None:
    options = LoadOptions(context_tokens=100, concurrency=2)
    sizes = LoadSizes.of(options, SPEC)
    assert with_kv_memory(sizes, FACTS, [peer("a")]) == sizes
    peers = [peer("a"), peer("b", kv_memory=4 * 70 * LAYER_BYTES + 1)]
    planned = with_kv_memory(sizes, FACTS, peers)
    assert planned.kv_tokens == 70
    assert planned.workload.cached_tokens == 70
    assert planned.limits == options.limits(SPEC)
    wide = [peer("b", kv_memory=1 << 40)]
    assert with_kv_memory(sizes, FACTS, wide).workload.cached_tokens == 200


def test_less_is_tried_where_all_have_a_disk() -> None:
    options = LoadOptions(context_tokens=100, concurrency=8)
    sizes = LoadSizes.of(options, SPEC)
    tried = with_less_kv_memory(sizes, [peer("a", kv_disk=1), peer("b", kv_disk=1)])
    assert [each.kv_tokens for each in tried] == [400, 200, 100]
    assert not list(with_less_kv_memory(sizes, [peer("a", kv_disk=1), peer("b")]))


def test_states_take_memory_before_tokens_do(tiny_checkpoint: Make) -> None:
    """Of as many requests as may be under way, as many copies and two more, for guesses and for the
    prefix cache; each part of the heads has its part of them. Copies are not moved to disk, and
    there are fewer where tokens would be."""
    spec = tiny_checkpoint("qwen3_5").spec
    wished = LoadOptions(context_tokens=64, concurrency=2).limits(spec)
    assert (wished.requests, wished.states) == (STATES_AT_ONCE, 2 * STATES_AT_ONCE + 2)
    many = LoadOptions(context_tokens=64, concurrency=9).limits(spec)
    assert (many.requests, many.states) == (9, 20)
    assert LoadOptions(observes=True).limits(spec).saved_states == 0
    facts = model_facts(spec, FORMAT, name="qwen3_5", embedding_itemsize=4)
    linear = spec.layer(0).mixer
    assert isinstance(linear, LinearAttention)
    workload = Workload(prompt_tokens=1, output_tokens=0, states=wished.requests)
    plan = make_plan(spec, "tensor_3", model="qwen3_5", devices="abc")
    uses = memory_use(plan, facts, workload)
    states = wished.requests * 3 * 4 * linear.state_values
    assert sum(each.state_bytes for each in uses.values()) == states
    layouts = [shard_layout(spec, plan, stage=0, rank=rank) for rank in range(3)]
    counted = [wished.requests * state_bytes(layout, "float32") for layout in layouts]
    assert counted == [each.state_bytes for each in uses.values()]

    solo, one = make_plan(spec, "solo", model="qwen3_5", devices="a"), states // wished.requests
    token_bytes = facts.kinds[1].token_bytes
    tight = peer(
        "a", kv_memory=2 * (states + one) + 100 * token_bytes, kv_disk=states + 40 * token_bytes
    )
    cluster = ClusterSpec(devices=(tight.device(buffer_bytes=0),))
    found = kv_limits(wished, solo, facts, cluster, [tight])
    assert (found.cached_tokens, found.disk_tokens) == (100, 40)
    sizes = LoadSizes.of(LoadOptions(context_tokens=64, concurrency=2), spec)
    assert with_kv_memory(sizes, facts, [tight]).kv_tokens == 100
    tighter = peer("a", kv_memory=states + 3 * one + 90 * token_bytes)
    planned = with_kv_memory(sizes, facts, [tighter])
    assert (planned.kv_tokens, planned.limits.saved_states) == (90, 1)
    assert planned.workload.states == wished.requests + 3
