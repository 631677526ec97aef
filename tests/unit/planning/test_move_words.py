"""What is told of a move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge.partition import ClusterSpec, DeviceSpec
from edge.planning.move_words import move_reason
from tests.support.known_rates import PROFILE

NAMES = {"1": "desk", "2": "attic", "3": "shed"}


def planned(*parts: tuple[str, range], slowed: dict[str, float] | None = None) -> Any:
    stages = [
        SimpleNamespace(layers=layers, shards=[SimpleNamespace(device=id) for id in ids])
        for ids, layers in parts
    ]
    devices = tuple(
        DeviceSpec(id=id, name=id, memory_bytes=1, threads=1, rates=PROFILE.rates) for id in "12"
    )
    cluster = ClusterSpec(devices=devices).slowed_by(slowed or {})
    devices_used = {id for ids, _layers in parts for id in ids}
    return SimpleNamespace(
        plan=SimpleNamespace(devices=devices_used, stages=stages), cluster=cluster
    )


@pytest.mark.parametrize(
    ("before", "to", "factors", "told"),
    [
        (
            planned(("1", range(8)), ("2", range(8, 12))),
            planned(("1", range(2)), ("2", range(2, 12))),
            {"1": 4.12},
            "desk is busy (4.1 x slower): attic takes layers 2-7",
        ),
        (
            planned(("2", range(12)), slowed={"1": 4.0}),
            planned(("1", range(6)), ("2", range(6, 12))),
            {},
            "desk is no longer busy: desk takes layers 0-5",
        ),
        (
            planned(("1", range(4)), ("2", range(4, 8)), slowed={"1": 2.0}),
            planned(("2", range(1)), ("3", range(1, 7)), ("2", range(7, 8))),
            {"1": 6.0},
            "desk is busy (6.0 x slower), shed joined: shed takes layers 1-6",
        ),
        (
            planned(("2", range(2)), ("1", range(2, 9)), ("2", range(9, 10))),
            planned(("2", range(5)), ("1", range(5, 6)), ("2", range(6, 10))),
            {"1": 2.0},
            "desk is busy (2.0 x slower): attic takes layers 2-4, 6-8",
        ),
        (
            planned(("12", range(8))),
            planned(("21", range(8))),
            {"2": 2.0},
            "attic is busy (2.0 x slower): layers are divided anew",
        ),
        (planned(("1", range(8))), None, {"1": 1.5}, "desk is busy (1.5 x slower)"),
        (planned(("1", range(8))), planned(("3", range(8))), {}, "shed joined"),
        (planned(("1", range(8))), None, {}, "shed joined"),
    ],
)
def test_a_move_says_why_and_what_it_moves(
    before: Any, to: Any, factors: dict[str, float], told: str
) -> None:
    names = NAMES if "shed" in told else {id: NAMES[id] for id in "12"}
    assert move_reason(before, to, factors, names) == told
