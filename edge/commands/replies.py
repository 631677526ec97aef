"""A reply on the terminal: its text, its figures beside what was predicted, what slowed it down."""

from __future__ import annotations

import sys
from typing import Any

import click

from edge.api import Cluster
from edge.drift import Drift
from edge.errors import EdgeError
from edge.model import Model, Prompt
from edge.reply import Reply

adapt_option = click.option(
    "--adapt",
    is_flag=True,
    help="When replies are slower than predicted, measure again what is to blame and plan anew.",
)


def tell_why_not_predicted(model: Model) -> None:
    """Devices that could not be measured, on stderr: the plan was made without their speed."""
    devices = model.proposal.cluster.devices
    if any(device.rates is None for device in devices):
        for note in model.proposal.notes:
            click.echo(f"edge: {note}", err=True)


def show_reply(model: Model, prompt: Prompt, **sampling: Any) -> Reply:
    """Stream an answer to stdout and its figures to stderr."""
    with model.stream(prompt, **sampling) as stream:
        for token in stream:
            sys.stdout.write(token.text)
            sys.stdout.flush()
        reply = stream.reply()
    click.echo()
    figures = reply.statistics
    devices = len(model.plan.devices)
    first = f"first after {figures['first_token_s']:.2f} s"
    rate = f"then {figures['tokens_per_s']:.1f} tok/s"
    if "predicted_tokens_per_s" in figures:
        first += f" (predicted {figures['predicted_first_token_s']:.2f})"
        rate += f" (predicted {figures['predicted_tokens_per_s']:.1f})"
    click.echo(
        f"[{figures['new_tokens']:.0f} tokens, {first}, {rate}, on {devices} "
        f"device{'s' if devices > 1 else ''}]",
        err=True,
    )
    return reply


def tell_drift(cluster: Cluster, model: Model, *, adapt: bool) -> Drift | None:
    """One line on stderr if the replies since the last time were slower than predicted.

    What is to blame is forgotten, so that it is measured again.
    """
    try:
        drift = model.check()
    except EdgeError:
        return None  # the answer is there; that a device has gone since is told by the next one
    if drift is not None:
        tell(drift, adapt=adapt)
        cluster.forget_measured(drift.devices)
    return drift


def tell(drift: Drift, *, adapt: bool) -> None:
    """The line, with what is done about it or could be."""
    remedy = "it is measured again" + ("" if adapt else " at the next load, with --adapt at once")
    click.echo(f"edge: {drift.message}; {remedy}", err=True)
