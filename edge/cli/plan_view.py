"""A proposal as tables and sentences for people, and as JSON for scripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from edge.cli.records import Columns, make_table
from edge.cli.sentences import print_sentence
from edge.host.free_memory import format_size
from edge.partition import (
    CapacityError,
    Estimate,
    Guessing,
    HeldLayers,
    Plan,
    PlanRow,
    Shortage,
    Term,
    describe_plan_in_words,
)
from edge.planning.kv_copies import MOST_KEPT_KV_BYTES, CopiesCost
from edge.planning.losses import Loss
from edge.planning.proposal import Proposal
from edge.planning.rate_words import rate_in_words
from edge.studies.count_experts import CountedExperts

_MOST_REASONS = 2


def show_plan(proposal: Proposal, *, title: str, unchanged: Proposal | None, explain: bool) -> None:
    """Print a plan and its predicted speed.

    unchanged: the plan for the present cluster, if `proposal` is for an assumed one.
    """
    console = Console()
    console.print(make_table(proposal.rows, _ROWS, title=title, right=("memory", "left")))
    weights = f"Weights: {proposal.weights}."
    context = f"Context: {proposal.context_tokens:,} tokens of prompt and answer together."
    for line in [weights, context, *_memory(proposal), *_sentences(proposal, unchanged)]:
        print_sentence(console, line)
    if explain:
        _explain(console, proposal)


def show_losses(proposal: Proposal, found: Sequence[Loss]) -> None:
    """Print a line for each device of the plan: the plan after its loss."""
    console = Console()
    for each in found:
        line = f"Without {each.device.name}: {_left_without(proposal, each)}."
        print_sentence(console, line)


def show_standby(
    proposal: Proposal, cost: CopiesCost, ready: Mapping[str, int] | None = None
) -> None:
    """Print the memory and the link load of KV cache copies. ready: bytes of weights that spare
    devices keep, by id."""
    what = {"none": "nothing", "answers": "an answer", "all": "a prompt or an answer"}[cost.copies]
    line = (
        f"Copies of the KV cache: {format_size(sum(cost.token_bytes.values()))} for each token "
        f"of {what}, in this device's memory: up to "
        f"{format_size(MOST_KEPT_KV_BYTES[cost.copies])}, which is {cost.kept_tokens:,} tokens."
    )
    if cost.bytes_per_s is not None:
        sent = " and ".join(
            f"{_megabits(rate)} from {proposal.cluster.device(device).name}"
            for device, rate in cost.bytes_per_s.items()
        )
        line += f" At the predicted speed the links to this device carry {sent} for them."
    for device, num_bytes in (ready or {}).items():
        line += (
            f" {proposal.cluster.device(device).name} keeps {format_size(num_bytes)} of weights "
            "ready, as long as nothing else needs the memory."
        )
    print_sentence(Console(), line)


def show_counted(counted: CountedExperts) -> None:
    """Print the distribution of tokens over experts."""
    layers = f"{counted.layers} layer{'s' if counted.layers > 1 else ''}"
    print_sentence(
        Console(),
        f"Experts: of {counted.tokens:,} tokens in {layers}, the busiest quarter of a layer's "
        f"experts had {counted.busiest_quarter:.0%} of all uses. Plans for this model go by that "
        "from now on.",
    )


def standby_as_json(cost: CopiesCost, ready: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The cost of standby copies as JSON, by device in plan order."""
    return {
        "token_bytes": dict(cost.token_bytes),
        "bytes_per_s": None if cost.bytes_per_s is None else dict(cost.bytes_per_s),
        "copies": cost.copies,
        "most_bytes": MOST_KEPT_KV_BYTES[cost.copies],
        "kept_tokens": cost.kept_tokens,
        "ready_bytes": dict(ready or {}),
    }


def _megabits(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.3g} Mbit/s"


def losses_as_json(found: Sequence[Loss]) -> list[dict[str, Any]]:
    """The plan after each device's loss as JSON, in plan order."""
    return [
        {
            "device": each.device.id,
            "name": each.device.name,
            "plan": None if each.repair is None else each.repair.plan.to_json(),
            "same_shape": each.repair is not None and each.repair.same_shape,
            "lacking_bytes": {} if each.repair is None else dict(each.repair.lacking_bytes),
            "predicted": _speed(None if each.repair is None else each.repair.predicted),
            "missing_bytes": {short.device: short.missing_bytes for short in _shortages(each)},
        }
        for each in found
    ]


def _left_without(proposal: Proposal, loss: Loss) -> str:
    if len(proposal.cluster.devices) == 1:
        return "no device remains"
    if loss.repair is None:
        lacks = [f"{format_size(each.missing_bytes)} on {each.name}" for each in _shortages(loss)]
        fit = f"it does not fit; missing: {', '.join(lacks)}"
        return fit if lacks else str(loss.refused).rstrip(".")
    repair = loss.repair
    speed = "speed not known"
    if repair.predicted is not None:
        speed = _in_words(repair.predicted)
    words = describe_plan_in_words(repair.plan, proposal.cluster)
    return f"{words}; {format_size(repair.moved_bytes)} to send; {speed}"


