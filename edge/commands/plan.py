"""`edge plan`: what would run where."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edge.api import Proposal
from edge.commands.options import cluster_options, model_options, open_cluster, read_plan
from edge.formats import Accuracy
from edge.memory import format_size
from partition import PlanRow


@click.command("plan", short_help="Show what would run where, without running it.")
@model_options
@cluster_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; --plan of other commands reads it."
)
def command(
    model: Path,
    parallel: str,
    plan_file: Path | None,
    dtype: str,
    block_size: str,
    accuracy: Accuracy,
    context: int | None,
    as_json: bool,
    **cluster: Any,
) -> None:
    """Show which peer would run which part of MODEL, and the memory each would use.

    \b
    Examples:
      edge plan path/to/checkpoint                      on the peers that zeroconf finds
      edge plan path/to/checkpoint --local 3 --parallel tensor
      edge plan path/to/checkpoint --json > plan.json   to edit, then: edge run ... --plan plan.json
    """
    with open_cluster(**cluster) as opened:
        proposal = opened.propose(
            model,
            dtype=dtype,
            plan=read_plan(plan_file, parallel),
            context_tokens=context,
            block_size=int(block_size),
            accuracy=accuracy,
        )
    if as_json:
        click.echo(json.dumps(_as_json(proposal), indent=2))
    else:
        show_plan(proposal.rows, title=f"{proposal.plan.model}, {dtype}")


def show_plan(rows: list[PlanRow], *, title: str) -> None:
    """Print a plan as a table."""
    table = Table(
        "device",
        "stage",
        "layers",
        "heads",
        "ffn columns",
        "vocabulary",
        "memory",
        "left",
        title=title,
    )
    for row in rows:
        table.add_row(
            row.name,
            str(row.stage),
            _span(row.layers),
            _span(row.heads),
            _span(row.ffn_columns),
            _span(row.vocab),
            format_size(row.memory.total),
            format_size(row.left_bytes),
        )
    Console().print(table)


def _span(indices: range) -> str:
    return f"{indices.start}–{indices.stop - 1}" if indices else "–"


def _as_json(proposal: Proposal) -> dict[str, Any]:
    return {
        "plan": proposal.plan.to_json(),
        "devices": [
            {
                "device": row.device,
                "name": row.name,
                "stage": row.stage,
                "memory": dataclasses.asdict(row.memory),
                "left_bytes": row.left_bytes,
            }
            for row in proposal.rows
        ],
    }
