"""Plans of random graphs, against every plan there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.partition import (
    AtomFacts,
    GraphDevice,
    GraphFacts,
    GraphPlan,
    GraphStage,
    Objective,
    PlanError,
    choose_graph_plan,
    estimate_graph,
)
from edge.partition.search.graph_cut import (
    LEAST_GRAPH_GAIN,
    best_chains,
    crossing_bytes,
    forks,
)

MOST_ATOMS = 6


@st.composite
def random_facts(draw: st.DrawFn) -> GraphFacts:
    """A DAG of a few atoms, each of which uses earlier tensors, and one to three devices."""
    count = draw(st.integers(1, MOST_ATOMS))
    small = st.integers(0, 9)
    tensors = {"in": draw(small)}
    atoms = []
    for number in range(count):
        known = st.sampled_from(sorted(tensors))
        inputs = draw(st.lists(known, min_size=1, max_size=3, unique=True))
        outputs = tuple(f"{number}.{place}" for place in range(draw(st.integers(1, 2))))
        atoms.append(
            AtomFacts(
                inputs=tuple(inputs),
                outputs=outputs,
                memory_bytes=draw(st.integers(1, 5)),
                live_bytes=draw(st.integers(0, 4)),
                shared=tuple(draw(st.sets(st.sampled_from("ab"), max_size=2))),
            )
        )
        tensors |= {name: draw(small) for name in outputs}
    used = {name for atom in atoms for name in atom.inputs}
    ends = {name for atom in atoms for name in atom.outputs if name not in used}
    devices = tuple(
        GraphDevice(
            name=f"d{number}",
            seconds=tuple(draw(st.integers(1, 20)) / draw(st.sampled_from((1, 2))) for _ in atoms),
            memory_bytes=draw(st.sampled_from((4, 12, 100))),
            latency_s=draw(st.sampled_from((0.0, 0.5, 3.0))),
            overhead_s=draw(st.sampled_from((0.0, 0.5))),
            bytes_per_s=draw(st.sampled_from((0.5, 4.0, 1000.0))),
            handling_s_per_byte=draw(st.sampled_from((0.0, 0.25))),
            part_bytes=draw(st.sampled_from((0, 3))),
        )
        for number in range(draw(st.integers(1, 3)))
    )
    cuts = tuple(n for n in range(1, count) if draw(st.booleans()) or draw(st.booleans()))
    return GraphFacts(
        atoms=tuple(atoms),
        received_copies=draw(st.integers(0, 1)),
        sent_copies=draw(st.integers(0, 1)),
        shared_bytes={"a": draw(small), "b": draw(small)},
        tensor_bytes=tensors,
        results=frozenset(ends),
        cuts=cuts,
        devices=devices,
    )


def all_chains(facts: GraphFacts) -> Iterator[GraphPlan]:
    for count in range(len(facts.devices)):
        for cuts in combinations(facts.cuts, count):
            ends = (0, *cuts, len(facts.atoms))
            for order in permutations(facts.devices, count + 1):
                plan = GraphPlan(
                    stages=tuple(
                        GraphStage(device=device.name, atoms=range(start, stop))
                        for device, start, stop in zip(order, ends, ends[1:], strict=False)
                    )
                )
                if fits(plan, facts):
                    yield plan


def fits(plan: GraphPlan, facts: GraphFacts) -> bool:
    try:
        plan.check(facts)
    except PlanError:
        return False
    return True


def chain_score(plan: GraphPlan, facts: GraphFacts, objective: Objective) -> float:
    """One stage after the other, whether or not they wait for each other."""
    estimate = estimate_graph(facts, plan)
    if objective == "throughput":
        return estimate.interval_s
    latency = {device.name: device.latency_s for device in facts.devices}
    return sum(
        latency[each.device] + each.compute_s + each.receive_s + each.send_s
        for each in estimate.stages
    )


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@settings(max_examples=40)
@given(facts=random_facts())
def test_no_chain_is_better(objective: Objective, facts: GraphFacts) -> None:
    scores = [chain_score(plan, facts, objective) for plan in all_chains(facts)]
    found = best_chains(facts, objective).values()
    assert bool(found) == bool(scores)
    for each in found:
        each.check(facts)
    if scores:
        least = min(chain_score(each, facts, objective) for each in found)
        assert least == pytest.approx(min(scores))


@settings(max_examples=40)
@given(facts=random_facts())
def test_no_copies_give_more_results(facts: GraphFacts) -> None:
    """Every set of chains on devices of their own, whose ways are fast."""
    fast = tuple(replace(each, bytes_per_s=1e9) for each in facts.devices)
    facts = replace(facts, devices=fast)
    plans = list(all_chains(facts))
    sets: list[tuple[tuple[str, ...], float]] = [((), 0.0)]
    for plan in plans:
        rate = 1 / max(estimate_graph(facts, plan).interval_s, 1e-9)
        sets += [
            ((*devices, *plan.devices), known + rate)
            for devices, known in sets
            if not set(devices) & set(plan.devices)
        ]
    most = max(rate for _devices, rate in sets)
    choice = choose_graph_plan(facts, "throughput")
    assert (choice is None) == (not plans)
    if choice is not None:
        choice.plan.check(facts)
        # Copies that add less than a part of all are left out, and so are further devices.
        least = (1 - LEAST_GRAPH_GAIN) ** len(facts.devices)
        assert most * least <= choice.estimate.inputs_per_s <= most * (1 + 1e-9)
        alone = choose_graph_plan(replace(facts, may_copy=False), "throughput")
        assert alone is not None
        assert not alone.plan.copies


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@settings(max_examples=40)
@given(facts=random_facts())
def test_the_chosen_plan_fits_and_is_no_worse_than_one_device(
    objective: Objective, facts: GraphFacts
) -> None:
    choice = choose_graph_plan(facts, objective)
    if choice is None:
        assert not list(all_chains(facts))
        return
    choice.plan.check(facts)
    assert choice.estimate == estimate_graph(facts, choice.plan)
    if choice.alone is not None:
        assert choice.estimate.score(objective) <= choice.alone[1].score(objective)
    assert GraphPlan.from_json(choice.plan.to_json()) == choice.plan


@settings(max_examples=40)
@given(facts=random_facts())
def test_no_fork_is_better(facts: GraphFacts) -> None:
    """Every fork whose two runs do not need each other, by looking at the tensors."""
    count, expected = len(facts.atoms), set[tuple[GraphStage, ...]]()
    places = (0, *facts.cuts, count)
    for a, m, e in combinations(places, 3):
        first = {n for atom in facts.atoms[a:m] for n in atom.outputs}
        if any(first & set(atom.inputs) for atom in facts.atoms[m:e]):
            continue
        for one, two in permutations([device.name for device in facts.devices], 2):
            for middle in ((one, two), (two, one)):
                runs = ((one, 0, a), (middle[0], a, m), (middle[1], m, e), (one, e, count))
                plan = GraphPlan(
                    stages=tuple(
                        GraphStage(device=device, atoms=range(start, stop))
                        for device, start, stop in runs
                        if stop > start
                    )
                )
                if fits(plan, facts):
                    expected.add(plan.stages)
    found = list(forks(facts))
    assert {plan.stages for plan, _least_s in found} == expected
    for plan, least_s in found:
        assert least_s <= estimate_graph(facts, plan).latency_s * (1 + 1e-9)


@settings(max_examples=40)
@given(facts=random_facts())
def test_borders_are_those_of_the_tensors(facts: GraphFacts) -> None:
    crossing = crossing_bytes(facts)
    for place in range(1, len(facts.atoms)):
        made = {n for atom in facts.atoms[:place] for n in atom.outputs}
        later = {n for atom in facts.atoms[place:] for n in atom.inputs} | facts.results
        assert crossing[place] == sum(facts.tensor_bytes[name] for name in made & later)
        received, _sent = facts.border(range(place, len(facts.atoms)))
        _none, sent = facts.border(range(place))
        assert set(received) & made <= set(sent)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@settings(max_examples=40)
@given(facts=random_facts(), share=st.sampled_from((0.0, 0.5, 1.0)), data=st.data())
def test_a_plan_is_cut_where_inputs_end_early(
    objective: Objective, facts: GraphFacts, share: float, data: st.DataObject
) -> None:
    """And no chain, nor two halves, is expected to take less."""
    if not facts.cuts:
        return
    place = data.draw(st.sampled_from(facts.cuts))
    facts = replace(facts, exit_at=place, exit_share=share)
    chosen = choose_graph_plan(facts, objective)
    ends = (0, place, len(facts.atoms))
    halves = [
        GraphPlan(
            stages=tuple(
                GraphStage(device=device.name, atoms=range(*ends[n : n + 2]))
                for n, device in enumerate(pair)
            )
        )
        for pair in product(facts.devices, repeat=2)
    ]
    known = [plan for plan in (*all_chains(facts), *halves) if fits(plan, facts)]
    if chosen is None:
        assert not known
        return
    chosen.plan.check(facts)
    scores = [estimate_graph(facts, plan).score(objective) for plan in known]
    # A further device must save a share, and chains are compared by the sum of their stages.
    least = min(scores)
    if objective == "throughput":
        assert chosen.estimate.score(objective) * (1 - LEAST_GRAPH_GAIN) <= least * (1 + 1e-9)
    alone = chosen.alone
    assert alone is None or chosen.estimate.score(objective) <= alone[1].score(objective)


def even(count: int, seconds: float, **changes: float) -> GraphFacts:
    """Atoms one after the other, and two equal devices."""
    device = {
        "memory_bytes": 1000,
        "latency_s": 1e-4,
        "overhead_s": 1e-4,
        "bytes_per_s": 1e8,
        **changes,
    }
    return GraphFacts(
        atoms=tuple(
            AtomFacts(inputs=(f"t{n}",), outputs=(f"t{n + 1}",), memory_bytes=1)
            for n in range(count)
        ),
        tensor_bytes={f"t{n}": 1000 for n in range(count + 1)},
        results=frozenset((f"t{count}",)),
        cuts=tuple(range(1, count)),
        devices=tuple(
            GraphDevice(name=name, seconds=(seconds,) * count, **device)  # type: ignore[arg-type]
            for name in ("a", "b")
        ),
    )


def test_throughput_uses_both_devices_and_latency_one() -> None:
    facts = even(300, 1e-3)
    both = choose_graph_plan(facts, "throughput")
    assert both is not None
    assert [len(each.stages) for each in both.plan.each_copy] == [1, 1]
    one_graph = choose_graph_plan(replace(facts, may_copy=False), "throughput")
    assert one_graph is not None
    assert [len(stage.atoms) for stage in one_graph.plan.stages] == [150, 150]
    alone = choose_graph_plan(facts, "latency")
    assert alone is not None
    assert len(alone.plan.stages) == 1


def test_a_slow_way_leaves_a_device_out() -> None:
    choice = choose_graph_plan(even(20, 1e-3, bytes_per_s=1e4), "throughput")
    assert choice is not None
    assert len(choice.plan.devices) == 1


def test_few_inputs_under_way_on_a_long_way_limit_a_stream() -> None:
    facts = replace(even(10, 1e-3, latency_s=0.05), at_once=2, may_copy=False)
    choice = choose_graph_plan(facts, "throughput")
    assert choice is not None
    assert len(choice.plan.devices) == 2
    halves = 0.05 + 5e-3 + 2 * 1000 / 1e8
    assert choice.estimate.interval_s == pytest.approx(halves / 2)
    more = estimate_graph(replace(facts, at_once=20), choice.plan)
    assert more.interval_s == pytest.approx(5e-3 + 1e-4)


def test_a_device_computes_nothing_while_it_handles_bytes() -> None:
    facts = replace(even(10, 1e-3, handling_s_per_byte=1e-6), may_copy=False)
    choice = choose_graph_plan(facts, "throughput")
    assert choice is not None
    assert choice.estimate.interval_s == pytest.approx(5e-3 + 1e-4 + 2 * 1000 * 1e-6)


def test_two_branches_run_on_two_devices() -> None:
    """A stem, two branches of five atoms, and a join."""
    atoms = [AtomFacts(inputs=("in",), outputs=("stem",), memory_bytes=1)]
    for branch in "lr":
        name = "stem"
        for number in range(5):
            atoms.append(AtomFacts(inputs=(name,), outputs=(f"{branch}{number}",), memory_bytes=1))
            name = f"{branch}{number}"
    atoms.append(AtomFacts(inputs=("l4", "r4"), outputs=("out",), memory_bytes=1))
    facts = GraphFacts(
        atoms=tuple(atoms),
        tensor_bytes={name: 100 for atom in atoms for name in (*atom.inputs, *atom.outputs)},
        results=frozenset(("out",)),
        cuts=tuple(range(1, len(atoms))),
        devices=even(12, 1e-2).devices,
    )
    choice = choose_graph_plan(facts, "latency")
    assert choice is not None
    assert choice.alone is not None
    assert choice.estimate.latency_s < 0.65 * choice.alone[1].latency_s


@pytest.mark.parametrize(
    "bad",
    [None, {}, {"stages": []}, {"stages": [{"device": "a", "atoms": [1, 2]}]},
     {"stages": [{"device": "a", "atoms": [0, 0]}]}, {"stages": [{"device": 1, "atoms": [0, 1]}]},
     {"stages": [{"device": "a", "atoms": [0, True]}]}, {"stages": [[]]}],
)  # fmt: skip
def test_other_values_are_no_plans(bad: object) -> None:
    with pytest.raises(PlanError):
        GraphPlan.from_json(bad)
