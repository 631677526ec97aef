"""`edge quantize`: GPTQ quantization with calibration."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, cluster_options, model_options, open_cluster
from edge.cli.records import json_option, print_json
from edge.host.blas_threads import limit_blas_threads
from edge.host.free_memory import format_size
from edge.planning.load_options import LoadOptions
from edge.studies.quantize import QuantizeOptions
from edge.studies.text_windows import read_text


@click.command("quantize", short_help="Quantize a model with calibration (GPTQ).")
@model_options(only=("lora", "stream", "wire"))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to write; it must not be there.",
)
@click.option(
    "--calibrate",
    "text_file",
    metavar="TEXT",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A UTF-8 file of calibration text like the model's later input.  "
    "[default: text that it writes itself]",
)
@click.option(
    "--compressed-tensors",
    "packed",
    is_flag=True,
    help="Write compressed-tensors, which other programs read, too, with more loss.  [default: "
    "blocks of GGUF file types, if every device has kernels for them]",
)
@given_options("wanted", QuantizeOptions)
@cluster_options
@json_option
def command(
    model: str,
    options: LoadOptions,
    peers: ClusterOptions,
    out: Path,
    text_file: Path | None,
    packed: bool,
    wanted: QuantizeOptions,
    as_json: bool,
) -> None:
    """Quantize MODEL with GPTQ, calibrated on a text, with less loss than --dtype int4.

    The cluster runs the model and sums up the inputs of every matrix, so the model may be larger
    than one device. Then this device rounds one matrix after the other: later columns compensate
    the error of earlier ones, and large inputs have more weight. After an interruption the same
    command resumes: with the complete sums, and layer by layer. With --threads, this device uses as
    many threads as all --local peers together.

    Without a text the model writes its own, at random with a fixed seed, which is closer to its
    training than any text that Edge could bring.

    Every plan loads the new folder. edge quality measures the loss.

    \b
    Examples:
      edge quantize path/to/checkpoint --out path/to/smaller --local 2
      edge quantize path/to/checkpoint --out smaller --bits 4.5 --calibrate letters.txt
      edge quality path/to/smaller --against path/to/checkpoint --local 1
    """
    if peers.local is not None and peers.threads is not None:
        limit_blas_threads(peers.local * peers.threads)
    text: str | None = None
    if text_file is not None:
        text = read_text(text_file, tokens=wanted.windows * wanted.window_tokens)
    with open_cluster(peers, options, model=model) as cluster:
        options = replace(options, packs_blocks=packed)
        found = cluster.quantize(model, out, options, text=text, **asdict(wanted))
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(f"{found.path}: {format_size(found.num_bytes)}; {found.words}")
