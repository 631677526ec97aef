"""The bench of predictions: which plans it runs, and the rows that it makes of what came."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import partition
from demos.bench import results
from demos.bench.clusters.arrangements import options, shares
from demos.bench.clusters.rows import Row, error_percent, parts, table, to_json
from demos.bench.clusters.runs import Answer, ClusterRun, Run
from demos.bench.clusters.steadiness import FEWEST, MOST_KEPT, MOST_WAITED, Machine, drift
from demos.bench.clusters.table import CLUSTERS, Device, EmulatedCluster, Work
from demos.bench.predictions import PREDICTIONS
from edge.planning.proposal import Proposal
from edge.protocol.step_times import PeerTimes, StepTimes
from edge.protocol.wire_rules import WireRules
from partition import (
    ClusterSpec,
    ComputeRates,
    DeviceSpec,
    Estimate,
    LinkSpec,
    Plan,
    Workload,
    describe_plan_in_words,
)
from tests.support.facts import facts_of, plain_facts

MODEL = plain_facts(
    name="small",
    num_layers=6,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    ffn_columns=1024,
    vocab_size=4096,
    tied_embeddings=False,
    column_multiple=32,
    query_head_bytes=1 << 14,
    kv_head_bytes=1 << 14,
    ffn_column_bytes=768,
    layer_bytes=2048,
    embedding_row_bytes=512,
    head_row_bytes=192,
    kv_bytes_per_token=256,
)
WORK = Work(prompt_tokens=16, output_tokens=5)
NOBODY = WireRules(sums=(), hops=())


def rates(speed: float) -> ComputeRates:
    times = (1e-9 / speed, 1e-7 / speed)
    return ComputeRates(
        rows=(1, 256),
        seconds_per_byte=times,
        shared_seconds_per_byte=times,
        slice_seconds_per_byte=times,
        attention_slice_s=(1e-5, 1e-5),
        feed_forward_slice_s=(1e-5, 1e-5),
        attention_s=(1e-9, 1e-9),
        run_s=1e-5,
        jitter=0.1,
        sample_s=1e-4,
        step_s=1e-4,
    )


def proposal(*speeds: float, latency_s: float = 1e-5, memory_bytes: int = 1 << 30) -> Proposal:
    names = "abc"[: len(speeds)]
    devices = tuple(
        DeviceSpec(id=name, name=name, memory_bytes=memory_bytes, threads=1, rates=rates(speed))
        for name, speed in zip(names, speeds, strict=True)
    )
    links = tuple(
        LinkSpec(source=source, target=target, latency_s=latency_s, bytes_per_s=1e9)
        for source in names
        for target in names
        if source != target
    )
    cluster = ClusterSpec(devices=devices, links=links)
    workload = Workload(prompt_tokens=WORK.prompt_tokens, output_tokens=WORK.output_tokens)
    return Proposal(
        choice=partition.choose(MODEL, cluster, workload),
        model=MODEL,
        cluster=cluster,
        workload=workload,
        chunk_tokens=256,
        wire_rules=NOBODY,
    )


def groups(plan: Plan) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(sorted(each.device for each in stage.shards)) for stage in plan.stages)


class TestOptions:
    def test_of_two_devices_every_way_is_run_once(self) -> None:
        found = options(proposal(2, 1), everything=True)
        assert {groups(each.plan) for each in found} == {
            (("a",),), (("b",),), (("a",), ("b",)), (("b",), ("a",)), (("a", "b"),),
        }  # fmt: skip
        assert len(found) == 5

    def test_of_three_devices_all_mixtures_are_run(self) -> None:
        found = options(proposal(4, 2, 1), everything=True)
        # One device 3, two 3 x 3, three: 6 pipelines, 3 x 2 mixtures, 1 of slices.
        assert len({groups(each.plan) for each in found}) == len(found) == 25

    def test_devices_that_are_alike_are_not_told_apart(self) -> None:
        found = options(proposal(1, 1, 1), everything=True)
        assert sorted([len(group) for group in groups(each.plan)] for each in found) == [
            [1], [1, 1], [1, 1, 1], [1, 2], [2], [2, 1], [3],
        ]  # fmt: skip

    @pytest.mark.parametrize("everything", [True, False])
    def test_the_chosen_plan_is_first_then_come_single_devices(self, everything: bool) -> None:
        made = proposal(3, 2.9, 2.8)
        first, *others = options(made, everything=everything)
        assert first.plan == made.plan
        assert first.predicted == made.choice.predicted
        is_solo = [each.is_solo for each in others]
        assert is_solo == sorted(is_solo, reverse=True)
        assert sum(is_solo) + first.is_solo == 3

    def test_single_devices_that_are_far_slower_are_run_only_with_everything(self) -> None:
        made = proposal(10, 8, 1)
        few, all_of_them = (options(made, everything=everything) for everything in (False, True))
        assert {each.plan.devices for each in few if each.is_solo} == {("a",), ("b",)}
        assert {each.plan.devices for each in all_of_them if each.is_solo} == {
            ("a",),
            ("b",),
            ("c",),
        }

    def test_plans_that_do_not_fit_are_left_out(self) -> None:
        whole = partition.memory_use(proposal(1).plan, MODEL, proposal(1).workload)["a"].total
        found = options(proposal(1, 2, memory_bytes=2 * whole // 3), everything=True)
        assert found
        assert not any(each.is_solo for each in found)


class TestShares:
    def test_slices_follow_speed_or_are_equal(self) -> None:
        found = shares(proposal(2, 1))
        assert found is not None
        (by_speed,), (equal,) = found.by_speed.plan.stages, found.equal.plan.stages
        columns = [len(shard.ffn_columns) for shard in by_speed.slices]
        assert max(columns) > 1.5 * min(columns)
        assert {len(shard.ffn_columns) for shard in equal.slices} == {
            facts_of(MODEL).ffn_columns // 2
        }
        assert {len(shard.heads) for shard in equal.slices} == {facts_of(MODEL).num_heads // 2}
        assert found.by_speed.predicted.token_s < found.equal.predicted.token_s

    def test_there_are_none_where_memory_is_short(self) -> None:
        made = proposal(2, 1)
        tight = tuple(
            dataclasses.replace(device, memory_bytes=1 << 12) for device in made.cluster.devices
        )
        short = dataclasses.replace(made, cluster=ClusterSpec(devices=tight))
        assert shares(short) is None


def run_of(
    plan: Plan, predicted: Estimate, made: Proposal, answers: Sequence[tuple[float, float]]
) -> Run:
    return Run(
        plan=plan,
        words=describe_plan_in_words(plan, made.cluster),
        predicted=predicted,
        work=WORK,
        answers=[Answer(first_token_s=first, tokens_per_s=speed) for first, speed in answers],
        times=[
            PeerTimes(
                name=shard.device,
                stage=number,
                rank=rank,
                prompt=StepTimes(),
                decode=StepTimes(steps=4, compute_s=0.4, reduce_s=0.08 / (rank + 1), sample_s=0.04),
                resident_bytes=0,
                peak_bytes=0,
            )
            for number, stage in enumerate(plan.stages)
            for rank, shard in enumerate(stage.shards)
        ],
    )


@pytest.fixture
def finished() -> ClusterRun:
    """Two devices, the second as fast; slices on both chosen."""
    made = proposal(1, 1)
    found = options(made, everything=True)
    speeds = {(2,): [(0.5, 8.0), (0.7, 8.0), (0.6, 9.0)], (1,): [(1.0, 4.0)], (1, 1): [(0.4, 5.0)]}
    runs = [
        run_of(
            each.plan,
            each.predicted,
            made,
            speeds[tuple(len(stage.shards) for stage in each.plan.stages)],
        )
        for each in found
    ]
    return ClusterRun(
        cluster=EmulatedCluster(
            name="two",
            devices=(Device(name="a", cores=1), Device(name="b", cores=1)),
            shape="tiny",
            work=WORK,
        ),
        proposal=made,
        chosen=runs[0],
        others=tuple(runs[1:]),
        by_speed=None,
        equal=None,
    )


class TestRows:
    def test_medians_errors_and_gains(self, finished: ClusterRun) -> None:
        row = Row.of(finished, results.conditions())
        predicted = finished.chosen.predicted
        assert (row.tokens_per_s, row.first_token_s) == (8.0, 0.6)
        assert row.tokens_error_percent == round(100 * (predicted.tokens_per_s / 8 - 1), 1)
        assert row.solo_tokens_per_s == 4.0
        assert row.times_solo == round((1.0 + 4 / 4.0) / (0.6 + 4 / 8.0), 3)
        assert row.best == row.plan
        assert (row.of_best, row.plans_run) == (1.0, 3)
        assert row.shares_gain is None
        assert row.tokens == "16 + 5"

    def test_the_best_may_be_another(self, finished: ClusterRun) -> None:
        finished.others[0].answers[:] = [Answer(first_token_s=0.1, tokens_per_s=8.0)]
        row = Row.of(finished, results.conditions())
        assert row.best == finished.others[0].words
        assert row.of_best == round((0.1 + 0.5) / (0.6 + 0.5), 3)

    def test_gains_of_shares(self, finished: ClusterRun) -> None:
        compared = dataclasses.replace(finished, by_speed=finished.chosen, equal=finished.others[0])
        row = Row.of(compared, results.conditions())
        assert row.shares_gain == row.times_solo
        assert row.predicted_shares_gain == row.predicted_times_solo

    def test_errors_are_of_the_prediction(self) -> None:
        assert error_percent(12, 10) == 20
        assert error_percent(5, 10) == -50

    def test_parts_are_of_the_shard_that_waits_least(self, finished: ClusterRun) -> None:
        found = {part.part: part for part in parts(finished.chosen)}
        assert set(found) == {
            "compute a", "compute b", "sums", "sample", "hops and step", "token",
        }  # fmt: skip
        actual_s = {name: part.actual_s for name, part in found.items()}
        assert actual_s["compute a"] == pytest.approx(0.100)
        assert actual_s["sums"] == pytest.approx(0.010)
        assert actual_s["sample"] == pytest.approx(0.010)
        assert actual_s["token"] == pytest.approx(0.125)
        assert actual_s["hops and step"] == pytest.approx(0.005)
        assert found["token"].predicted_s == finished.chosen.predicted.token_s

    def test_rows_are_read_back_as_written(self, finished: ClusterRun, tmp_path: Path) -> None:
        row = Row.of(finished, results.conditions())
        path = tmp_path / "predictions.csv"
        results.append([row], path)
        results.append([row, row], path)
        with path.open(newline="", encoding="utf-8") as file:
            read = list(csv.DictReader(file))
        assert len(read) == 3
        assert read[0] == {
            name: "" if value is None else str(value)
            for name, value in dataclasses.asdict(row).items()
        }

    def test_everything_is_json(self, finished: ClusterRun) -> None:
        row = Row.of(finished, results.conditions())
        told = json.loads(json.dumps(to_json(finished, row)))
        assert len(told["runs"]) == 3
        assert told["measured"]["devices"][0]["rates"]["run_s"] == 1e-5

    def test_the_table_has_a_line_for_each(self, finished: ClusterRun) -> None:
        row = Row.of(finished, results.conditions())
        assert table([row, row]).row_count == 2


class TestSteadiness:
    def test_drift_is_more_when_the_machine_became_slower(self) -> None:
        assert drift([1.0, 1.0], [1.0, 1.2, 5.0]) == pytest.approx(0.2)
        assert drift([2.0], [1.0]) == -0.5

    def test_the_machine_is_timed_where_devices_are(self) -> None:
        before = os.sched_getaffinity(0)
        core = min(before)
        assert Machine([core, core]).time_s() > 0
        assert os.sched_getaffinity(0) == before

    def test_waiting_ends_when_it_is_quiet_again(self) -> None:
        machine = Timed(*[1.0] * FEWEST, 2.0, 1.2, 1.04, 9.0)
        assert machine.wait() == 1.04
        assert machine.left == [9.0]

    def test_waiting_ends(self) -> None:
        machine = Timed(*[1.0] * FEWEST, *[2.0] * MOST_WAITED, 1.0)
        assert machine.wait() == 2.0
        assert machine.left == [1.0]

    def test_what_lasts_becomes_usual(self) -> None:
        machine = Timed(*[1.0] * FEWEST, *[2.0] * MOST_KEPT)
        for _ in range(MOST_KEPT // MOST_WAITED):
            machine.wait()
        assert machine.is_quiet(2.0)


class Timed(Machine):
    """Takes what it is told to take, one time after the other."""

    def __init__(self, *times_s: float) -> None:
        super().__init__([0])
        self.left = list(times_s)

    def _rounds_s(self, core: int, memory: Any) -> float:
        return self.left.pop(0)


def test_the_committed_file_has_these_columns() -> None:
    with PREDICTIONS.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == [field.name for field in dataclasses.fields(Row)]
        names = {cluster.name for cluster in CLUSTERS}
        for row in reader:
            assert row["cluster"] in names
            assert float(row["tokens_per_s"]) > 0
