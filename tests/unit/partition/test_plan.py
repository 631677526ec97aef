"""What a plan may say: `validate` and `from_json` name every fault in a sentence."""

import copy
import json
import re
from typing import Any

import pytest

from edge.partition import (
    ClusterSpec,
    DeviceSpec,
    Plan,
    PlanError,
    Shard,
    Stage,
)
from tests.support.facts import plain_facts

MODEL = plain_facts(
    name="tiny",
    num_layers=6,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    ffn_columns=96,
    vocab_size=100,
    tied_embeddings=True,
    column_multiple=32,
    query_head_bytes=10,
    kv_head_bytes=10,
    ffn_column_bytes=3,
    layer_bytes=5,
    embedding_row_bytes=4,
    head_row_bytes=2,
    kv_bytes_per_token=1,
)
CLUSTER = ClusterSpec(
    devices=tuple(
        DeviceSpec(id=id, name=id, memory_bytes=10_000, threads=1) for id in ("a", "b", "c", "d")
    )
)
MIXED = Plan(  # a tensor-parallel pair, one device in the middle, one at the end
    model="tiny",
    version=3,
    stages=(
        Stage(
            layers=range(0, 2),
            shards=(
                Shard(device="a", heads=range(5), ffn_columns=range(64), vocab=range(70)),
                Shard(
                    device="b", heads=range(5, 8), ffn_columns=range(64, 96), vocab=range(70, 100)
                ),
            ),
        ),
        Stage(
            layers=range(2, 3),
            shards=(Shard(device="c", heads=range(8), ffn_columns=range(96), vocab=range(0)),),
        ),
        Stage(
            layers=range(3, 6),
            shards=(Shard(device="d", heads=range(8), ffn_columns=range(96), vocab=range(100)),),
        ),
    ),
)


def changed(path: tuple[str | int, ...], value: object) -> Plan:
    """MIXED with one value of its JSON form replaced."""
    tree: Any = copy.deepcopy(MIXED.to_json())
    spot = tree
    for step in path[:-1]:
        spot = spot[step]
    spot[path[-1]] = value
    return Plan.from_json(tree)


def problems(plan: Plan, cluster: ClusterSpec | None = CLUSTER) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        plan.validate(MODEL, cluster)
    return caught.value.problems


def test_a_good_plan_is_good() -> None:
    MIXED.validate(MODEL, CLUSTER)
    assert MIXED.devices == ("a", "b", "c", "d")


def test_shards_may_hold_no_heads_or_no_columns_or_no_vocabulary() -> None:
    full, none = (range(8), range(96), range(100)), range(0)
    stage = Stage(
        layers=range(6),
        shards=(
            Shard(device="a", heads=full[0], ffn_columns=none, vocab=none),
            Shard(device="b", heads=range(8, 8), ffn_columns=full[1], vocab=none),
            Shard(device="c", heads=none, ffn_columns=range(96, 96), vocab=full[2]),
        ),
    )
    Plan(model="tiny", version=0, stages=(stage,)).validate(MODEL, CLUSTER)


FIRST = ("stages", 0, "shards", 0)
SECOND = ("stages", 0, "shards", 1)
MIDDLE = ("stages", 1, "shards", 0)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("model",), "other", "The plan is for model 'other', not for 'tiny'."),
        (("stages",), [], "The plan has no stages."),
        (("stages", 1, "shards"), [], "Stage 1 has no shards."),
        (("stages", 1, "layers"), [2, 2], "Stage 1 has no layers."),
        (
            ("stages", 1, "layers"),
            [3, 3],
            "Stage 2 has layers from 3, where 2 would be next.",
        ),
        (
            ("stages", 0, "layers"),
            [1, 2],
            "Stage 0 has layers from 1, where 0 would be next.",
        ),
        (
            ("stages", 2, "layers"),
            [3, 7],
            "All stages: the layers end at 7, and the model has 6.",
        ),
        (
            (*SECOND, "heads"),
            [4, 8],
            "Stage 0, shard 1 (device 'b') has heads from 4, where 5 would be next.",
        ),
        (
            (*SECOND, "heads"),
            [5, 7],
            "Stage 0: the heads end at 7, and the model has 8.",
        ),
        (
            (*SECOND, "ffn_columns"),
            [32, 96],
            "Stage 0, shard 1 (device 'b') has feed-forward columns from 32,"
            " where 64 would be next.",
        ),
        (
            (*FIRST, "vocab"),
            [0, 69],
            "Stage 0, shard 1 (device 'b') has vocabulary rows from 70, where 69 would be next.",
        ),
        (
            (*MIDDLE, "vocab"),
            [0, 100],
            "Stage 1, shard 0 (device 'c') has vocabulary rows, which only the first and last"
            " stage hold.",
        ),
        (
            (*MIDDLE, "device"),
            "a",
            "Device 'a' is used twice: stage 0, shard 0 and stage 1, shard 0.",
        ),
        (
            (*MIDDLE, "device"),
            "e",
            "Device 'e' of stage 1, shard 0 is not in the cluster.",
        ),
    ],
)
def test_validate_names_the_fault(
    path: tuple[str | int, ...], value: object, expected: str
) -> None:
    assert expected in problems(changed(path, value))


def test_columns_are_cut_at_multiples_only() -> None:
    tree: Any = MIXED.to_json()
    first, second = tree["stages"][0]["shards"]
    first["ffn_columns"], second["ffn_columns"] = [0, 50], [50, 96]
    assert problems(Plan.from_json(tree)) == (
        "Stage 0, shard 1 (device 'b') has feed-forward columns from 50,"
        " which is no multiple of 32.",
    )


