"""What a peer reads of an assignment is what was written, and nothing else is let in."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edge.errors import ProtocolError
from edge.protocol.assignment import Assignment
from edge.protocol.fields import from_json, to_json
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from edge.weights.formats import ACCURACIES, BLOCK_SIZES
from tests.support.formats import uniform_format
from tests.support.plans import make_plan
from tests.support.specs import plain_spec

SPEC = plain_spec(
    hidden_size=20,
    num_heads=6,
    head_size=4,
    ffn_columns=15,
    context_tokens=32,
    inverse_frequencies=(1.0, 0.1),
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    query_key_norm=True,
)


def assignment(dtype: str = "int4", block_size: int = 32, accuracy: str = "fast") -> Assignment:
    return Assignment(
        session="s",
        model=SPEC,
        plan=make_plan(SPEC, "mixed_2_then_3", model="m"),
        stage=1,
        rank=2,
        weight_format=uniform_format(dtype, block_size, accuracy),
        manifest_digest="d",
        weights_digest="w",
        kv_dtype="int8",
        limits=StepLimits(context_tokens=32, chunk_tokens=16, requests=2, cached_tokens=64),
        wire_rules=WireRules(
            sums=(WireRule(), WireRule(format="int8", above_bytes=5)),
            hops=(WireRule(format="float16"),),
        ),
    )


@pytest.mark.parametrize("accuracy", ACCURACIES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_it_arrives_as_it_was_sent(dtype: str, block_size: int, accuracy: str) -> None:
    sent = assignment(dtype, block_size, accuracy)
    assert from_json(Assignment, json.loads(json.dumps(to_json(sent)))) == sent


def test_the_sampler_alone_has_a_further_head() -> None:
    model = replace(SPEC, has_further_head=True)
    sent = replace(assignment(), model=model, rank=0)
    assert from_json(Assignment, json.loads(json.dumps(to_json(sent)))) == sent
    assert sent.further is not None
    assert sent.further.weight_format.name == "int8"
    assert replace(sent, weight_format=uniform_format("float32")).further != sent.further
    for other in (replace(sent, rank=1), replace(sent, stage=0), assignment()):
        assert other.further is None
    with pytest.raises(ValueError, match="not a model by itself"):
        replace(sent, model=sent.further.spec)


FORMAT = uniform_format("int4").to_json()


def of_kind(**changes: object) -> dict[str, Any]:
    (kind,) = FORMAT["kinds"]
    return {**FORMAT, "kinds": [kind | changes]}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight_format", FORMAT | {"accuracy": "exact"}, "'exact' is not one of fast, high"),
        ("weight_format", FORMAT | {"accuracy": None}, "accuracy None is not one of"),
        ("weight_format", FORMAT | {"name": ""}, "without a name"),
        ("weight_format", FORMAT | {"name": "int4\n"}, "without a name"),
        ("weight_format", of_kind(kind="clouds"), "matrices are 'clouds', not floats or"),
        ("weight_format", of_kind(kind=[]), "matrices are"),
        ("weight_format", of_kind(code_bits=5), "5 bits per weight are not supported"),
        ("weight_format", of_kind(block_size=48), "blocks of 48 weights are not supported"),
        ("weight_format", of_kind(block_size=32.0), "numbers are not whole"),
        ("weight_format", of_kind(kind="floats"), "unknown or missing fields"),
        ("weight_format", FORMAT | {"more": 1}, "unknown or missing fields"),
        ("weight_format", {"name": "int4", "kinds": []}, "unknown or missing fields"),
        ("weight_format", FORMAT | {"kinds": []}, "1 to 16 kinds"),
        ("weight_format", FORMAT | {"kinds": FORMAT["kinds"] * 17}, "1 to 16 kinds"),
        ("weight_format", FORMAT | {"kinds": {}}, "1 to 16 kinds"),
        ("weight_format", FORMAT | {"rules": {}}, "at most 1024 rules"),
        ("weight_format", FORMAT | {"rules": [["head", None, 0]] * 1025}, "at most 1024 rules"),
        ("weight_format", FORMAT | {"rules": [["head", None]]}, "must have three parts"),
        ("weight_format", FORMAT | {"rules": [["", None, 0]]}, "an unknown role"),
        ("weight_format", FORMAT | {"rules": [["head", -1, 0]]}, "for the grade -1"),
        ("weight_format", FORMAT | {"rules": [["head", True, 0]]}, "for the grade True"),
        ("weight_format", FORMAT | {"rules": [["head", 0, 1]]}, "without the kind 1"),
        ("stage", 2, "the plan has no stage 2"),
        ("rank", 3, "has no rank 3"),
    ],
)
def test_a_value_that_no_coordinator_sends(name: str, value: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        from_json(Assignment, to_json(assignment()) | {name: value})


EXACT = {"format": "float32", "above_bytes": 0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"sums": [EXACT], "hops": []}, "wire rules for 1 stages; the plan has 2"),
        ({"sums": [EXACT] * 2, "hops": [EXACT] * 2}, "wire rules for 2 stages"),
        ({"sums": [EXACT] * 2, "hops": "none"}, "hops: Expected `array`"),
        ({"sums": [EXACT] * 2, "hops": [EXACT | {"format": "int3"}]}, r"\[0\].format: Invalid"),
        ({"sums": [EXACT] * 2, "hops": [EXACT | {"format": ["int8"]}]}, r"\[0\].format: Exp"),
        (
            {"sums": [EXACT] * 2, "hops": [EXACT | {"above_bytes": -1}]},
            r"hops\[0\].above_bytes: Expected `int` >= 0",
        ),
        ({"sums": [EXACT] * 2, "hops": [{"format": "int8"}]}, "above_bytes"),
        ({"sums": [EXACT] * 2, "hops": ["int8"]}, r"hops\[0\]: Expected `object`"),
        ({"sums": [EXACT] * 2}, "hops"),
    ],
)
def test_wire_rules_that_no_coordinator_sends(value: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        from_json(Assignment, to_json(assignment()) | {"wire_rules": value})
