"""Runs plans on an emulated cluster, in turn, and notes what was predicted and what came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

import edge
from demos.bench.clusters.arrangements import Option, Shares, options, shares
from demos.bench.clusters.bed import cores_here, emulate
from demos.bench.clusters.steadiness import Machine, drift, is_as_fast
from demos.bench.clusters.table import EmulatedCluster, Work
from edge.load_options import LoadOptions
from edge.planning import Proposal
from edge.step_times import PeerTimes, StepTimes
from partition import Estimate, Plan, describe_plan_in_words

ROUNDS = 2
"""Of the plans that are compared with each other; the others have one."""

REPLIES = 2
"""Of each plan in a round; before them it warms up."""

WARM_UP_TOKENS = 3

MEASURED = 2
"""At least so often, one after the other, and the last counts: emulated devices know by then how
long their graphs usually take, whatever the machine does at that moment."""

TRIES = 3
"""Of a plan's answers, while the machine is not as fast as it was when the devices were measured;
and of a whole cluster, when one of its plans found no such moment."""


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
    """So often a plan's answers did not count, as the machine's speed had changed."""

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


def run_cluster(cluster: EmulatedCluster, checkpoint: Path, cache: Path) -> ClusterRun:
    """Build the cluster, measure it, plan, run the plans, take the cluster down.

    Raises what `emulate` raises, EdgeError, and ValueError where a device was not measured.
    """
    wanted = load_options(cluster.work)
    machine = Machine(cores_here(cluster.devices))
    tries = 0
    with (
        emulate(cluster.devices, cache) as addresses,
        edge.Cluster.connect(addresses) as peers,
    ):

        def measure() -> Proposal:
            return peers.propose_as(checkpoint, wanted, measure="again")

        for left in reversed(range(TRIES)):
            measured = _Measured.of(machine, measure)
            proposal = measured.proposal
            if proposal.choice.predicted is None:
                raise ValueError(f"nothing is predicted: {'; '.join(proposal.notes)}")
            compared = shares(proposal) if cluster.shares else None
            runs = _runs(proposal, cluster, compared)
            result = _result(cluster, proposal, runs, compared)
            answering = _Answering(machine, measured.usual_s, peers, checkpoint)
            is_steady = answering.all(result, must_be_steady=left > 0)
            tries += answering.tries
            if is_steady:
                break
    done = sum(len(run.answers) for run in result.runs) // REPLIES
    return replace(
        result,
        drift=drift(measured.around_s, answering.around_s),
        set_aside=tries - done,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A proposal, and how fast the machine was meanwhile."""

    proposal: Proposal
    around_s: tuple[float, float]
    usual_s: float

    @classmethod
    def of(cls, machine: Machine, measure: Callable[[], Proposal]) -> _Measured:
        """Measure until the machine was as fast afterwards as before."""
        usual_s = machine.settled_s()
        for number in range(MEASURED * TRIES):
            before_s = machine.wait_until(usual_s)
            proposal = measure()
            after_s = machine.time_s()
            if number + 1 >= MEASURED and is_as_fast(after_s, before_s):
                break
        return cls(
            proposal=proposal,
            around_s=(before_s, after_s),
            usual_s=(before_s + after_s) / 2,
        )


class _Answering:
    """Has plans answer while the machine is as fast as it was when it was measured."""

    def __init__(
        self, machine: Machine, usual_s: float, peers: edge.Cluster, checkpoint: Path
    ) -> None:
        self._machine = machine
        self._usual_s = usual_s
        self._peers = peers
        self._checkpoint = checkpoint
        self.around_s: list[float] = []
        """What a round of the machine took before and after the answers that count."""
        self.tries = 0

    def all(self, result: ClusterRun, *, must_be_steady: bool) -> bool:
        """Every plan in turn, the compared ones in several rounds.

        False once a plan found no steady moment; where that is not wanted its last answers count.
        """
        for round_ in range(ROUNDS):
            for run in result.compared[::-1] if round_ else result.runs:
                if not self._steadily(run) and must_be_steady:
                    return False
        return True

    def _steadily(self, run: Run) -> bool:
        for left in reversed(range(TRIES)):
            before_s = self._machine.wait_until(self._usual_s)
            answers, times = _answers(run, self._peers, self._checkpoint)
            after_s = self._machine.time_s()
            self.tries += 1
            is_steady = all(is_as_fast(each, self._usual_s) for each in (before_s, after_s))
            if is_steady or not left:
                run.answers += answers
                run.times = _added(run.times, times)
                self.around_s += (before_s, after_s)
                break
        return is_steady


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


def _answers(
    run: Run, peers: edge.Cluster, checkpoint: Path
) -> tuple[list[Answer], list[PeerTimes]]:
    """Load the plan, warm it up, and time a few replies; where the peers' time went."""
    work = run.work
    options = load_options(work, run.plan)
    with peers.load_as(checkpoint, options, progress=False) as model:
        prompt = np.random.default_rng(1).integers(model.vocab_size, size=work.prompt_tokens)
        model.generate(prompt.tolist(), max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        model.measure()
        answers = [_timed(model, prompt.tolist(), work.output_tokens) for _ in range(REPLIES)]
        return answers, model.measure()


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
