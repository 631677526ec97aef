"""The plan of a graph that takes least: which device computes which run of atoms.

Exact in two spaces. A chain: runs of atoms one after the other, each device at most once, by the
sum or the maximum of what they take (dynamic programming over places and sets of devices). A fork:
a device computes a stem, then one of two runs that do not need each other while a second device
computes the other, then the rest. Devices stay out where that takes less.

For throughput, several devices may have a copy of the graph each, or a chain of them one. The best
division of devices among copies is exact for chains of the fastest devices (dynamic programming
over sets of devices); further devices have a copy alone.

Where inputs may end early, every plan is cut, a device may also have both halves, and forks are not
looked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

from edge.partition.cost.graph_estimate import estimate_graph, intervals
from edge.partition.plan.graph_plan import (
    MOST_GRAPH_COPIES,
    GraphEstimate,
    GraphFacts,
    GraphPlan,
    GraphStage,
    Objective,
)

MOST_DEVICES = 4
"""Devices of one plan. The fastest are taken of more."""
MOST_CUTS = 120
"""Places that are compared. Of more: in each stretch of equal time, the one with fewest bytes."""
_MOST_FORK_CUTS = 48
LEAST_GRAPH_GAIN = 0.03
"""Least share of time that a further device must save. Predictions are no better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChoice:
    """The best plan, what it takes, and the best of one device alone."""

    plan: GraphPlan
    estimate: GraphEstimate
    alone: tuple[GraphPlan, GraphEstimate] | None
    """None: no device has memory for the whole graph."""


def choose_graph_plan(facts: GraphFacts, objective: Objective) -> GraphChoice | None:
    """The plan with the least latency, or the least interval. None: the devices together have no
    memory for the graph."""
    alone = _best(facts, objective, _alone(facts))
    chains = best_chains(facts, objective)
    found = [*chains.values(), *_two_halves(facts)]
    if alone is not None:  # of the fastest devices, which chains are made of, none may have room
        found.append(alone[0])
    if objective == "throughput" and facts.may_copy:
        found += best_copies(facts, chains)
    best = _best(facts, objective, found)
    if objective == "latency" and best is not None and facts.exit_at is None:
        best = best_fork(facts, best)
    if best is None:
        return None
    if alone is not None and best[1].score(objective) > alone[1].score(objective) * (
        1 - LEAST_GRAPH_GAIN
    ):
        best = alone
    return GraphChoice(plan=best[0], estimate=best[1], alone=alone)


def best_copies(facts: GraphFacts, chains: Mapping[frozenset[str], GraphPlan]) -> list[GraphPlan]:
    """For each set of devices, the copies of the graph on them with the most results per second.
    chains: the best one of each set."""
    plans = dict(chains)
    for plan in _alone(facts):
        known = plans.get(frozenset(plan.devices))
        if known is None or _interval(facts, plan) < _interval(facts, known):
            plans[frozenset(plan.devices)] = plan
    rates = {names: 1 / max(_interval(facts, plan), 1e-9) for names, plan in plans.items()}
    joint = sorted(frozenset[str]().union(*chains))
    best: dict[frozenset[str], tuple[float, tuple[frozenset[str], ...]]] = {frozenset(): (0.0, ())}
    for name in joint:  # copies in the order of their first devices
        for used, (rate, copies) in list(best.items()):
            for names in plans:
                if name == min(names) and used.isdisjoint(names):
                    key, value = used | names, (rate + rates[names], (*copies, names))
                    if key not in best or value[0] > best[key][0]:
                        best[key] = value
    further = [names for names in plans if names.isdisjoint(joint)]
    found = []
    for _rate, copies in best.values():
        whole = (*copies, *further)[:MOST_GRAPH_COPIES]
        least = LEAST_GRAPH_GAIN * sum(map(rates.__getitem__, whole))
        worth = [plans[names] for names in whole if rates[names] >= least]
        worth.sort(key=lambda plan: estimate_graph(facts, plan).latency_s)
        if worth:
            found.append(GraphPlan(stages=worth[0].stages, copies=tuple(worth[1:])))
    return found


