"""A kind of share that nobody knows but its registration goes wherever slices of layers go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from edge.partition import (
    ClusterSpec,
    DeviceSpec,
    MemoryUse,
    ModelFacts,
    Plan,
    PlanError,
    Stage,
    Workload,
    check_fit,
    describe,
    memory_use,
    whole_shard,
)
from edge.partition.plan.plan import SHARE_KINDS
from edge.partition.plan.reading import Reader
from edge.partition.plan.share import StagePlace, tiling_problems
from tests.unit.partition.test_check_fit import MODEL

EXPERTS = 6
EXPERT_BYTES = 1000
WORKLOAD = Workload(prompt_tokens=1, output_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Some experts of every layer of a stage."""

    kind: ClassVar[str] = "experts"

    device: str
    experts: range

    def on(self, device: str) -> Experts:
        return replace(self, device=device)

    def to_json(self) -> dict[str, object]:
        return {"device": self.device, "experts": [self.experts.start, self.experts.stop]}

    @classmethod
    def read(cls, reader: Reader, value: Mapping[str, object], where: str) -> Experts:
        device, experts = reader.fields(value, ("device", "experts"), where)
        return cls(
            device=reader.name(device, f"{where}.device"),
            experts=reader.bounds(experts, f"{where}.experts"),
        )

    @classmethod
    def problems(
        cls, names: Sequence[str], shares: Sequence[Experts], place: StagePlace, model: ModelFacts
    ) -> Iterator[str]:
        parts = [share.experts for share in shares]
        yield from tiling_problems("experts", names, parts, EXPERTS, f"Stage {place.number}")

    def memory(self, place: StagePlace, model: ModelFacts, workload: Workload) -> MemoryUse:
        nbytes = len(place.layers) * len(self.experts) * EXPERT_BYTES
        return MemoryUse(weight_bytes=nbytes, kv_bytes=0)

    def in_words(self) -> str:
        return f"experts {self.experts.start}-{self.experts.stop - 1}"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARE_KINDS, Experts.kind, Experts)


def plan_of(*parts: range) -> Plan:
    """Slices of the first two layers, then experts of the others."""
    experts = tuple(Experts(device=f"e{part.start}", experts=part) for part in parts)
    last = range(2, MODEL.num_layers)
    first = whole_shard("a", MODEL, vocab=range(MODEL.vocab_size))
    stages = (Stage(layers=range(2), shards=(first,)), Stage(layers=last, shards=experts))
    return Plan(model=MODEL.name, version=1, stages=stages)


PLAN = plan_of(range(4), range(4, 6))


def cluster(memory_bytes: int = 1 << 20) -> ClusterSpec:
    return ClusterSpec(
        devices=tuple(
            DeviceSpec(id=id, name=id.upper(), memory_bytes=memory_bytes, threads=1)
            for id in PLAN.devices
        )
    )


def test_it_crosses_json_beside_slices() -> None:
    written = PLAN.to_json()
    stages = written["stages"]
    assert isinstance(stages, list)
    assert stages[1]["shards"][0] == {"kind": "experts", "device": "e0", "experts": [0, 4]}
    assert Plan.from_json(written) == PLAN


def test_it_is_read_as_strictly_as_slices() -> None:
    written = {"kind": "experts", "device": "", "experts": [4, 0], "heads": [0, 1]}
    stage = {"layers": [0, 12], "shards": [written, {"kind": "unheard of"}, {"kind": 3}]}
    with pytest.raises(PlanError) as caught:
        Plan.from_json({"model": "m", "version": 0, "stages": [stage]})
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        "stages[0].shards[0]",
        "stages[0].shards[0].device",
        "stages[0].shards[0].experts",
        "stages[0].shards[1].kind",
        "stages[0].shards[2].kind",
    ]


def test_it_is_validated_by_its_own_rules_and_by_those_of_plans() -> None:
    PLAN.validate(MODEL, cluster())
    with pytest.raises(PlanError, match="the experts end at 4, and the model has 6"):
        plan_of(range(4)).validate(MODEL, None)
    with pytest.raises(PlanError, match="is not in the cluster"):
        PLAN.validate(MODEL, cluster().without("e4"))
    twice = replace(PLAN.stages[1], shards=tuple(s.on("a") for s in PLAN.stages[1].shards))
    with pytest.raises(PlanError, match="is used twice"):
        replace(PLAN, stages=(PLAN.stages[0], twice)).validate(MODEL, None)
    both = replace(PLAN.stages[1], shards=(*PLAN.stages[1].shards, *PLAN.stages[0].shards))
    with pytest.raises(PlanError, match="has shares of 2 kinds"):
        replace(PLAN, stages=(PLAN.stages[0], both)).validate(MODEL, None)


def test_it_has_memory_and_a_row_of_its_own() -> None:
    layers = MODEL.num_layers - 2
    use = memory_use(PLAN, MODEL, WORKLOAD)
    assert use["e0"].total == layers * 4 * EXPERT_BYTES
    check_fit(PLAN, MODEL, cluster(), WORKLOAD)
    rows = describe(PLAN, MODEL, cluster(), WORKLOAD)
    assert [row.in_words for row in rows[1:]] == ["experts 0-3", "experts 4-5"]
    assert (rows[1].held, rows[1].memory) == ((), use["e0"])


def test_what_needs_slices_says_so() -> None:
    with pytest.raises(PlanError, match="Shares of kind experts cannot be used here"):
        _ = PLAN.stages[1].slices
