"""`edge plan`: the plan for a model, and its predicted speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from edge.cli.options import ClusterOptions, cluster_options, model_options, open_cluster
from edge.cli.plan_view import (
    losses_as_json,
    plan_as_json,
    show_counted,
    show_losses,
    show_plan,
    show_standby,
    standby_as_json,
)
from edge.cli.records import print_json
from edge.errors import CapacityError
from edge.host.identity import host_id
from edge.partition import Workload
from edge.planning.kv_copies import copies_cost
from edge.planning.load_options import LoadOptions
from edge.planning.losses import losses as what_losses_do
from edge.planning.proposal import Proposal
from edge.planning.standing_by import ready_bytes
from edge.studies.count_experts import CountedExperts
from edge.studies.observe import MOST_COUNTED_TOKENS
from edge.studies.text_windows import read_text


@click.command("plan", short_help="Show the plan for a model and its predicted speed.")
@model_options(concurrency=True)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    help="Prompt length to optimise for.  [default: 512]",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(0),
    help="Answer length to optimise for.  [default: 128]",
)
@click.option(
    "--what-if",
    "changes",
    multiple=True,
    metavar="CHANGE",
    help='"+4GiB on NAME", "without NAME" or "link NAME-NAME 1ms 1Gbit"; may be repeated.',
)
@click.option("--explain", is_flag=True, help="Show where time goes and the next best plans, too.")
@click.option("--losses", is_flag=True, help="Show the plan after the loss of each device.")
@click.option(
    "--calibrate",
    "text_file",
    metavar="TEXT",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For a model with experts: read this UTF-8 file first, and count how often each expert is "
    "used. Later plans use the counts.",
)
@click.option("--measure", is_flag=True, help="Measure every device and link again.")
@cluster_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; --plan of other commands reads it."
)
def command(
    model: str,
    options: LoadOptions,
    peers: ClusterOptions,
    prompt_tokens: int | None,
    output_tokens: int | None,
    changes: tuple[str, ...],
    explain: bool,
    losses: bool,
    text_file: Path | None,
    measure: bool,
    as_json: bool,
) -> None:
    """Show which peer would run which part of MODEL, its memory, and the predicted speed.

    Peers are measured the first time, which takes some seconds; the result is kept.

    \b
    Examples:
      edge plan path/to/checkpoint                      on the peers that zeroconf finds
      edge plan path/to/checkpoint --local 3 --parallel tensor --explain
      edge plan path/to/checkpoint --what-if "+4GiB on laptop" --what-if "without phone"
      edge plan path/to/experts --calibrate letters.txt place experts by their use
      edge plan path/to/checkpoint --json > plan.json   to edit, then: edge run ... --plan plan.json
    """
    if prompt_tokens is not None or output_tokens is not None:
        usual = Workload(concurrency=options.concurrency)
        workload = replace(
            usual,
            prompt_tokens=usual.prompt_tokens if prompt_tokens is None else prompt_tokens,
            output_tokens=usual.output_tokens if output_tokens is None else output_tokens,
        )
        options = replace(options, workload=workload)
    text = None if text_file is None else read_text(text_file, tokens=MOST_COUNTED_TOKENS)
    counted: CountedExperts | None = None
    with open_cluster(peers, options, model=model) as cluster:
        if text is not None:
            counted = cluster.count_experts(model, options, text=text)
        proposal = cluster.propose(
            model, options, changes=changes, measure="again" if measure else "missing"
        )
        unchanged: Proposal | None = None
        if changes:
            try:
                unchanged = cluster.propose(model, options)
            except CapacityError as error:
                click.echo(f"Without the changes: {error}", err=True)
    copies = copies_cost(proposal, options.standby, here=host_id())
    lost = what_losses_do(proposal, options) if losses or options.standby == "kv" else []
    ready = ready_bytes(proposal, lost) if options.standby == "kv" else {}
    if as_json:
        value = plan_as_json(proposal, explain=explain)
        if changes:
            value["changes"] = list(changes)
        if losses:
            value["losses"] = losses_as_json(lost)
        if counted is not None:
            value["counted"] = counted.to_json()
        value["standby"] = None if copies is None else standby_as_json(copies, ready)
        print_json(value)
    else:
        show_plan(
            proposal,
            title=", ".join((proposal.plan.model, proposal.dtype, *changes)),
            unchanged=unchanged,
            explain=explain,
        )
        if counted is not None:
            show_counted(counted)
        if copies is not None:
            show_standby(proposal, copies, ready)
        if losses:
            show_losses(proposal, lost)