def _interval(facts: GraphFacts, plan: GraphPlan) -> float:
    return estimate_graph(facts, plan).interval_s


def candidate_cuts(facts: GraphFacts, most: int) -> list[int]:
    """At most about `most` places, spread over the time of the graph."""
    cuts = list(facts.cuts)
    if len(cuts) <= most:
        return cuts
    needed = [each for each in cuts if each == facts.exit_at]
    crossing = crossing_bytes(facts)
    mean = [
        sum(device.seconds[number] for device in facts.devices)
        for number in range(len(facts.atoms))
    ]
    total, done, allowed = sum(mean) or 1.0, 0.0, frozenset(cuts)
    kept: dict[int, int] = {}
    for number, seconds in enumerate(mean):
        if number in allowed:
            stretch = int(done / total * most)
            known = kept.get(stretch)
            if known is None or crossing[number] < crossing[known]:
                kept[stretch] = number
        done += seconds
    return sorted({*kept.values(), *needed})


def crossing_bytes(facts: GraphFacts) -> list[int]:
    """Bytes of the tensors that cross each place."""
    last = _last_uses(facts)
    change = [0] * (len(facts.atoms) + 2)
    for number, atom in enumerate(facts.atoms):
        for name in atom.outputs:
            if last.get(name, number) > number:
                change[number + 1] += facts.tensor_bytes[name]
                change[last[name] + 1] -= facts.tensor_bytes[name]
    found, now = [], 0
    for each in change:
        now += each
        found.append(now)
    return found


def best_chains(facts: GraphFacts, objective: Objective) -> dict[frozenset[str], GraphPlan]:
    """For each set of devices that fits, the chain of all of them whose sum of stage times, or
    whose slowest stage, is least."""
    places = [0, *candidate_cuts(facts, MOST_CUTS), len(facts.atoms)]
    devices = _fastest(facts)
    costs = _StageCosts(facts, places)
    best: dict[tuple[int, int], tuple[float, tuple[int, int, int] | None]] = {(0, 0): (0.0, None)}
    for end in range(1, len(places)):
        for begin in range(end):
            if facts.exit_at is not None and places[begin] < facts.exit_at < places[end]:
                continue
            weight = facts.weight(range(places[begin], places[end]))
            received, sent, memory = costs.border(begin, end)
            for place, index in enumerate(devices):
                device = facts.devices[index]
                if memory > device.memory_bytes:
                    continue
                compute_s = costs.compute(index, begin, end)
                cost = weight * (
                    costs.total(index, begin, end)
                    if objective == "latency"
                    else max(intervals(facts, device, compute_s, received, sent))
                )
                for used in range(1 << len(devices)):
                    known = best.get((begin, used))
                    if known is None or used & 1 << place:
                        continue
                    value = known[0] + cost if objective == "latency" else max(known[0], cost)
                    key = end, used | 1 << place
                    if key not in best or value < best[key][0]:
                        best[key] = value, (begin, used, index)
    found = {}
    for last in [each for each in best if each[0] == len(places) - 1]:
        key, stages = last, list[GraphStage]()
        while (back := best[key][1]) is not None:
            begin, used, index = back
            atoms = range(places[begin], places[key[0]])
            stages.insert(0, GraphStage(device=facts.devices[index].name, atoms=atoms))
            key = begin, used
        plan = GraphPlan(stages=tuple(stages))
        found[frozenset(plan.devices)] = plan
    return found


def best_fork(
    facts: GraphFacts, known: tuple[GraphPlan, GraphEstimate]
) -> tuple[GraphPlan, GraphEstimate]:
    """The fork with the least latency, if it is less than that of the known plan."""
    best = known
    for plan, least_s in forks(facts):
        if least_s < best[1].latency_s:
            estimate = estimate_graph(facts, plan)
            if estimate.latency_s < best[1].latency_s:
                best = plan, estimate
    return best


