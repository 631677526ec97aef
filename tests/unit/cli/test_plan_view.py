"""What `edge plan` says of layers that are not in a device's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.cli.plan_view import (
    devices_in_words,
    left_out_in_words,
    losses_as_json,
    plan_as_json,
    show_losses,
    show_plan,
    show_standby,
    standby_as_json,
)
from edge.host.free_memory import format_size
from edge.partition import Choice, ClusterSpec, LeftOut, Solo, choose, estimate, memory_use
from edge.planning.kv_copies import copies_cost
from edge.planning.load_options import LoadOptions
from edge.planning.losses import losses
from edge.planning.overhead import Overhead
from edge.planning.proposal import Proposal
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from tests.unit.partition import test_plan_memory
from tests.unit.partition.test_choose import SMALL, cluster
from tests.unit.partition.test_plan_streaming import (
    MATRIX_BYTES,
    MODEL,
    RATES,
    WORKLOAD,
    alone,
    device,
)
from tests.unit.partition.test_repair import SHORT, pipeline


def proposal(host_layers: int | None) -> Proposal:
    rates = replace(RATES, copy_bytes_per_s=50.0)
    host_bytes = None if host_layers is None else host_layers * MATRIX_BYTES
    gpu = replace(device("a", 10**6, rates), host_memory_bytes=host_bytes)
    cluster, plan = ClusterSpec(devices=(gpu,)), alone(9)
    choice = Choice(
        plan=plan,
        predicted=estimate(plan, MODEL, cluster, WORKLOAD),
        solo=None,
        left_out=(),
        runners_up=(),
    )
    return Proposal(
        dtype="float32",
        weights="float32",
        choice=choice,
        model=MODEL,
        cluster=cluster,
        workload=WORKLOAD,
        limits=StepLimits(context_tokens=4096, chunk_tokens=4, requests=1, cached_tokens=4096),
        wire_rules=WireRules(sums=(WireRule(),), hops=()),
        overhead={"a": Overhead(promised_bytes=10**6, floor_bytes=1, buffer_bytes=2)},
    )


def test_devices_without_a_part_are_counted_and_named() -> None:
    made = proposal(None)
    assert devices_in_words(made) == "1 device"
    assert left_out_in_words(made) == ""
    others = [LeftOut(device=name, name=f"peer-{name}", reason="slow") for name in "bcde"]
    for count, said in (
        (1, "left out: peer-b (slow)"),
        (2, "left out: peer-b (slow), peer-c (slow)"),
        (4, "left out: peer-b (slow), peer-c (slow), 2 more, which edge plan names"),
    ):
        devices = (device("a", 10**6, RATES), *(device(c, 1, RATES) for c in "bcde"[:count]))
        more = replace(
            made,
            cluster=ClusterSpec(devices=devices),
            choice=replace(made.choice, left_out=tuple(others[:count])),
        )
        assert devices_in_words(more) == f"1 of {1 + count} devices"
        assert left_out_in_words(more) == said


@pytest.mark.parametrize(
    ("host_layers", "where", "more", "what"),
    [
        (None, "0–9, 9 from disk", "1.1 KiB more from disk", "reading weights from the disk of a"),
        (
            6,
            "0–9, 3 from host memory, 6 from disk",
            "390 B more from the host's memory and 780 B more from disk",
            "copying weights from the host into a",
        ),
        (
            9,
            "0–9, 9 from host memory",
            "1.1 KiB more from the host's memory",
            "copying weights from the host into a",
        ),
    ],
)
def test_where_layers_come_from_is_said(
    host_layers: int | None,
    where: str,
    more: str,
    what: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made = proposal(host_layers)
    show_plan(made, title="m", unchanged=None, explain=False)
    shown = capsys.readouterr().out
    assert where in shown
    held = format_size(made.rows[0].memory.weight_bytes)
    assert f"weights {held} ({more} for each token)" in shown
    assert f"Most of a token's time: {what}: " in shown
    (row,) = plan_as_json(made, explain=False)["devices"]
    assert row["streamed_layers"] - row["host_layers"] == int("disk" in where) * (
        9 if host_layers is None else 6
    )


def test_kv_heads_that_are_held_again_are_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plan = test_plan_memory.PLAN
    made = replace(
        proposal(None),
        choice=Choice(plan=plan, predicted=None, solo=None, left_out=(), runners_up=()),
        model=test_plan_memory.MODEL,
        cluster=test_plan_memory.cluster(a=10**6, b=10**6, c=10**6),
        workload=test_plan_memory.WORKLOAD,
    )
    show_plan(made, title="m", unchanged=None, explain=False)
    shown = capsys.readouterr().out
    assert "0–5, 1 KV again" in shown
    assert "6–7, 1 KV again" in shown
    devices = plan_as_json(made, explain=False)["devices"]
    kinds = [row["kinds"][0] for row in devices]
    assert [kind["kv_heads"] for kind in kinds] == [[0, 0, 1], [1], [0, 1]]
    assert [kind["kv_copies"] for kind in kinds] == [1, 1, 0]


def test_other_plans_are_shown_with_the_spread_of_their_rates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = proposal(None)
    assert made.choice.predicted is not None
    other = replace(made.choice.predicted, tokens_per_s=59.61, tokens_per_s_range=(57.2, 62.4))
    solo = Solo(device="a", name="a", estimate=other)
    made = replace(made, choice=replace(made.choice, runners_up=((alone(8), other),), solo=solo))
    show_plan(made, title="t", unchanged=None, explain=True)
    shown = capsys.readouterr().out
    assert "57–62" in shown
    assert "right guesses" in shown
    value = plan_as_json(made, explain=True)
    assert [each["right"] for each in value["with_guesses"]] == [0.5, 0.7, 0.9]
    rates = [each["tokens_per_s"] for each in value["with_guesses"]]
    assert rates == sorted(rates)
    assert value["runners_up"][0]["predicted"]["tokens_per_s_range"] == [57.2, 62.4]
    assert value["solo"]["tokens_per_s"] == 59.61
    assert value["solo"]["tokens_per_s_range"] == [57.2, 62.4]
    never = replace(made, limits=replace(made.limits, batch_invariant=True))
    show_plan(never, title="t", unchanged=None, explain=True)
    assert "right guesses" not in capsys.readouterr().out
    rounded = WireRules(sums=(WireRule(format="int8"),), hops=())
    for each in (never, replace(made, kv_dtype="int4"), replace(made, wire_rules=rounded)):
        assert plan_as_json(each, explain=True)["with_guesses"] == []


def test_a_predicted_rate_has_a_spread_where_the_rates_have_one() -> None:
    rates = replace(RATES, copy_bytes_per_s=50.0, spread=(0.8, 1.25))
    gpu, plan = device("a", 10**6, rates), alone(0)
    found = estimate(plan, MODEL, ClusterSpec(devices=(gpu,)), WORKLOAD)
    low, high = found.tokens_per_s_range
    assert low < found.tokens_per_s < high
    steady = replace(gpu, rates=replace(rates, spread=(1.0, 1.0)))
    still = estimate(plan, MODEL, ClusterSpec(devices=(steady,)), WORKLOAD)
    assert still.tokens_per_s_range == (still.tokens_per_s, still.tokens_per_s)
    assert still.tokens_per_s == found.tokens_per_s


def planned(*memory_gib: float) -> Proposal:
    """A pipeline of a model of 0.7 GiB over these devices, of which the last may have no part."""
    devices = cluster(*[(each, 30e9) for each in memory_gib])
    plan = pipeline(SMALL, range(8), range(8, 22)) if len(memory_gib) > 1 else None
    choice = choose(SMALL, devices, SHORT)
    if plan is not None:
        choice = replace(choice, plan=plan)
    return Proposal(
        dtype="int4",
        weights="int4",
        choice=choice,
        model=SMALL,
        cluster=devices,
        workload=SHORT,
        limits=StepLimits(context_tokens=4096, chunk_tokens=256, requests=1, cached_tokens=4096),
        wire_rules=WireRules(sums=(), hops=()),
    )


def test_what_would_be_left_without_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    options = LoadOptions(plan="pipeline", stream="off")
    proposed = planned(0.9, 0.6, 0.6)
    found = losses(proposed, options)
    show_losses(proposed, found)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Without a: c: layers 0-7 | b: layers 8-21; 377.1 MiB to send; first")
    assert second.startswith("Without b: a: layers 0-")
    use = memory_use(proposed.plan, proposed.model, SHORT)
    assert losses_as_json(found)[0]["lacking_bytes"] == {"02": use["00"].weight_bytes, "01": 0}
    assert losses_as_json(found)[0]["same_shape"]

    proposed = planned(0.9, 0.5)
    found = losses(proposed, options)
    show_losses(proposed, found)
    first, second = capsys.readouterr().out.splitlines()
    (missing,) = losses_as_json(found)[0]["missing_bytes"].values()
    assert first == f"Without a: it does not fit; missing: {format_size(missing)} on b."
    assert second.startswith("Without b: a: layers 0-21; ")
    assert " from disk" in _said(planned(0.9, 0.5), replace(options, stream="auto"), capsys)
    assert _said(planned(2), options, capsys) == "Without a: no device remains.\n"


def test_what_copies_of_keys_and_values_take(capsys: pytest.CaptureFixture[str]) -> None:
    """A token of llama's 22 layers with 4 KV heads of 64: 8 bytes for each element of its keys."""
    proposed = planned(0.9, 0.6)
    cost = copies_cost(proposed, "kv", here="here")
    assert cost is not None
    layer_bytes = 8 * 4 * 64
    assert cost.token_bytes == {"00": 8 * layer_bytes, "01": 14 * layer_bytes}
    assert cost.kept_tokens == (1 << 30) // (22 * layer_bytes)
    predicted = proposed.choice.predicted
    assert predicted is not None
    assert cost.bytes_per_s is not None
    first_per_s = 8 * layer_bytes * predicted.tokens_per_s
    assert cost.bytes_per_s["00"] == pytest.approx(first_per_s)
    show_standby(proposed, cost)
    said = capsys.readouterr().out
    assert "44.0 KiB for each token of a prompt or an answer" in said
    assert "up to 1.0 GiB, which is 23,831 tokens" in said
    assert f"carry {8e-6 * first_per_s:.3g} Mbit/s from a and" in said
    assert standby_as_json(cost)["token_bytes"] == cost.token_bytes
    show_standby(proposed, cost, {"01": 5 << 20})
    assert "b keeps 5.0 MiB of weights ready" in capsys.readouterr().out
    assert standby_as_json(cost, {"01": 5})["ready_bytes"] == {"01": 5}

    unknown = replace(proposed, choice=replace(proposed.choice, predicted=None))
    cost = copies_cost(unknown, "kv", here="here")
    assert cost is not None
    show_standby(unknown, cost)
    assert capsys.readouterr().out.endswith("23,831 tokens.\n")
    assert copies_cost(proposed, "none", here="here") is None


def _said(proposed: Proposal, options: LoadOptions, capsys: pytest.CaptureFixture[str]) -> str:
    show_losses(proposed, losses(proposed, options))
    return capsys.readouterr().out
