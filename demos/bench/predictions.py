"""Is the planner right? What was said of plans and what they were, in turn with the best peer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

import click
from rich.console import Console
from rich.table import Table

import edge
from edge.demos.bench import case, results
from edge.demos.bench.clusters.bed import open_bed, why_not
from edge.demos.bench.clusters.table import CASES, Device
from edge.demos.bench.results import Conditions, Metric
from edge.demos.bench.turns import in_turn, random_prompt
from edge.demos.shapes import SHAPES, checkpoint, described
from edge.host.cache_paths import CACHE_VARIABLE
from edge.partition import Estimate, Parallel, Plan, Stage, describe_plan_in_words
from edge.partition.plan.shard import whole_shard

LOCAL_CLUSTER = Path(__file__).with_name("local_cluster.csv")
PREDICTIONS = Path(__file__).with_name("predictions.csv")
LIMIT_S = 45 * 60.0
"""After which no further local cluster is begun; one takes about three minutes."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A cluster to be tried; it is opened with a folder for its caches."""

    name: str
    shape: str
    asked: tuple[Parallel, ...]
    open: Callable[[Path], AbstractContextManager[edge.Cluster]]


def _measured_rows(
    cluster: edge.Cluster, path: Path, ground: Ground, conditions: Conditions, rounds: int
) -> list[Row]:
    """In each round: measure the peers anew, load every plan, and let all answer in turn."""
    sample = [_round(cluster, path, ground.asked) for _ in range(rounds)]
    rows = []
    for plan in ground.asked:
        found = [each[plan] for each in sample]
        last = found[-1].proposal
        speeds = [speed for each in found for speed in each.tokens_per_s]
        low, middle, high = Metric(name="decode", unit="tok/s", values=speeds).percentiles
        ratios = [each.times_solo for each in found if each.times_solo is not None]
        too_much = [each.said.tokens_per_s / median(each.tokens_per_s) for each in found]
        rows.append(
            Row(
                **asdict(conditions),
                cluster=ground.name,
                shape=described(ground.shape),
                asked=plan,
                plan=describe_plan_in_words(last.plan, last.cluster),
                said_tokens_per_s=_short(median(each.said.tokens_per_s for each in found)),
                tokens_per_s_p20=low,
                tokens_per_s=middle,
                tokens_per_s_p80=high,
                said_over_was=round(median(too_much), 3),
                said_first_token_s=_short(median(each.said.first_token_s for each in found)),
                first_token_s=_short(median(each.first_token_s for each in found)),
                times_solo=round(median(ratios), 3) if ratios else None,
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
    cluster: edge.Cluster, path: Path, asked: Sequence[Parallel]
) -> dict[Parallel, _Answers]:
    workload = edge.Workload(prompt_tokens=PROMPT_TOKENS, output_tokens=NEW_TOKENS)
    options = edge.LoadOptions(
        context_tokens=PROMPT_TOKENS + NEW_TOKENS, workload=workload, speculate="off"
    )
    cluster.propose(path, options, measure="again")
    proposals = {plan: cluster.propose(path, options, plan=plan) for plan in asked}
    solo = _solo(proposals[asked[0]])
    wanted = [*([solo] if solo else []), *(each.plan for each in proposals.values())]
    with contextlib.ExitStack() as stack:
        models = {}
        for plan in wanted:  # equal plans are one model
            if plan.stages not in models:
                loaded = cluster.load(path, options, plan=plan, progress=False)
                models[plan.stages] = stack.enter_context(loaded)
        turns = list(in_turn({each: _side(model) for each, model in models.items()}, ANSWERS))
    found: dict[Parallel, _Answers] = {}
    for asked_for, proposal in proposals.items():
        said = proposal.predict(prompt_tokens=PROMPT_TOKENS, output_tokens=NEW_TOKENS)
        if said is None:
            raise ValueError(f"a peer was not measured; {proposal.notes}")
        own = [turn[proposal.plan.stages] for turn in turns]
        ratios = [turn[proposal.plan.stages][0] / turn[solo.stages][0] for turn in turns if solo]
        found[asked_for] = _Answers(
            proposal=proposal,
            said=said,
            tokens_per_s=[each[0] for each in own],
            first_token_s=median(each[1] for each in own),
            times_solo=median(ratios) if ratios else None,
        )
    return found


def _side(model: edge.Model) -> Callable[[int], tuple[float, float]]:
    """Tokens per second, and seconds to the first token."""

    def answer(number: int) -> tuple[float, float]:
        prompt = random_prompt(model, PROMPT_TOKENS, number)
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        return reply.tokens_per_s, reply.statistics["first_token_s"]

    return answer


def _solo(proposal: edge.Proposal) -> Plan | None:
    """All of the model on the device that should be fastest alone; None where none has room."""
    if proposal.choice.solo is None:
        return None
    model = proposal.model
    vocab = range(model.vocab_size)
    whole = whole_shard(proposal.choice.solo.device, model, vocab=vocab)
    stage = Stage(layers=range(model.num_layers), shards=(whole,))
    return Plan(model=model.name, version=0, stages=(stage,))


def table(rows: Iterable[Row]) -> Table:
    """For people."""
    found = Table(
        "cluster", "asked", "plan", "tok/s", "said over was", "first token s", "x best peer alone",
        title="said / was",
    )  # fmt: skip
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


def _try(grounds: Iterable[Ground], rounds: int, folder: Path, path: Path | None) -> None:
    """Tables as they come, and rows in the file if they are to be kept."""
    console, rows, failures = Console(width=160), list[Row](), list[str]()
    conditions = results.conditions()
    for ground in grounds:
        made = checkpoint(ground.shape, folder)
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            os.environ[CACHE_VARIABLE] = cache  # what was measured before is measured again
            try:
                with ground.open(Path(cache)) as cluster:
                    found = _measured_rows(cluster, made, ground, conditions, rounds)
            except (edge.EdgeError, OSError, ValueError, subprocess.CalledProcessError) as error:
                failures.append(f"{ground.name}: {error}")
                continue
        rows += found
        console.print(table(found))
        if path is not None:
            results.append(found, path)
    console.print(table(rows))
    console.print(summary(rows), highlight=False)
    if failures:
        raise SystemExit("\n".join(f"failed: {each}" for each in failures))


def _local(backends: Sequence[str], threads: int, _cache: Path) -> edge.Cluster:
    return edge.Cluster.local(len(backends), threads=threads, backend=backends)


@case.command(
    click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)),
                 default=("small", "M", "H"), show_default=True),
    click.option("--peers", "counts", multiple=True, type=click.IntRange(1, 16),
                 default=(1, 2, 3, 4), show_default=True),
    click.option("--backend", "backends", multiple=True, metavar="BACKEND",
                 help="Of the first peer, the second, and so on; may be repeated."),
    case.number("--threads", 1, help="Of each."),
    case.rounds(ROUNDS),
    case.FOLDER,
)  # fmt: skip
def local_cluster(
    shapes: Sequence[str],
    counts: Sequence[int],
    backends: Sequence[str],
    threads: int,
    rounds: int,
    folder: Path,
    append: bool,
) -> None:
    """Are auto, tensor and pipeline on peers of this machine what they are said to be?

    Every plan answers in turn with the best single peer, in the same
    minutes. Two bars: what was said within 10 % for 90 % of the cases, and `auto` never below 0.97
    of the best peer alone. Nothing else may run meanwhile. Rows are in local_cluster.csv.
    """
    end_s = time.monotonic() + LIMIT_S

    def grounds() -> Iterator[Ground]:
        for count in counts:
            for shape in shapes:
                if time.monotonic() > end_s:
                    click.echo(f"not run for want of time: {count} peers, {shape}")
                    continue
                own = (*backends, *["auto"] * count)[:count]
                yield Ground(
                    name=f"{count} local{''.join(f', {each}' for each in backends[:count])}",
                    shape=shape,
                    asked=get_args(Parallel) if count > 1 else ("auto",),
                    open=partial(_local, own, threads),
                )

    _try(grounds(), rounds, folder, LOCAL_CLUSTER if append else None)


