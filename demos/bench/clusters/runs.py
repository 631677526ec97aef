"""What was said of plans and what they were, in turn with the best single peer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

import edge
from edge.demos.bench.results import Conditions, Metric, append
from edge.partition import Estimate, Parallel, Plan, Stage, describe_plan_in_words
from edge.partition.plan.shard import whole_shard

PROMPT_TOKENS = 16
NEW_TOKENS = 48
ROUNDS = 3
"""Each measures anew: the speed of a machine moves within a minute, and a prediction with it."""

ANSWERS = 5
"""Answers of each plan in a round."""

WITHIN = 0.1
LEAST_OF_SOLO = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan on one cluster; the fields are the columns of the files.

    Tokens per second after the first, of replies in turn with those of the best single peer:
    `times_solo` is the median of one over the other; None where none has the memory. It is 1 where
    the plan is the best single peer. `said_over_was`, the median over the rounds, is more than 1
    where too much was said.
    """

    date: str
    commit: str
    cluster: str
    shape: str
    asked: str
    plan: str
    said_tokens_per_s: float
    tokens_per_s_p20: float
    tokens_per_s: float
    tokens_per_s_p80: float
    said_over_was: float
    said_first_token_s: float
    first_token_s: float
    times_solo: float | None
    hardware: str
    versions: str

    @property
    def is_within(self) -> bool:
        return abs(self.said_over_was - 1) <= WITHIN

    @property
    def keeps_up(self) -> bool:
        """Whether `auto` was as fast as the best single peer."""
        return self.asked != "auto" or self.times_solo is None or self.times_solo >= LEAST_OF_SOLO


