"""What a shard takes of its peer's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.memory.model_sizes import model_facts
from edge.memory.shard_memory import rebalance_options, shard_use, with_streamed
from edge.offload import Manifest
from edge.partition import Workload, memory_use
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from tests.support.plans import make_plan, solo_assignment
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


@pytest.mark.parametrize(
    ("layers", "planned", "numbers"), [(4, 0, 5), (4, 3, 2), (127, 0, 128), (1000, 7, 126)]
)
@pytest.mark.parametrize("host_bytes", [None, 1 << 14], ids=["", "host"])
def test_other_numbers_of_layers_on_disk_are_counted_as_if_planned(
    layers: int, planned: int, numbers: int, host_bytes: int | None
) -> None:
    rules = WireRules(sums=(WireRule(),), hops=())
    assignment = solo_assignment(plain_spec(num_layers=layers), LIMITS, rules)
    assignment = replace(assignment, plan=with_streamed(assignment.plan, 0, 0, planned))
    manifest = Manifest(tensors=(), total_bytes=0)
    found = rebalance_options(assignment, manifest, host_bytes=host_bytes)
    counts = list(found.uses)
    assert (found.planned, counts[0], counts[-1], len(counts)) == (
        planned, planned, layers, numbers,
    )  # fmt: skip
    assert counts == sorted(counts)
    for count in (counts[0], counts[1], counts[-1]):
        alone = shard_use(assignment, manifest, host_bytes=host_bytes, streamed=count)
        assert found.uses[count] == alone