def test_a_shard_must_do_something() -> None:
    idle = Shard(device="d", heads=range(8, 8), ffn_columns=range(0), vocab=range(0))
    whole = Shard(device="a", heads=range(8), ffn_columns=range(96), vocab=range(100))
    plan = Plan(model="tiny", version=1, stages=(Stage(layers=range(6), shards=(whole, idle)),))
    assert problems(plan) == ("Stage 0, shard 1 (device 'd') has nothing to do.",)


def test_ranges_are_contiguous_and_versions_count_from_zero() -> None:
    odd = Shard(device="a", heads=range(0, 8, 2), ffn_columns=range(96), vocab=range(100))
    plan = Plan(model="tiny", version=-1, stages=(Stage(layers=range(6), shards=(odd,)),))
    assert problems(plan) == (
        "The plan's version is -1; versions count from 0.",
        "Stage 0, shard 0 (device 'a') has heads in steps of 2; they must be contiguous.",
    )


def test_validate_lists_every_fault_and_the_message_stays_short() -> None:
    shard = Shard(device="x", heads=range(1), ffn_columns=range(1), vocab=range(1))
    plan = Plan(
        model="tiny",
        version=1,
        stages=tuple(Stage(layers=range(6), shards=(shard,)) for _ in range(20)),
    )
    found = problems(plan)
    assert len(found) > 60
    with pytest.raises(PlanError, match=rf"And {len(found) - 16} more problems\.$"):
        plan.validate(MODEL, CLUSTER)


def test_without_a_cluster_any_device_is_good() -> None:
    changed((*MIDDLE, "device"), "e").validate(MODEL, None)


def test_json_comes_back_equal() -> None:
    assert Plan.from_json(json.loads(json.dumps(MIXED.to_json()))) == MIXED


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("version",), True, "version must be a whole number from 0 to 2,147,483,647, not true."),
        (("version",), 1.0, "version must be a whole number from 0 to 2,147,483,647, not 1.0."),
        (("version",), -1, "version must be a whole number from 0 to 2,147,483,647, not -1."),
        (("version",), None, "version must be a whole number from 0 to 2,147,483,647, not null."),
        (
            ("version",),
            b"1",
            "version must be a whole number from 0 to 2,147,483,647, not a bytes.",
        ),
        (("stages",), {}, "stages must be a list, not an object."),
        (("stages", 0), 7, "stages[0] must be an object, not 7."),
        (("stages", 0, "shards"), "ab", "stages[0].shards must be a list, not 'ab'."),
        (
            (*SECOND, "heads"),
            [6, 5],
            "stages[0].shards[1].heads starts at 6, after its stop at 5.",
        ),
        (
            (*SECOND, "heads"),
            [1, 2, 3],
            "stages[0].shards[1].heads must be [start, stop] in whole numbers from 0 to"
            " 2,147,483,647, not [1, 2, 3].",
        ),
        (
            (*SECOND, "vocab"),
            [0, 2**31],
            "stages[0].shards[1].vocab must be [start, stop] in whole numbers from 0 to"
            " 2,147,483,647, not [0, 2147483648].",
        ),
        (
            (*SECOND, "device"),
            "",
            "stages[0].shards[1].device must be a string of 1 to 1024 characters without line"
            " breaks or control characters, not ''.",
        ),
        (
            ("model",),
            "m\n" * 50,
            "model must be a string of 1 to 1024 characters without line breaks or control"
            " characters, not " + repr("m\n" * 20) + "….",
        ),
        (("stages",), [{}] * 1025, "stages has 1,025 items; 1,024 is the most."),
        (("wheels",), 4, "The plan has 1 unknown field(s): 'wheels'."),
    ],
)
def test_from_json_names_the_fault(
    path: tuple[str | int, ...], value: object, expected: str
) -> None:
    with pytest.raises(PlanError) as caught:
        changed(path, value)
    assert caught.value.problems == (expected,)


def test_from_json_survives_values_that_cannot_be_printed() -> None:
    # Python refuses to print integers of thousands of digits, and lists nested this deep.
    bottomless: list[Any] = []
    for _ in range(100_000):
        bottomless = [bottomless]
    for value, alone, in_a_list in (
        (10**5000, "an enormous number", "[0, an enormous number]"),
        (bottomless, "a list of 1", "a list of 2"),
    ):
        with pytest.raises(PlanError, match=rf"^version must be .*, not {alone}\.$"):
            changed(("version",), value)
        with pytest.raises(PlanError, match=rf"heads must be .*, not {re.escape(in_a_list)}\.$"):
            changed((*FIRST, "heads"), [0, value])


def test_from_json_lists_every_fault() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json({"model": 1, "stages": [{"layers": [0, 1], "shards": [{"device": "a"}]}]})
    assert caught.value.problems == (
        "The plan lacks the field 'version'.",
        "model must be a string of 1 to 1024 characters without line breaks or control"
        " characters, not 1.",
        "stages[0].shards[0] lacks the field 'heads'.",
        "stages[0].shards[0] lacks the field 'ffn_columns'.",
        "stages[0].shards[0] lacks the field 'vocab'.",
    )


def test_from_json_of_no_object_at_all() -> None:
    with pytest.raises(PlanError, match=r"^The plan must be an object, not \[\]\.$"):
        Plan.from_json([])


def test_from_json_bounds_the_shards_of_all_stages_together() -> None:
    stage = {"layers": [0, 1], "shards": [None] * 1000}
    with pytest.raises(PlanError, match="2,000 shards; 1,024 is the most"):
        Plan.from_json({"model": "m", "version": 1, "stages": [stage, stage]})
