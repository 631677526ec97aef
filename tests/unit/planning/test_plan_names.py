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


def test_names_become_ids_and_ids_stay() -> None:
    found = by_id(plan("attic", "id2", "nobody"), cluster(id1="attic", id2="desk"))
    assert found.devices == ("id1", "id2", "nobody")
