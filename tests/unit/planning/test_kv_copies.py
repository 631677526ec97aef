"""When a coordinator keeps copies of keys and values though nobody asked for that."""

from __future__ import annotations

from edge.partition import ClusterSpec, DeviceSpec, LinkSpec
from edge.planning.kv_copies import FAST_BYTES_PER_S, kv_copies
from tests.support.plans import bundled_plan

PLAN = bundled_plan("pipeline_2", devices=["a", "b"])


def cluster(*hosts: str, bytes_per_s: float | None = None) -> ClusterSpec:
    ids = "abc"[: len(hosts)]
    return ClusterSpec(
        devices=tuple(
            DeviceSpec(id=id, name=id, threads=1, memory_bytes=1, host=host)
            for id, host in zip(ids, hosts, strict=True)
        ),
        links=()
        if bytes_per_s is None
        else tuple(
            LinkSpec(source=one, target=other, latency_s=0.0, bytes_per_s=bytes_per_s)
            for one, other in ("ab", "ba")
        ),
    )


def test_answers_are_copied_where_that_costs_nothing() -> None:
    def copies(*hosts: str, bytes_per_s: float | None = None) -> str:
        return kv_copies("auto", PLAN, cluster(*hosts, bytes_per_s=bytes_per_s), here="here")

    assert copies("here", "here", "far") == "answers", "what is not of the plan does not count"
    assert copies("here", "far") == "none", "nothing is known of the way"
    assert copies("here", "far", bytes_per_s=FAST_BYTES_PER_S) == "answers"
    assert copies("here", "far", bytes_per_s=FAST_BYTES_PER_S / 2) == "none"


def test_what_is_asked_for_is_done() -> None:
    far = cluster("far", "far", bytes_per_s=1.0)
    assert kv_copies("kv", PLAN, far, here="here") == "all"
    assert kv_copies("none", PLAN, cluster("here", "here"), here="here") == "none"