def forks(facts: GraphFacts) -> Iterator[tuple[GraphPlan, float]]:
    """Plans that compute two runs of atoms at once on two devices, and seconds that each takes at
    least."""
    if len(facts.devices) < 2:
        return
    needs = _needs(facts)
    places = [0, *candidate_cuts(facts, _MOST_FORK_CUTS), len(facts.atoms)]
    order = _fastest(facts)
    names = [device.name for device in facts.devices]
    costs = _StageCosts(facts, places)
    memory = {device.name: device.memory_bytes for device in facts.devices}
    further = {device.name: device.part_bytes for device in facts.devices}
    count, last = len(facts.atoms), len(places) - 1

    def memory_of(run: tuple[int, int]) -> int:
        return costs.border(*run)[2] if run[0] < run[1] else 0

    @cache
    def latest_needs(middle: int) -> list[int]:
        """By the end of a run from `middle` on: the last atom before it that the run needs."""
        found = [-1] * (middle + 1)
        for number in range(middle, len(facts.atoms)):
            before = (need for need in needs[number] if need < middle)
            found.append(max((found[-1], *before)))
        return found

    for a, begin in enumerate(places[:-2]):
        for b in range(a + 1, len(places) - 1):
            middle = places[b]
            latest = latest_needs(middle)
            for e, end in enumerate(places[b + 1 :], b + 1):
                if latest[end] >= begin:
                    break
                inner, at = ((begin, middle), (middle, end)), ((a, b), (b, e))
                for one, two in permutations(order, 2):
                    first, second = names[one], names[two]
                    for away in range(2):  # which of the two runs the second device has
                        there, parts = memory_of(at[away]), (begin > 0) + (end < count)
                        here = memory_of(at[1 - away]) + parts * further[first]
                        here += memory_of((0, a)) + memory_of((e, last))
                        if there > memory[second] or here > memory[first]:
                            continue
                        runs = [
                            (second if which == away else first, *inner[which]) for which in (0, 1)
                        ]
                        rest_s = costs.total(one, e, len(places) - 1)
                        own_s = costs.total(one, 0, a) + costs.total(one, *(((b, e), (a, b))[away]))
                        away_s = costs.total(two, *(((a, b), (b, e))[away]))
                        yield (
                            _plan([(first, 0, begin), *runs, (first, end, len(facts.atoms))]),
                            max(own_s + rest_s, away_s),
                        )


def _plan(runs: Sequence[tuple[str, int, int]]) -> GraphPlan:
    return GraphPlan(
        stages=tuple(
            GraphStage(device=device, atoms=range(start, stop))
            for device, start, stop in runs
            if stop > start
        )
    )


def _two_halves(facts: GraphFacts) -> list[GraphPlan]:
    """What is before the place where inputs end early on one device, the rest on any."""
    if facts.exit_at is None:
        return []
    memory = {device.name: device.memory_bytes for device in facts.devices}
    further = {device.name: device.part_bytes for device in facts.devices}
    count = len(facts.atoms)
    halves = facts.memory(range(facts.exit_at)), facts.memory(range(facts.exit_at, count))
    return [
        _plan([(one, 0, facts.exit_at), (two, facts.exit_at, count)])
        for one, two in product(memory, repeat=2)
        if halves[0] + (one == two) * (halves[1] + further[one]) <= memory[one]
        and halves[1] <= memory[two]
    ]


def _alone(facts: GraphFacts) -> list[GraphPlan]:
    count, middle = len(facts.atoms), facts.exit_at or 0
    needed = facts.memory(range(middle)) + facts.memory(range(middle, count))
    return [
        _plan([(device.name, 0, middle), (device.name, middle, count)])
        for device in facts.devices
        if needed + device.part_bytes * (middle > 0) <= device.memory_bytes
    ]


