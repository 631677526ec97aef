"""`edge quality`: the quality loss of a weight format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, cluster_options, model_options, open_cluster
from edge.cli.records import Columns, json_option, make_table, print_json
from edge.planning.load_options import LoadOptions
from edge.studies.quality import FormatQuality, Quality, QualityOptions
from edge.studies.text_windows import read_text


@click.command("quality", short_help="Measure the quality loss of a weight format.")
@model_options()
@click.option(
    "--against",
    default="float32",
    show_default=True,
    metavar="float32|MODEL",
    help="The reference: float32 of the same checkpoint, or another one with the same vocabulary.",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A UTF-8 file to read.  [default: some English prose that ships with Edge]",
)
@given_options("wanted", QualityOptions)
@cluster_options
@json_option
def command(
    model: str,
    options: LoadOptions,
    peers: ClusterOptions,
    against: str,
    text_file: Path | None,
    wanted: QualityOptions,
    as_json: bool,
) -> None:
    """Compare MODEL in its format with a reference; both read the same text.

    \b
    perplexity    e to the mean negative logprob of the text's tokens; less is better; compare it
                  on one text only
    mean KL       mean KL divergence from the reference's logits, in nats; 0 is no difference
    99 % KL       the 99th percentile of the KL divergence over positions
    same top      how often the most likely next token is the reference's
    bytes/weight  of the matrices that every token is multiplied with, scales included
    tok/s         of one short reply: a hint; edge bench measures speed

    The reference's logits are kept on disk meanwhile, in the cache folder: 4 bytes for each token
    of the vocabulary at each position (1.4 GB for a vocabulary of 150,000 and the default windows).

    \b
    Examples:
      edge quality path/to/checkpoint --local 1
      edge quality path/to/checkpoint --dtype int8 --text speech.txt --windows 12
      edge quality path/to/distilled --dtype float32 --against path/to/original
    """
    text: str | None = None
    if text_file is not None:
        text = read_text(text_file, tokens=wanted.windows * wanted.window_tokens)
    with open_cluster(peers, options, model=model) as cluster:
        found = cluster.quality(
            model,
            options,
            against=against,
            text=text,
            **asdict(wanted),
        )
    if as_json:
        value = {"text": None if text_file is None else str(text_file), **found.to_json()}
        print_json(value)
    else:
        _show(found, text_file)


def _show(found: Quality, text_file: Path | None) -> None:
    text = "the bundled text" if text_file is None else text_file.name
    reference, measured = found.reference, found.measured
    one_model = reference.model == measured.model
    columns: Columns[FormatQuality] = {
        "": lambda row: row.format if one_model else f"{row.model}, {row.format}",
        "perplexity": lambda row: f"{row.perplexity:.2f}",
        "mean KL": lambda row: f"{row.mean_kl:.4f}",
        "99 % KL": lambda row: f"{row.p99_kl:.4f}",
        "same top": lambda row: f"{row.same_top:.1%}",
        "bytes/weight": lambda row: f"{row.bytes_per_weight:.3f}",
        "tok/s": lambda row: f"{row.tokens_per_s:.1f}",
    }
    title = f"{measured.model}: {found.windows} windows of {found.window_tokens} tokens, {text}"
    right = [heading for heading in columns if heading]
    Console().print(make_table((reference, measured), columns, title=title, right=right))