def _shortages(loss: Loss) -> Sequence[Shortage]:
    return loss.refused.shortages if isinstance(loss.refused, CapacityError) else ()


def plan_as_json(proposal: Proposal, *, explain: bool) -> dict[str, Any]:
    """A proposal as JSON; `Plan.from_json` reads its `plan`."""
    choice = proposal.choice
    value: dict[str, Any] = {
        "plan": proposal.plan.to_json(),
        "weights": proposal.weights,
        "context_tokens": proposal.context_tokens,
        "devices": [
            {
                "device": row.device,
                "name": row.name,
                "stage": row.stage,
                "kinds": [
                    {
                        "layers": held.num_layers,
                        "kv_heads": list(held.kv_heads),
                        "kv_copies": held.kv_copies,
                        "whole_experts": held.whole_experts,
                    }
                    for held in row.held
                ],
                "streamed_layers": row.streamed_layers,
                "host_layers": row.host_layers,
                "memory": dataclasses.asdict(row.memory),
                "overhead": _overhead(proposal, row.device),
                "left_bytes": row.left_bytes,
            }
            for row in proposal.rows
        ],
        "predicted": _speed(choice.predicted),
        "solo": None
        if choice.solo is None
        else {
            "device": choice.solo.device,
            "name": choice.solo.name,
            "tokens_per_s": choice.solo.estimate.tokens_per_s,
            "tokens_per_s_range": list(choice.solo.estimate.tokens_per_s_range),
            "first_token_s": choice.solo.estimate.first_token_s,
        },
        "left_out": [{"name": each.name, "reason": each.reason} for each in choice.left_out],
        "notes": list(proposal.notes),
    }
    if explain:
        value["terms"] = [
            dataclasses.asdict(term)
            for term in (choice.predicted.terms if choice.predicted else ())
        ]
        value["with_guesses"] = [dataclasses.asdict(each) for each in _guessing(proposal)]
        value["runners_up"] = [
            {
                "plan": plan.to_json(),
                "words": describe_plan_in_words(plan, proposal.cluster),
                "predicted": _speed(estimate),
            }
            for plan, estimate in choice.runners_up
        ]
    return value


def _streamed(row: PlanRow) -> str:
    """The layers that are streamed for each token, by source."""
    if not row.streamed_layers:
        return ""
    on_disk = row.streamed_layers - row.host_layers
    sources = ((row.host_layers, "host memory"), (on_disk, "disk"))
    return "".join(f", {count} from {source}" for count, source in sources if count)


def _each(row: PlanRow, in_words: Callable[[HeldLayers], str]) -> str:
    """Words for each kind of layer, if they are split differently; else once."""
    return "; ".join(dict.fromkeys(map(in_words, row.held))) or row.in_words


def _columns(held: HeldLayers) -> str:
    """The columns of the feed-forward block, or the number of whole experts."""
    whole = held.whole_experts
    return f"{whole} of the experts" if whole else _span(held.ffn_columns)


def _copied(held: HeldLayers) -> str:
    """The number of duplicated KV heads, where a split separates queries that share one."""
    return f", {held.kv_copies} KV again" if held.kv_copies else ""


def _memory(proposal: Proposal) -> list[str]:
    """A sentence for each device about its memory, if it was asked."""
    lines = []
    for row in proposal.rows:
        overhead = proposal.overhead.get(row.device)
        if overhead is None:
            continue
        use = row.memory
        streamed = f" ({_more(row)} for each token)"
        lines.append(
            f"Memory of {row.name}, {format_size(overhead.promised_bytes)}: its process "
            f"{format_size(overhead.floor_bytes)}, steps up to "
            f"{format_size(overhead.buffer_bytes)}, weights {format_size(use.weight_bytes)}"
            f"{streamed if use.streamed_bytes else ''}, "
            f"KV cache {format_size(use.kv_bytes)}."
        )
    return lines


def _more(row: PlanRow) -> str:
    """The bytes that are streamed for each token, by source."""
    host_bytes = row.memory.streamed_bytes * row.host_layers // max(1, row.streamed_layers)
    sources = ((host_bytes, "the host's memory"), (row.memory.streamed_bytes - host_bytes, "disk"))
    more = [f"{format_size(nbytes)} more from {source}" for nbytes, source in sources if nbytes]
    return " and ".join(more)


def _overhead(proposal: Proposal, device: str) -> dict[str, int] | None:
    overhead = proposal.overhead.get(device)
    return None if overhead is None else dataclasses.asdict(overhead)


