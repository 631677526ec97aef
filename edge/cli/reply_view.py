"""The view of a reply: its text, its figures against the prediction, and causes of slowness."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

import click
from rich.console import Console

from edge.answers.terms import GenerationOptions
from edge.api.cluster import Cluster
from edge.api.model import Model
from edge.api.reply import Reply, ReplyStream
from edge.cli.plan_view import devices_in_words, left_out_in_words
from edge.cli.records import by_place, make_table
from edge.cli.sentences import tell
from edge.errors import EdgeError, printable, without_controls
from edge.kernels.sampling.parameters import SamplingParameters
from edge.partition import Plan
from edge.planning.breakdown import reads_in_words, step_parts
from edge.planning.drift import Drift
from edge.planning.load_options import LoadOptions
from edge.planning.rate_words import rate_in_words
from edge.protocol.step_times import PeerTimes
from edge.runs.model import Recovery

adapt_option = click.option(
    "--adapt",
    is_flag=True,
    help="When replies are slower than predicted, measure the cause again and plan anew.",
)


def tell_why_not_predicted(model: Model) -> None:
    """Name devices that could not be measured on stderr: the plan was made without their speed."""
    devices = model.proposal.cluster.devices
    if any(device.rates is None for device in devices):
        for note in model.proposal.notes:
            tell(f"edge: {note}")


def show_reply(model: Model, stream: ReplyStream, options: GenerationOptions) -> Reply:
    """Stream an answer to stdout and its figures to stderr."""
    reply = whole_reply(stream, write_token)
    click.echo()
    tell_remarks(model, reply, options, "-n N")
    tell(figures_of(model, reply))
    return reply


def whole_reply(stream: ReplyStream, write: Callable[[str], None] = lambda _text: None) -> Reply:
    """The whole reply. If it ends early, stderr says how to resume it."""
    with stream:
        try:
            for token in stream:
                write(token.text)
        except (KeyboardInterrupt, SystemExit, EdgeError):
            if stream.kept_as is not None:
                click.echo(
                    f"\n[edge run --resume {stream.kept_as} continues this answer]", err=True
                )
            raise
        return stream.reply()


def write_token(text: str) -> None:
    """Write to stdout and flush; on a terminal, without control characters."""
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def tell_remarks(
    model: Model, reply: Reply, options: GenerationOptions, longer: str, shorter: str = ""
) -> None:
    """Tell on stderr that an answer is empty, where it was cut, and the failovers during it.

    longer: the option for a longer answer. shorter: the way to more room in the context.
    """
    count = reply.statistics["new_tokens"]
    tell_recoveries(model, reply.recoveries)
    if not reply.text.strip():
        why = "tokens without text" if reply.finish_reason == "length" else "its end at once"
        if options.stop and reply.finish_reason == "stop":
            why += ", or a text to stop at"
        tell(f"[the answer is empty: the model wrote {why}]")
    if reply.finish_reason == "length":
        if count == options.max_new_tokens:
            tell(f"[cut at {count} tokens; {longer} for longer ones]")
        else:
            is_longest = model.context_tokens == model.longest_context_tokens
            longer = (
                "the model was trained for no more" if is_longest else "--context makes it longer"
            )
            tell(f"[the context of {model.context_tokens} tokens is full; {shorter}{longer}]")


def tell_recoveries(model: Model, recoveries: Sequence[Recovery]) -> None:
    """Tell the failovers on stderr, a line for each."""
    names = {id: peer.name for id, peer in model.peers.items()}
    for recovery in recoveries:
        now = ", ".join(names.get(id, "a device that has gone") for id in recovery.plan.devices)
        what = "the answer continued" if recovery.requests else "the model was ready"
        tell(f"[{recovery.reason}; after {recovery.pause_s:.1f} s {what} on {now}]")


def figures_of(model: Model, reply: Reply) -> str:
    """The length and speed of a reply, and its prediction, in a line."""
    figures = reply.statistics
    first = f"first after {figures['first_token_s']:.2f} s"
    if "predicted_first_token_s" in figures:
        first += f" (predicted {figures['predicted_first_token_s']:.2f})"
    if "tiles_read" in figures:
        first += f", of which images took {figures['pictures_s']:.2f} s"
        if (said := figures["predicted_pictures_s"]) is not None:
            first += f" (predicted {said:.2f})"
    rate = ""
    if figures["tokens_per_s"] is not None:
        rate = f", then {figures['tokens_per_s']:.1f} tok/s"
        if "predicted_tokens_per_s" in figures:
            rated, span = figures["predicted_tokens_per_s"], figures["predicted_tokens_per_s_range"]
            rate += f" (predicted {rate_in_words(rated, span)})"
    count = f"{figures['new_tokens']} tokens"
    if "tokens_per_pass" in figures:
        count += f" at {figures['tokens_per_pass']:.1f} per pass"
    if "resumed_tokens" in figures:
        count += f", {figures['resumed_tokens']} of them resumed"
    return f"[{count}, {first}{rate}, on {devices_in_words(model.proposal)}]"


def tell_left_out(model: Model, options: LoadOptions) -> None:
    """Tell on stderr which devices have no part in the plan, and why. Nothing if all have one, and
    for a manual plan."""
    if (said := left_out_in_words(model.proposal)) and not isinstance(options.plan, Plan):
        tell(f"[{said}; --parallel pipeline uses every device]")


def show_sampling(model: Model, reply: Reply, options: GenerationOptions) -> None:
    """Tell the sampling parameters, the context and the cached tokens on stderr."""
    chosen = options.sampling(model.sampling)
    values = {**asdict(chosen), "seed": reply.statistics["seed"]}
    if not chosen.temperature:
        kept = ("_penalty", "_bias", "min_tokens")
        rules = {name: values[name] for name in values if name.endswith(kept)}
        values = {"temperature": "0 (greedy)", **rules}
    usual = asdict(SamplingParameters())
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "min_tokens"):
        if values[name] == usual[name]:
            del values[name]
    if biases := values.get("logit_bias"):
        values["logit_bias"] = ",".join(f"{id}={bias:g}" for id, bias in biases.items())
    said = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in values.items())
    if options.sampling(SamplingParameters()) != chosen:
        said += "; defaults are from the model's files"
    click.echo(f"sampling: {said}", err=True)
    if model.unused_settings:
        names = ", ".join(printable(name, 60) for name in model.unused_settings[:8])
        click.echo(f"not used: {names}, which the model's generation_config.json sets", err=True)
    click.echo(f"context: {model.context_tokens} tokens of prompt and answer together", err=True)
    figures = reply.statistics
    found = figures.get("found_tokens", 0)
    of_them = f"; {found} of them were in the prefix cache and not computed" if found else ""
    click.echo(f"prompt: {figures['prompt_tokens']} tokens{of_them}", err=True)
    if drafted := figures.get("drafted_tokens", 0):
        accepted = figures["accepted_tokens"]
        where = "" if model.drafts_on is None else f"; the draft model is on {model.drafts_on}"
        click.echo(f"guesses: {drafted} tokens, {accepted} of them right{where}", err=True)


def show_parts(model: Model, reply: Reply) -> Sequence[PeerTimes] | None:
    """Show on stderr where a reply's time went, beside the prediction for its length.

    Returns the peers' counters over this reply; None if a peer was lost since.
    """
    try:
        times = model.measure()
    except EdgeError:
        return None
    figures = reply.statistics
    predicted = model.predict(
        prompt_tokens=figures["prompt_tokens"], output_tokens=figures["new_tokens"]
    )
    if predicted is None:
        click.echo("edge: no prediction, because not every device was measured", err=True)
        return times
    first_s = figures.get("predicted_first_token_s", predicted.first_token_s)
    rows = [("the first token", first_s, figures["first_token_s"])]
    if (images_s := figures.get("predicted_pictures_s")) is not None:
        rows.insert(0, ("the images before it", images_s, figures["pictures_s"]))
    if figures["tokens_per_s"] is not None:
        token_s = 1 / figures["tokens_per_s"]
        parts = step_parts(model.plan, [(1.0, predicted)], times, token_s)
        rows[:0] = [(part.label, part.predicted_s, part.actual_s) for part in parts]
        rows.insert(len(parts), ("token", predicted.token_s, token_s))
    cells = [(what, f"{1e3 * said:.2f}", f"{1e3 * took:.2f}") for what, said, took in rows]
    right = ("predicted, ms", "took, ms")
    table = make_table(cells, by_place("what", *right), title="each token's time", right=right)
    Console(stderr=True).print(table)
    for line in reads_in_words(times):
        click.echo(line, err=True)
    return times


def drift_of(model: Model, times: Sequence[PeerTimes] | None = None) -> Drift | None:
    """The cause, if the replies since the last call were slower than predicted; else None.

    times: the peers' counters, if they were read already.
    """
    try:
        return model.check(times)
    except EdgeError:
        return None  # the answer is complete; the next one tells that a device was lost


def tell_drift(
    cluster: Cluster,
    model: Model,
    path: str,
    options: LoadOptions,
    drift: Drift,
    *,
    adapt: bool,
) -> None:
    """Tell a cause of slowness on stderr, with a remedy.

    Its measurement is forgotten if the next load would repeat it, which it does not for a single
    peer. With `adapt` it is measured now; the model is closed for that.
    """
    measures = len(cluster.peers) > 1
    if measures or adapt:
        cluster.forget_measured(drift.devices)
    remedy = "with --adapt it is measured again"
    if adapt:
        remedy = "it is measured again"
    elif measures:
        remedy = "it is measured again after the next load, with --adapt at once"
    tell(f"edge: {drift.message}; {remedy}")
    if adapt:
        model.close()
        cluster.propose(path, options)
