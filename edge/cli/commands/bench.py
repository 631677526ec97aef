"""`edge bench`: the speed of a model on the cluster, and its bottleneck."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, cluster_options, model_options, open_cluster
from edge.cli.records import Columns, by_place, json_option, make_table, print_json
from edge.cli.reply_view import adapt_option, tell_drift, tell_why_not_predicted
from edge.host.free_memory import format_size
from edge.planning.breakdown import reads_in_words
from edge.planning.load_options import LoadOptions
from edge.planning.rate_words import rate_in_words
from edge.studies.benchmark import (
    Benchmark,
    BenchmarkOptions,
    PeerShare,
    compare_speculation,
    run_benchmark,
)
from edge.studies.report import report_line
from edge.studies.versus_llama_cpp import Comparison, Llama, compare, spreads


@click.command("bench", short_help="Measure a model's speed and its bottleneck.")
@model_options()
@given_options("wanted", BenchmarkOptions)
@click.option(
    "--vs",
    type=click.Choice(["llama.cpp"]),
    help="Compare with another program: each repeat runs once with Edge, once with the other.",
)
@click.option(
    "--gguf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The same model as a GGUF file, for --vs llama.cpp.",
)
@click.option(
    "--llama-python",
    default=sys.executable,
    metavar="PROGRAM",
    help="A Python with llama-cpp-python, for --vs llama.cpp.  [default: this one]",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add a line to this file: the plan, what was predicted, and what was measured, without "
    "names or addresses.",
)
@adapt_option
@cluster_options
@json_option
def command(
    model: str,
    options: LoadOptions,
    peers: ClusterOptions,
    wanted: BenchmarkOptions,
    vs: str | None,
    gguf: Path | None,
    llama_python: str,
    report: Path | None,
    adapt: bool,
    as_json: bool,
) -> None:
    """Measure MODEL on the cluster: tokens per second, time to the first, and where time goes.

    Random prompts of one length are answered with end tokens ignored, so token counts are exact.
    "of limit" compares a peer's rate with its memory rate, measured just before: each token has to
    read every weight once.

    \b
    Examples:
      edge bench path/to/checkpoint --local 1 --threads 2
      edge bench path/to/checkpoint --local 2 --threads 1 --parallel tensor --json
      edge bench path/to/checkpoint --local 1 --vs llama.cpp --gguf model-q4_0.gguf
    """
    if (vs is None) != (gguf is None):
        raise click.UsageError("--vs llama.cpp and --gguf FILE go together; give both")
    context_tokens = wanted.prompt_tokens + wanted.new_tokens
    speculate = options.usually_speculates
    options = replace(
        options,
        speculate="mtp" if speculate == "mtp" else "off",  # then its head is loaded
        context_tokens=options.context_tokens or context_tokens,
        concurrency=wanted.requests,
    )
    with open_cluster(peers, options, model=model) as cluster:
        rates = cluster.memory_rates()
        # A prediction by a first look would say little.
        if len(cluster.peers) > 1 or speculate != "off":
            cluster.propose(model, options)
        loaded = cluster.load(model, options)
        tell_why_not_predicted(loaded)
        measured = run_benchmark(loaded, wanted, memory_rates=rates)
        guessed = None
        if speculate != "off":
            guessed = compare_speculation(loaded, wanted, speculate, proposal=loaded.proposal)
        comparison: Comparison | None = None
        if gguf is not None:
            with Llama(
                gguf,
                python=llama_python,
                threads=max(peer.threads for peer in cluster.peers),
                context_tokens=context_tokens,
                requests=wanted.requests,
            ) as llama:
                comparison = compare(
                    loaded,
                    llama,
                    prompt_tokens=wanted.prompt_tokens,
                    new_tokens=wanted.new_tokens,
                    requests=wanted.requests,
                    rounds=wanted.repeats,
                )
        line = ""
        if report is not None:
            backends = {peer.id: peer.backend for peer in cluster.peers}
            line = report_line(loaded.proposal, measured, backends)
        if measured.drift is not None:
            tell_drift(cluster, loaded, model, options, measured.drift, adapt=adapt)
    if as_json:
        found = measured.to_json()
        if comparison is not None:
            found["versus"] = comparison.to_json()
        if guessed is not None:
            found["speculated"] = asdict(guessed)
        print_json(found)
    else:
        title = f"{loaded.name}, {loaded.proposal.weights}, {options.accuracy}"
        _show(measured, title=title)
        if comparison is not None:
            _show_comparison(comparison)
        if guessed is not None:
            said = guessed.predicted_tokens_per_s
            click.echo(
                f"repeating text: {guessed.off_tokens_per_s.p50:.1f} tok/s, and with guesses "
                f"{guessed.tokens_per_s.p50:.1f} ({guessed.tokens_per_pass:.1f} tokens per pass"
                + (f", for which {said.p50:.1f} tok/s were predicted)" if said else ")")
            )
    if report is not None:
        with report.open("a", encoding="utf-8") as file:
            print(line, file=file)


def _show(measured: Benchmark, *, title: str) -> None:
    options, predicted = measured.options, measured.predicted
    speeds: list[list[str]] = []
    for name, field, digits in (
        (f"decode {options.new_tokens}, tok/s", "decode_tokens_per_s", 1),
        (f"decode {options.requests} at once, tok/s", "batch_tokens_per_s", 1),
        (f"prefill {options.prompt_tokens}, tok/s", "prefill_tokens_per_s", 1),
        ("first token, s", "first_token_s", 3),
    ):
        spread = getattr(measured, field)
        cells = [f"{value:.{digits}f}" for value in (spread.p20, spread.p50, spread.p80)]
        if predicted is not None:
            said, span = getattr(predicted, field), getattr(predicted, f"{field}_range", None)
            cells.append(f"{said:.{digits}f}" if span is None else rate_in_words(said, span))
        speeds.append([name, *cells])
    headings = ("p20", "p50", "p80", *(["predicted"] if predicted else []))
    Console().print(make_table(speeds, by_place("", *headings), title=title, right=headings))
    title, right = "each decoded token, ms", [*_PEERS][1:]
    Console().print(make_table(measured.peers, _PEERS, title=title, right=right))
    for line in reads_in_words([share.times for share in measured.peers]):
        click.echo(line)


def _milliseconds(name: str) -> Callable[[PeerShare], str]:
    return lambda share: f"{1e3 * getattr(share.token, name):.2f}"


_PEERS: Columns[PeerShare] = {
    "peer": lambda share: share.times.name,
    "compute": _milliseconds("compute_s"),
    "load": _milliseconds("load_s"),
    "sum": _milliseconds("reduce_s"),
    "wait": _milliseconds("receive_s"),
    "send": _milliseconds("send_s"),
    "sample": _milliseconds("sample_s"),
    "weights": lambda share: format_size(share.weight_bytes),
    "of limit": lambda share: f"{share.bandwidth_share:.0%}",
    "peak": lambda share: format_size(share.times.peak_bytes),
}


def _show_comparison(comparison: Comparison) -> None:
    rows: list[list[str]] = []
    for name, pairs in (
        (f"decode {comparison.new_tokens}", comparison.decode),
        (f"decode {comparison.requests} at once", comparison.batch),
        (f"prefill {comparison.prompt_tokens}", comparison.prefill),
    ):
        if pairs:
            found = spreads(pairs)
            rates = [f"{found[program].p50:.1f}" for program in ("edge", "llama.cpp")]
            ratio = found["ratio"]
            ratios = [f"{value:.2f}" for value in (ratio.p20, ratio.p50, ratio.p80)]
            rows.append([name, *rates, *ratios])
    headings = ("Edge", "llama.cpp", "ratio p20", "ratio p50", "ratio p80")
    title = f"against llama.cpp (llama-cpp-python {comparison.version}), tok/s"
    Console().print(make_table(rows, by_place("", *headings), title=title, right=headings))