def _best(
    facts: GraphFacts, objective: Objective, plans: Sequence[GraphPlan]
) -> tuple[GraphPlan, GraphEstimate] | None:
    best: tuple[GraphPlan, GraphEstimate] | None = None
    for plan in plans:
        estimate = estimate_graph(facts, plan)
        score = estimate.score(objective), len(estimate.stages)
        if best is None or score < (best[1].score(objective), len(best[1].stages)):
            best = plan, estimate
    return best


def _fastest(facts: GraphFacts) -> list[int]:
    order = sorted(range(len(facts.devices)), key=lambda index: sum(facts.devices[index].seconds))
    return order[:MOST_DEVICES]


def _last_uses(facts: GraphFacts) -> dict[str, int]:
    """The last atom that uses each tensor; results are used behind all."""
    last: dict[str, int] = {}
    for number, atom in enumerate(facts.atoms):
        last.update(dict.fromkeys(atom.inputs, number))
    return last | dict.fromkeys(facts.results, len(facts.atoms))


def _needs(facts: GraphFacts) -> list[list[int]]:
    """The atoms whose tensors each atom uses."""
    makers = {name: number for number, atom in enumerate(facts.atoms) for name in atom.outputs}
    return [[makers[name] for name in atom.inputs if name in makers] for atom in facts.atoms]


class _StageCosts:
    """Sums over runs of atoms between places, from running totals."""

    def __init__(self, facts: GraphFacts, places: Sequence[int]) -> None:
        self._facts = facts
        self._places = places
        self._seconds = []
        for device in facts.devices:
            total = [0.0]
            for each in device.seconds:
                total.append(total[-1] + each)
            self._seconds.append(total)
        self._borders = self._all_borders()

    def compute(self, device: int, begin: int, end: int) -> float:
        totals = self._seconds[device]
        return totals[self._places[end]] - totals[self._places[begin]]

    def total(self, device: int, begin: int, end: int) -> float:
        """Seconds of a stage alone; of an empty one, none."""
        if begin == end:
            return 0.0
        received, sent, _memory = self.border(begin, end)
        facts = self._facts.devices[device]
        moved_s = (received + sent) / facts.bytes_per_s
        return facts.latency_s + self.compute(device, begin, end) + moved_s

    def border(self, begin: int, end: int) -> tuple[int, int, int]:
        """Bytes received, bytes sent, bytes of memory."""
        return self._borders[begin, end]

    def _all_borders(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """For each begin, grow the run by one place after the other."""
        facts, found = self._facts, {}
        last = _last_uses(facts)
        makers = {n: number for number, atom in enumerate(facts.atoms) for n in atom.outputs}
        ending: dict[int, list[str]] = {}
        for name, number in last.items():
            ending.setdefault(number, []).append(name)
        for begin, start in enumerate(self._places[:-1]):
            received, sent, memory, live, seen, shared = 0, 0, 0, 0, set[str](), set[str]()
            place = begin + 1
            for number in range(start, len(facts.atoms)):
                atom = facts.atoms[number]
                for name in atom.inputs:
                    if name not in seen and makers.get(name, -1) < start:
                        seen.add(name)
                        received += facts.tensor_bytes[name]
                for name in atom.outputs:
                    if name in last:
                        sent += facts.tensor_bytes[name]
                for name in ending.get(number, ()):  # nobody behind this atom needs them
                    if makers.get(name, -1) >= start:
                        sent -= facts.tensor_bytes[name]
                memory, live = memory + atom.memory_bytes, max(live, atom.live_bytes)
                memory += sum(facts.shared_bytes[n] for n in atom.shared if n not in shared)
                shared.update(atom.shared)
                if number + 1 == self._places[place]:
                    moved = facts.received_copies * received + facts.sent_copies * sent
                    found[begin, place] = received, sent, memory + live + moved
                    place += 1
        return found
