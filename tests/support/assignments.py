"""What a coordinator gives one peer to run."""

from __future__ import annotations

from edge.models.spec import ModelSpec
from edge.protocol.assignment import Assignment
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from tests.support.formats import uniform_format
from tests.support.plans import make_plan


def solo_assignment(
    spec: ModelSpec, limits: StepLimits, wire_rules: WireRules, *, layout: str = "solo"
) -> Assignment:
    """All of a model, alone; or its first shard in another layout."""
    return Assignment(
        session="s",
        model=spec,
        plan=make_plan(spec, layout, model="m"),
        stage=0,
        rank=0,
        weight_format=uniform_format("int4"),
        manifest_digest="d",
        weights_digest="w",
        kv_dtype="float32",
        limits=limits,
        wire_rules=wire_rules,
    )
