"""What a shard takes of its peer's memory."""

from __future__ import annotations

from dataclasses import replace

from edge.memory.model_sizes import model_facts
from edge.memory.shard_memory import shard_use
from edge.offload import Manifest
from edge.partition import Workload, memory_use
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from tests.support.assignments import solo_assignment
from tests.support.plans import make_plan
from tests.support.specs import plain_spec

SPEC = plain_spec()
LIMITS = StepLimits(context_tokens=64, chunk_tokens=8, requests=2, cached_tokens=64)


def test_of_a_device_with_two_seats_each_session_takes_its_own_part() -> None:
    rules = WireRules(sums=(WireRule(),) * 2, hops=(WireRule(),))
    plan = make_plan(SPEC, "pipeline_2", model="m", devices=["a", "a"])
    first = replace(solo_assignment(SPEC, LIMITS, rules, layout="pipeline_2"), plan=plan)
    manifest = Manifest(tensors=(), total_bytes=0)
    uses = [shard_use(replace(first, stage=stage), manifest) for stage in (0, 1)]
    facts = model_facts(SPEC, first.weight_format, name="m", embedding_itemsize=0)
    both = memory_use(plan, facts, Workload(prompt_tokens=64, output_tokens=0))["a"]
    assert sum(use.weight_bytes for use in uses) == both.weight_bytes
    assert sum(use.kv_bytes for use in uses) == both.kv_bytes
