"""What holds for every plan chosen by measured rates: right, within memory, and the fastest."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.partition import (
    CapacityError,
    Choice,
    ClusterSpec,
    DeviceSpec,
    LinkSpec,
    Parallel,
    Plan,
    PlanError,
    Workload,
    check_fit,
    choose,
    describe,
    estimate,
)
from edge.partition.cost.message_times import Network
from edge.partition.search.choose import LEAST_GAIN_ON_ONE_HOST
from tests.property.measured_situations import every_plan, measured_situations, rates
from tests.property.plan_situations import Situation, parallels, with_more
from tests.support.facts import facts_of

NEARLY_ONE = 1 + 1e-9
"""Times that are added up in another order differ by less."""


def total_s(situation: Situation) -> float:
    """The predicted time of an answer by the fastest plan found; infinite where memory is short."""
    try:
        choice = choose(*situation)
    except CapacityError:
        return float("inf")
    return fastest_s(choice, situation[2])


def fastest_s(choice: Choice, workload: Workload) -> float:
    """The chosen plan has no device more for a small gain: then the fastest is the first after."""
    assert choice.predicted is not None
    others_s = [predicted.total_s(workload) for _plan, predicted in choice.runners_up]
    return min([choice.predicted.total_s(workload), *others_s])


def least_s(situation: Situation) -> float:
    """The same by looking at every plan there is."""
    model, cluster, workload = situation
    totals_s = (
        estimate(plan, model, cluster, workload).total_s(workload) for plan in every_plan(situation)
    )
    return min(totals_s, default=float("inf"))


@settings(max_examples=30)
@given(measured_situations(most_devices=2))
def test_of_two_devices_no_plan_at_all_beats_the_chosen_one(situation: Situation) -> None:
    best_s = least_s(situation)
    assert best_s / NEARLY_ONE <= total_s(situation) <= best_s * NEARLY_ONE


@settings(max_examples=8)
@given(measured_situations(most_devices=3, most_layers=2))
def test_of_three_devices_no_plan_at_all_beats_the_chosen_one(situation: Situation) -> None:
    best_s = least_s(situation)
    assert best_s / NEARLY_ONE <= total_s(situation) <= best_s * NEARLY_ONE


@settings(max_examples=20)
@given(measured_situations(most_devices=5, most_layers=7), parallels)
def test_plans_cover_the_model_once_and_fit(situation: Situation, parallel: Parallel) -> None:
    model, cluster, workload = situation
    try:
        choice = choose(model, cluster, workload, parallel=parallel)
    except PlanError:
        assert len(cluster.devices) > (
            model.num_layers if parallel == "pipeline" else model.vocab_size
        )
        return
    except CapacityError as error:
        cluster = with_more(cluster, error)
        choice = choose(model, cluster, workload, parallel=parallel)
    check_fit(choice.plan, model, cluster, workload)
    if parallel != "auto":
        assert set(choice.plan.devices) == {device.id for device in cluster.devices}
        assert len(choice.plan.stages) == (1 if parallel == "tensor" else len(cluster.devices))
    check_choice(choice, (model, cluster, workload))
    check_cover(choice.plan, (model, cluster, workload))


def check_cover(plan: Plan, situation: Situation) -> None:
    """Every layer, head, column and row once; of KV heads the copies are marked."""
    model, cluster, workload = situation
    rows = describe(plan, model, cluster, workload)
    assert [layer for stage in plan.stages for layer in stage.layers] == [*range(model.num_layers)]
    for number, stage in enumerate(plan.stages):
        own = [row for row in rows if row.stage == number]
        has_vocab = number in (0, len(plan.stages) - 1)
        for parts, whole in (
            ([row.held[0].heads for row in own], facts_of(model).num_heads),
            ([row.held[0].ffn_columns for row in own], facts_of(model).ffn_columns),
            ([row.vocab for row in own], model.vocab_size if has_vocab else 0),
        ):
            assert [index for part in parts for index in part] == [*range(whole)]
        held = [head for row in own for head in row.held[0].kv_heads]
        assert len(stage.shards) == len(own)
        assert set(held) == {*range(facts_of(model).num_kv_heads)}
        copies = sum(row.held[0].kv_copies for row in own)
        assert len(held) - copies == facts_of(model).num_kv_heads


def check_choice(choice: Choice, situation: Situation) -> None:
    model, cluster, workload = situation
    assert choice.predicted == estimate(choice.plan, model, cluster, workload)
    predicted_s = choice.predicted.total_s(workload)
    left_out = [each.device for each in choice.left_out]
    assert sorted([*choice.plan.devices, *left_out]) == sorted(
        device.id for device in cluster.devices
    )
    assert predicted_s <= fastest_s(choice, workload) * (1 + LEAST_GAIN_ON_ONE_HOST) * NEARLY_ONE
    before_s = 0.0
    for plan, predicted in choice.runners_up:
        check_fit(plan, model, cluster, workload)
        assert predicted == estimate(plan, model, cluster, workload)
        assert plan != choice.plan
        assert before_s <= predicted.total_s(workload) * NEARLY_ONE
        before_s = predicted.total_s(workload)
        if before_s < predicted_s / NEARLY_ONE:
            assert len(plan.devices) > len(choice.plan.devices)


@settings(max_examples=30)
@given(measured_situations(most_devices=4, most_layers=7))
def test_never_slower_than_the_best_device_alone(situation: Situation) -> None:
    model, cluster, workload = situation
    try:
        choice = choose(model, cluster, workload)
    except CapacityError:
        return
    alone_s = [
        total_s((model, ClusterSpec(devices=(device,)), workload)) for device in cluster.devices
    ]
    assert choice.predicted is not None
    assert choice.predicted.total_s(workload) <= min(alone_s) * NEARLY_ONE
    if choice.solo is None:
        assert min(alone_s) == float("inf")
    else:
        solo_s = choice.solo.estimate.total_s(workload)
        assert min(alone_s) / NEARLY_ONE <= solo_s <= min(alone_s) * NEARLY_ONE


@settings(max_examples=12)
@given(measured_situations(most_devices=4, most_layers=5))
def test_equal_facts_give_an_equal_choice(situation: Situation) -> None:
    assert outcome(situation) == outcome(situation)


def outcome(situation: Situation) -> Choice | str:
    """The choice, or what is said when memory is short."""
    try:
        return choose(*situation)
    except CapacityError as error:
        return str(error)


@settings(max_examples=12)
@given(measured_situations(most_devices=4, most_layers=5), st.data())
def test_a_lost_device_is_never_used(situation: Situation, data: st.DataObject) -> None:
    model, cluster, workload = situation
    lost = data.draw(st.sampled_from(cluster.devices)).id
    if len(cluster.devices) == 1:
        return
    try:
        choice = choose(model, cluster.without(lost), workload)
    except CapacityError:
        return
    assert lost not in choice.plan.devices


@settings(max_examples=20)
@given(measured_situations(), st.data())
def test_more_of_anything_is_never_slower(situation: Situation, data: st.DataObject) -> None:
    model, cluster, workload = situation
    better = data.draw(st.sampled_from((faster, roomier, with_faster_link, with_another)))
    richer = better(cluster, data)
    assert total_s((model, richer, workload)) <= total_s(situation) * NEARLY_ONE


def faster(cluster: ClusterSpec, data: st.DataObject) -> ClusterSpec:
    chosen = data.draw(st.sampled_from(cluster.devices))
    assert chosen.rates is not None
    return exchanged(cluster, replace(chosen, rates=chosen.rates.slowed_by(0.5)))


def roomier(cluster: ClusterSpec, data: st.DataObject) -> ClusterSpec:
    chosen = data.draw(st.sampled_from(cluster.devices))
    return exchanged(cluster, replace(chosen, memory_bytes=chosen.memory_bytes * 3 // 2))


def with_faster_link(cluster: ClusterSpec, data: st.DataObject) -> ClusterSpec:
    """Every link measured, as what it counts for; one of them faster."""
    network = Network(cluster)
    ids = [device.id for device in cluster.devices]
    pairs = [(one, other) for one in ids for other in ids if one != other]
    chosen = data.draw(st.sampled_from(pairs)) if pairs else None
    links: list[LinkSpec] = []
    for pair in pairs:
        latency_s, bytes_per_s = network.link(*pair)
        factor = 0.5 if pair == chosen else 1
        links.append(
            LinkSpec(
                source=pair[0],
                target=pair[1],
                latency_s=latency_s * factor,
                bytes_per_s=bytes_per_s / factor,
            )
        )
    return replace(cluster, links=tuple(links))


def with_another(cluster: ClusterSpec, data: st.DataObject) -> ClusterSpec:
    another = DeviceSpec(
        id="another",
        name="another",
        memory_bytes=max(device.memory_bytes for device in cluster.devices),
        threads=1,
        rates=data.draw(rates()),
    )
    return replace(cluster, devices=(*cluster.devices, another))


def exchanged(cluster: ClusterSpec, changed: DeviceSpec) -> ClusterSpec:
    devices = tuple(changed if each.id == changed.id else each for each in cluster.devices)
    return replace(cluster, devices=devices)
