"""Plans by hand, whose devices are written as names."""

from __future__ import annotations

from edge.partition import ClusterSpec, DeviceSpec, Plan, Shard, Stage
from edge.planning.choosing import by_id


def plan(*devices: str) -> Plan:
    return Plan(
        model="m",
        version=0,
        stages=tuple(
            Stage(
                layers=range(number, number + 1),
                shards=(
                    Shard(device=device, heads=range(1), ffn_columns=range(1), vocab=range(1)),
                ),
            )
            for number, device in enumerate(devices)
        ),
    )


def cluster(**names: str) -> ClusterSpec:
    return ClusterSpec(
        devices=tuple(
            DeviceSpec(id=id, name=name, memory_bytes=1, threads=1) for id, name in names.items()
        )
    )


ATTIC, DESK = "a1" * 16, "de" * 16


def test_names_become_ids_and_ids_stay() -> None:
    found = by_id(plan("attic", DESK, "nobody"), cluster(**{ATTIC: "attic", DESK: "desk"}))
    assert found.devices == (ATTIC, DESK, "nobody")


def test_no_device_gets_what_is_anothers_by_a_name_that_is_its_id() -> None:
    """Whether the other one is there or not."""
    assert by_id(plan(ATTIC), cluster(**{DESK: ATTIC})).devices == (ATTIC,)
    assert by_id(plan(ATTIC), cluster(**{ATTIC: "attic", DESK: ATTIC})).devices == (ATTIC,)
