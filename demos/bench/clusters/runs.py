"""Runs plans on an emulated cluster, in turn, and notes what was predicted and what came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

import edge
import edge.protocol.measurements
from demos.bench.clusters.arrangements import Option, Shares, options, shares
from demos.bench.clusters.bed import emulate
from demos.bench.clusters.steadiness import Machine, drift
from demos.bench.clusters.table import EmulatedCluster, Work
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal
from edge.protocol.step_times import PeerTimes, StepTimes
from partition import Estimate, Plan, describe_plan_in_words

ROUNDS = 2
"""Of the plans that are compared with each other; the others have one."""

REPLIES = 2
"""Of each plan in a round; before them it warms up."""

WARM_UP_TOKENS = 3

TRIES = 2
"""Of a plan's answers, while the machine is not quiet. Devices measure once, which takes longer:
they remember what their graphs usually take."""

MEASURING_LIMIT_S = 900.0
"""For a device, which waits for its turn to measure itself until slow ones are done."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One reply."""

    first_token_s: float
    tokens_per_s: float
    """By the median of the times between its tokens: what disturbs the machine for a moment is in
    a few of them only."""


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One plan, what was predicted of it, and what it did."""

    plan: Plan
    words: str
    predicted: Estimate
    work: Work
    answers: list[Answer] = field(default_factory=list)
    times: list[PeerTimes] = field(default_factory=list)
    """Where the peers' time went, in plan order."""

    @property
    def first_token_s(self) -> float:
        """The median."""
        return float(np.median([answer.first_token_s for answer in self.answers]))

    @property
    def tokens_per_s(self) -> float:
        """The median, of the tokens after the first."""
        return float(np.median([answer.tokens_per_s for answer in self.answers]))

    @property
    def predicted_s(self) -> float:
        """A whole answer."""
        return self.predicted.first_token_s + self._steps * self.predicted.token_s

    @property
    def actual_s(self) -> float:
        """The same from the medians."""
        return self.first_token_s + self._steps / self.tokens_per_s

    @property
    def _steps(self) -> int:
        return self.work.output_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """Everything that was run on one cluster."""

    cluster: EmulatedCluster
    proposal: Proposal
    chosen: Run
    others: tuple[Run, ...]
    by_speed: Run | None
    """Every layer on every device, slices by speed; only where that was asked for."""
    equal: Run | None
    """The same with equal slices."""
    drift: float = 0.0
    """By how much the machine itself was slower when plans answered than when it was measured."""
    set_aside: int = 0
    """So often a plan's answers did not count, as the machine was not quiet any more."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """Each plan once."""
        every = (self.chosen, *self.others, self.by_speed, self.equal)
        return tuple({id(run): run for run in every if run is not None}.values())

    @property
    def solo(self) -> Run | None:
        """The fastest single device; None where none has the memory."""
        alone = [run for run in self.runs if len(run.plan.devices) == 1]
        return min(alone, key=lambda run: run.actual_s, default=None)

    @property
    def best(self) -> Run:
        return min(self.runs, key=lambda run: run.actual_s)

    @property
    def compared(self) -> tuple[Run, ...]:
        """The plans that figures are made of, each once."""
        every = (self.chosen, self.solo, self.best, self.by_speed, self.equal)
        return tuple({id(run): run for run in every if run is not None}.values())


def run_cluster(
    cluster: EmulatedCluster, checkpoint: Path, cache: Path, machine: Machine
) -> ClusterRun:
    """Build the cluster, measure it, plan, run the plans, take the cluster down.

    Raises what `emulate` raises, EdgeError, and ValueError where a device was not measured.
    """
    wanted = load_options(cluster.work)
    edge.protocol.measurements.Profile.limit_s = MEASURING_LIMIT_S
    with (
        emulate(cluster.devices, cache) as addresses,
        edge.Cluster.connect(addresses) as peers,
    ):
        measured = _quietly(
            machine, lambda: peers.propose(checkpoint, wanted, measure="again"), tries=1
        )
        proposal = measured.done
        unmeasured = [each.name for each in proposal.cluster.devices if each.rates is None]
        if unmeasured:
            raise ValueError(f"{', '.join(unmeasured)}: not measured; {'; '.join(proposal.notes)}")
        compared = shares(proposal) if cluster.shares else None
        runs = _runs(proposal, cluster, compared)
        result = _result(cluster, proposal, runs, compared)
        answered: list[_Quietly[_Answered]] = []
        for round_ in range(ROUNDS):
            for run in result.compared[::-1] if round_ else runs:
                found = _quietly(machine, partial(_answers, run, peers, checkpoint))
                run.answers += found.done.answers
                run.times = _added(run.times, found.done.times)
                answered.append(found)
    return replace(
        result,
        drift=drift(measured.around_s, [each for found in answered for each in found.around_s]),
        set_aside=sum(found.set_aside for found in answered),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quietly(Generic[T]):
    """What was done, and what a round of the machine took before and after."""

    done: T
    around_s: tuple[float, float]
    set_aside: int


def _quietly(machine: Machine, do: Callable[[], T], *, tries: int = TRIES) -> _Quietly[T]:
    """Do it when the machine is quiet; again if it is not quiet any more afterwards."""
    done_so_often = 0
    while True:
        before_s = machine.wait()
        done = do()
        after_s = machine.time_s()
        done_so_often += 1
        is_quiet = machine.is_quiet(before_s) and machine.is_quiet(after_s)
        if is_quiet or done_so_often == tries:
            return _Quietly(done=done, around_s=(before_s, after_s), set_aside=done_so_often - 1)


def load_options(work: Work, plan: Plan | None = None) -> LoadOptions:
    """Memory for just this work."""
    return LoadOptions(
        plan="auto" if plan is None else plan,
        context_tokens=work.prompt_tokens + work.output_tokens,
        workload=edge.Workload(prompt_tokens=work.prompt_tokens, output_tokens=work.output_tokens),
    )


def _runs(proposal: Proposal, cluster: EmulatedCluster, compared: Shares | None) -> tuple[Run, ...]:
    """The chosen plan's first; each plan once."""
    wanted: list[Option] = list(options(proposal, everything=cluster.everything))
    if compared is not None:
        known = [each.plan for each in wanted]
        wanted += [each for each in (compared.by_speed, compared.equal) if each.plan not in known]
    return tuple(
        Run(
            plan=each.plan,
            words=describe_plan_in_words(each.plan, proposal.cluster),
            predicted=each.predicted,
            work=cluster.work,
        )
        for each in wanted
    )


