"""When a coordinator keeps copies of keys and values though nobody asked for that."""

from __future__ import annotations

from dataclasses import replace

from edge.partition import ClusterSpec, DeviceSpec, LinkSpec
from edge.planning.kv_copies import FAST_BYTES_PER_S, kv_copies
from edge.planning.proposal import Proposal
from tests.support.plans import bundled_plan
from tests.unit.cli.test_plan_view import proposal

PLAN = bundled_plan("pipeline_2", devices=["a", "b"])


def on(*hosts: str, bytes_per_s: float | None = None) -> Proposal:
    """The plan, proposed on devices of these hosts."""
    ids = "abc"[: len(hosts)]
    cluster = ClusterSpec(
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
    some = proposal(None)
    return replace(some, cluster=cluster, choice=replace(some.choice, plan=PLAN))


def test_answers_are_copied_where_that_costs_nothing() -> None:
    def copies(*hosts: str, bytes_per_s: float | None = None) -> str:
        return kv_copies("auto", on(*hosts, bytes_per_s=bytes_per_s), here="here")

    assert copies("here", "here", "far") == "answers", "what is not of the plan does not count"
    assert copies("here", "far") == "none", "nothing is known of the way"
    assert copies("here", "far", bytes_per_s=FAST_BYTES_PER_S) == "answers"
    assert copies("here", "far", bytes_per_s=FAST_BYTES_PER_S / 2) == "none"


def test_what_is_asked_for_is_done() -> None:
    assert kv_copies("kv", on("far", "far", bytes_per_s=1.0), here="here") == "all"
    assert kv_copies("none", on("here", "here"), here="here") == "none"


def test_of_a_model_with_states_nothing_is_copied() -> None:
    """Whoever had its keys and values would have to compute the prompt again for the states."""
    some = on("here", "here")
    (kind, *others) = some.model.kinds
    with_states = replace(some.model, kinds=(replace(kind, state_bytes=8), *others))
    assert kv_copies("kv", replace(some, model=with_states), here="here") == "none"