def _sentences(proposal: Proposal, unchanged: Proposal | None) -> list[str]:
    choice, workload = proposal.choice, proposal.workload
    lines: list[str] = []
    if choice.predicted is None:
        lines.append("The speed is not known, because not every device was measured.")
    else:
        at_once = f", {workload.concurrency} at once" if workload.concurrency > 1 else ""
        lines += [
            f"Predicted for {workload.prompt_tokens} tokens of prompt and "
            f"{workload.output_tokens} of answer{at_once}: {_in_words(choice.predicted)}.",
            f"Most of a token's time: {choice.predicted.bottleneck}.",
        ]
    alone = proposal.plan.devices[0] if len(proposal.plan.devices) == 1 else None
    if (
        choice.solo is not None
        and choice.solo.device == alone
        and len(proposal.cluster.devices) > 1
    ):
        lines.append(f"It runs on {choice.solo.name} alone, the best single device.")
    elif choice.solo is not None and alone is None:
        lines.append(
            f"The best single device, {choice.solo.name}: {_in_words(choice.solo.estimate)}."
        )
    if unchanged is not None and unchanged.choice.predicted is not None:
        words = describe_plan_in_words(unchanged.plan, unchanged.cluster)
        lines.append(f"Without the changes: {_in_words(unchanged.choice.predicted)} ({words}).")
    lines += [f"Note: {note}." for note in proposal.notes]
    lines += [f"Left out: {each.name} ({each.reason})." for each in choice.left_out]
    return lines


def _explain(console: Console, proposal: Proposal) -> None:
    choice = proposal.choice
    if choice.predicted is None:
        return
    token_s = choice.predicted.token_s
    terms: Columns[Term] = {
        "what": lambda term: term.kind,
        "where": lambda term: term.where,
        "times": lambda term: str(term.count),
        "ms": lambda term: f"{1e3 * term.seconds:.3f}",
        "share": lambda term: f"{term.seconds / token_s if token_s else 0.0:.0%}",
    }
    plans: Columns[tuple[Plan, Estimate]] = {
        "plan": lambda other: describe_plan_in_words(other[0], proposal.cluster),
        "first token, s": lambda other: f"{other[1].first_token_s:.2f}",
        "tok/s": lambda other: rate_in_words(other[1].tokens_per_s, other[1].tokens_per_s_range),
    }
    right = ("times", "ms", "share", "first token, s")
    console.print(make_table(choice.predicted.terms, terms, title="each token's time", right=right))
    if choice.runners_up:
        console.print(
            make_table(choice.runners_up, plans, title="the next best plans", right=right)
        )
    guesses: Columns[Guessing] = {
        "right guesses": lambda each: f"{each.right:.0%}",
        "guesses in a step": lambda each: str(each.drafted),
        "tokens per pass": lambda each: f"{each.tokens_per_pass:.1f}",
        "tok/s": lambda each: f"{each.tokens_per_s:.3g}",
        "gain": lambda each: f"{each.tokens_per_s * token_s:.2f}",
    }
    if found := _guessing(proposal):
        console.print(make_table(found, guesses, title="with --speculate", right=guesses))


_SHARES = (0.5, 0.7, 0.9)
"""Shares of right guesses for which the speed is shown."""


def _guessing(proposal: Proposal) -> list[Guessing]:
    found = (proposal.with_guesses(right) for right in _SHARES)
    return [each for each in found if each is not None]


_ROWS: Columns[PlanRow] = {
    "device": lambda row: row.name,
    "stage": lambda row: str(row.stage),
    "layers": lambda row: _span(row.layers) + _streamed(row),
    "heads": lambda row: _each(row, lambda held: _span(held.heads) + _copied(held)),
    "ffn columns": lambda row: _each(row, _columns),
    "vocabulary": lambda row: _span(row.vocab),
    "memory": lambda row: format_size(row.memory.total),
    "left": lambda row: format_size(row.left_bytes),
}


def devices_in_words(proposal: Proposal) -> str:
    """The number of devices that compute, such as `1 of 2 devices`."""
    used, there = len(proposal.plan.devices), len(proposal.cluster.devices)
    count = f"{used} of {there}" if used < there else str(used)
    return f"{count} device{'s' if max(used, there) > 1 else ''}"


def left_out_in_words(proposal: Proposal) -> str:
    """The devices without a part, and the reasons for the first ones; "": all have a part."""
    left_out = proposal.choice.left_out
    said = [f"{each.name} ({each.reason})" for each in left_out[:_MOST_REASONS]]
    if more := len(left_out) - len(said):
        said.append(f"{more} more, which edge plan names")
    return f"left out: {', '.join(said)}" if said else ""


def _in_words(estimate: Estimate) -> str:
    rate = rate_in_words(estimate.tokens_per_s, estimate.tokens_per_s_range)
    return f"first token after {estimate.first_token_s:.2f} s, then {rate} tok/s"


def _speed(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {
        "first_token_s": estimate.first_token_s,
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_range": list(estimate.tokens_per_s_range),
        "bottleneck": estimate.bottleneck,
    }


def _span(indices: range) -> str:
    return f"{indices.start}–{indices.stop - 1}" if indices else "–"