@contextlib.contextmanager
def _pinned(devices: Sequence[Device], cache: Path) -> Iterator[edge.Cluster]:
    with open_bed(devices, cache) as bed, edge.Cluster.connect(bed.addresses) as cluster:
        yield cluster


@case.command(
    click.option("--only", "names", multiple=True, metavar="NAME",
                 type=click.Choice([each.name for each in CASES]),
                 help="Try this cluster; may be repeated.  [default: all]"),
    click.option("--list", "is_list", is_flag=True, help="Show the clusters and end."),
    case.rounds(ROUNDS),
    case.FOLDER,
)  # fmt: skip
def predictions(
    names: Sequence[str], is_list: bool, rounds: int, folder: Path, append: bool
) -> None:
    """The same on pinned peers with networks between them, as clusters/table.py has them.

    Needs root on Linux: devices are daemons in namespaces of their own. Rows are in
    predictions.csv.
    """
    grounds = [
        Ground(
            name=f"{each.name}: {', '.join(device.words for device in each.devices)}",
            shape=each.shape,
            asked=each.asked,
            open=partial(_pinned, each.devices),
        )
        for each in CASES
        if not names or each.name in names
    ]
    if is_list:
        for ground in grounds:
            click.echo(f"{ground.name} ({ground.shape})")
    elif (reason := why_not()) is not None:
        raise click.ClickException(f"no pinned peers here: {reason}")
    else:
        _try(grounds, rounds, folder, PREDICTIONS if append else None)