def measured_rows(
    cluster: edge.Cluster,
    checkpoint: Path,
    asked: Sequence[Parallel],
    *,
    name: str,
    shape: str,
    conditions: Conditions,
    rounds: int = ROUNDS,
) -> list[Row]:
    """In each round: measure the peers anew, load every plan, and let all answer in turn."""
    sample = [_round(cluster, checkpoint, asked) for _ in range(rounds)]
    rows = []
    for plan in asked:
        found = [each[plan] for each in sample]
        last = found[-1].proposal
        speeds = [speed for each in found for speed in each.tokens_per_s]
        low, middle, high = Metric(name="decode", unit="tok/s", values=speeds).percentiles
        ratios = [each.times_solo for each in found]
        rows.append(
            Row(
                **asdict(conditions),
                cluster=name,
                shape=shape,
                asked=plan,
                plan=describe_plan_in_words(last.plan, last.cluster),
                said_tokens_per_s=_short(median(each.said.tokens_per_s for each in found)),
                tokens_per_s_p20=low,
                tokens_per_s=middle,
                tokens_per_s_p80=high,
                said_over_was=round(
                    median(each.said.tokens_per_s / median(each.tokens_per_s) for each in found), 3
                ),
                said_first_token_s=_short(median(each.said.first_token_s for each in found)),
                first_token_s=_short(median(each.first_token_s for each in found)),
                times_solo=None
                if ratios[0] is None
                else round(median(each for each in ratios if each is not None), 3),
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """What one plan was said to be, and was, in one round."""

    proposal: edge.Proposal
    said: Estimate
    tokens_per_s: Sequence[float]
    first_token_s: float
    times_solo: float | None
    """Median of the answers in turn; None where no peer has the memory."""


def _round(
    cluster: edge.Cluster, checkpoint: Path, asked: Sequence[Parallel]
) -> dict[Parallel, _Answers]:
    workload = edge.Workload(prompt_tokens=PROMPT_TOKENS, output_tokens=NEW_TOKENS)
    options = edge.LoadOptions(context_tokens=PROMPT_TOKENS + NEW_TOKENS, workload=workload)
    cluster.propose(checkpoint, options, measure="again")
    proposals = {plan: cluster.propose(checkpoint, options, plan=plan) for plan in asked}
    solo = _solo(proposals[asked[0]])
    wanted = [*([solo] if solo else []), *(each.plan for each in proposals.values())]
    with contextlib.ExitStack() as stack:
        models = {}
        for plan in wanted:  # equal plans are one model
            if plan.stages not in models:
                loaded = cluster.load(checkpoint, options, plan=plan, progress=False)
                models[plan.stages] = stack.enter_context(loaded)
        chance = np.random.default_rng(1)
        replies: dict[object, list[tuple[float, float]]] = {stages: [] for stages in models}
        for number in range(ANSWERS + 1):
            prompt = chance.integers(256, size=PROMPT_TOKENS).tolist()  # none is found again
            for stages, model in models.items():
                reply = model.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
                if number:  # the first warms up
                    figures = reply.statistics
                    tokens_per_s = figures["tokens_per_s"]
                    assert tokens_per_s is not None, "48 tokens have a rate"
                    replies[stages].append((tokens_per_s, figures["first_token_s"]))
    found: dict[Parallel, _Answers] = {}
    for asked_for, proposal in proposals.items():
        said = proposal.predict(prompt_tokens=PROMPT_TOKENS, output_tokens=NEW_TOKENS)
        if said is None:
            raise ValueError(f"a peer was not measured; {proposal.notes}")
        own = replies[proposal.plan.stages]
        ratios = (
            [one[0] / other[0] for one, other in zip(own, replies[solo.stages], strict=True)]
            if solo
            else []
        )
        found[asked_for] = _Answers(
            proposal=proposal,
            said=said,
            tokens_per_s=[each[0] for each in own],
            first_token_s=median(each[1] for each in own),
            times_solo=median(ratios) if ratios else None,
        )
    return found


def _solo(proposal: edge.Proposal) -> Plan | None:
    """All of the model on the device that should be fastest alone; None where none has room."""
    if proposal.choice.solo is None:
        return None
    model = proposal.model
    vocab = range(model.vocab_size)
    whole = whole_shard(proposal.choice.solo.device, model, vocab=vocab)
    stage = Stage(layers=range(model.num_layers), shards=(whole,))
    return Plan(model=model.name, version=0, stages=(stage,))


class Report:
    """Rows as they come, in the terminal and, if they are to be kept, in a file."""

    def __init__(self, path: Path | None) -> None:
        self.console = Console(width=160)
        self.rows: list[Row] = []
        self._path = path

    def add(self, found: Sequence[Row]) -> None:
        self.rows += found
        self.console.print(table(found))
        if self._path is not None:
            append(found, self._path)

    def end(self) -> None:
        self.console.print(table(self.rows))
        self.console.print(summary(self.rows), highlight=False)


def table(rows: Iterable[Row]) -> Table:
    """For people."""
    found = Table(title="said / was", title_justify="left")
    for name in ("cluster", "asked", "plan"):
        found.add_column(name, overflow="fold")
    for name in ("tok/s", "said over was", "first token s", "x best peer alone"):
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(
            f"{row.cluster} ({row.shape})",
            row.asked,
            row.plan,
            f"{row.said_tokens_per_s:g} / {row.tokens_per_s:g}",
            f"{row.said_over_was:.2f}" + ("" if row.is_within else " !"),
            f"{row.said_first_token_s:g} / {row.first_token_s:g}",
            "" if row.times_solo is None else f"{row.times_solo:.2f}" + "!" * (not row.keeps_up),
        )
    return found


def summary(rows: Sequence[Row]) -> str:
    """Both bars in a line."""
    within = sum(row.is_within for row in rows)
    alone = [row.times_solo for row in rows if row.asked == "auto" and row.times_solo is not None]
    least = f"{min(alone):.2f}" if alone else "-"
    return (
        f"within {WITHIN:.0%}: {within} of {len(rows)} "
        f"({within / max(1, len(rows)):.0%}; bar 90%); "
        f"auto over the best peer alone: {least} at least (bar {LEAST_OF_SOLO})"
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")