def _result(
    cluster: EmulatedCluster, proposal: Proposal, runs: Sequence[Run], compared: Shares | None
) -> ClusterRun:
    def of(option: Option) -> Run:
        return next(run for run in runs if run.plan == option.plan)

    return ClusterRun(
        cluster=cluster,
        proposal=proposal,
        chosen=runs[0],
        others=tuple(runs[1:]),
        by_speed=None if compared is None else of(compared.by_speed),
        equal=None if compared is None else of(compared.equal),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    answers: list[Answer]
    times: list[PeerTimes]


def _answers(run: Run, peers: edge.Cluster, checkpoint: Path) -> _Answered:
    """Load the plan, warm it up, and time a few replies."""
    work = run.work
    options = load_options(work, run.plan)
    with peers.load(checkpoint, options, progress=False) as model:
        prompt = np.random.default_rng(1).integers(model.vocab_size, size=work.prompt_tokens)
        model.generate(prompt.tolist(), max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        model.measure()
        answers = [_timed(model, prompt.tolist(), work.output_tokens) for _ in range(REPLIES)]
        return _Answered(answers=answers, times=model.measure())


def _timed(model: edge.Model, prompt: list[int], num_tokens: int) -> Answer:
    times_s = [time.perf_counter()]
    for _ in model.stream(prompt, max_new_tokens=num_tokens, ignore_eos=True):
        times_s.append(time.perf_counter())
    return Answer(
        first_token_s=times_s[1] - times_s[0],
        tokens_per_s=1 / float(np.median(np.diff(times_s[1:]))),
    )


def _added(before: Sequence[PeerTimes], now: Sequence[PeerTimes]) -> list[PeerTimes]:
    """The counters of two rounds of the same plan together."""
    if not before:
        return list(now)
    return [
        replace(
            new,
            prompt=_sum(old.prompt, new.prompt),
            decode=_sum(old.decode, new.decode),
        )
        for old, new in zip(before, now, strict=True)
    ]


def _sum(one: StepTimes, other: StepTimes) -> StepTimes:
    names = [each.name for each in fields(StepTimes)]
    return StepTimes(**{name: getattr(one, name) + getattr(other, name) for name in names})
