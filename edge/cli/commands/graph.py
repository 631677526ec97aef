"""`edge graph`: any ONNX graph, described, planned, run and measured."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from edge.api.graph import Graph
from edge.cli.graph_files import name_and_file, read_inputs
from edge.cli.options import ClusterOptions, cluster_options, open_cluster
from edge.cli.records import Columns, json_option, make_table, print_json, print_table
from edge.errors import RequestError, printable
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import GraphValue
from edge.graphs.state import find_state
from edge.host.free_memory import format_size
from edge.offload import parse_json, read_file
from edge.partition import Objective
from edge.runs.graphs.inputs import made_up_sample

_MOST_PLAN_BYTES = 1 << 20
_MOST_VALUES = 1000
"""Values of an output that are printed as JSON."""

F = TypeVar("F", bound=Callable[..., Any])


@click.group("graph", short_help="Run any ONNX graph, cut over the peers.")
def command() -> None:
    """Describe, plan, run and measure an ONNX graph: a CNN, an encoder, a tree, anything.

    The graph is measured on every peer, and cut where that takes less than the best single device.

    \b
    Examples:
      edge graph inspect model.onnx                  inputs, outputs, places to cut
      edge graph plan model.onnx --local 2           measure, and show the plan
      edge graph run model.onnx --input x=x.npy
      edge graph bench model.onnx --objective throughput
      edge graph generate t5-small --text "translate English to German: Good morning."
    """


_model = click.argument("model", type=click.Path(path_type=Path))

_inputs = click.option(
    "--input",
    "files",
    multiple=True,
    metavar="NAME=FILE",
    help="An input of the graph, as .npy, picture or .wav; may be repeated. Without any, inputs "
    "are made up.",
)

_objective = click.option(
    "--objective",
    type=click.Choice(("latency", "throughput")),
    default="latency",
    show_default=True,
    help="The least time of one input, or the most inputs per second.",
)

_plan_file = click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A plan by hand, as JSON (edge graph plan MODEL --json writes one).",
)


_state = click.option(
    "--state",
    "states",
    multiple=True,
    metavar="OUTPUT=INPUT",
    help="An output that is an input of the next run; may be repeated. auto: found by names.",
)


_exit = click.option(
    "--exit-when",
    "exits",
    metavar="OUTPUT=NUMBER",
    help="End an input early once all values of this output are as large.",
)


_tiles = click.option(
    "--tiles",
    metavar="SIZE,OVERLAP",
    help="Cut pictures into tiles of SIZE pixels that overlap, over all devices.",
)


def _graph_options(function: F) -> F:
    more = (_plan_file, _exit, _state, _tiles, _objective, _inputs, _model)
    for add in (json_option, cluster_options, *more):
        function = add(function)
    return function


@command.command()
@_model
@json_option
def inspect(model: Path, as_json: bool) -> None:
    """Describe MODEL: inputs, outputs, weights, and where it can be cut. Runs nothing."""
    file = open_onnx(model)
    atoms = Atoms(file)
    state = find_state(file)
    opsets = {each.domain or "ai.onnx": each.version for each in file.model.opset_import}
    if as_json:
        _print_finite(
            {
                "inputs": [_value_json(each) for each in file.inputs],
                "outputs": [_value_json(each) for each in file.outputs],
                "opsets": opsets,
                "nodes": len(file.nodes),
                "atoms": len(atoms),
                "weight_bytes": file.total_weight_bytes,
                "state": state,
            }
        )
        return
    versions = printable(", ".join(f"{domain} {version}" for domain, version in opsets.items()))
    click.echo(
        f"{model.name}: {len(file.nodes)} nodes in {len(atoms)} atoms, "
        f"{format_size(file.total_weight_bytes)} of weights, opset {versions}"
    )
    for what, values in (("input", file.inputs), ("output", file.outputs)):
        for each in values:
            click.echo(printable(f"  {what} {each.name}: {each}"))
    for output, name in state.items():
        click.echo(printable(f"  perhaps state (--state auto): {output} is the next {name}"))


@command.command()
@_graph_options
def plan(
    model: Path,
    files: tuple[str, ...],
    objective: Objective,
    plan_file: Path | None,
    states: tuple[str, ...],
    exits: str | None,
    tiles: str | None,
    peers: ClusterOptions,
    as_json: bool,
) -> None:
    """Measure MODEL on the peers and show the plan. Loads nothing."""
    sample, state = read_inputs(files, open_onnx(model).inputs), _read_state(states)
    with open_cluster(peers) as cluster:
        graph = cluster.load_graph(
            model,
            sample=sample,
            objective=objective,
            plan=_read_plan(plan_file),
            state=state,
            exit_when=_read_exit(exits),
            tiles=_read_tiles(tiles),
            plan_only=True,
        )
        found = graph.explain()
    if as_json:
        _print_finite({"plan": graph.plan.to_json(), **found})
    else:
        _show_plan(model, found)


@command.command()
@_graph_options
@click.option(
    "--output",
    "saved",
    multiple=True,
    metavar="NAME=FILE.npy",
    help="Save an output; may be repeated.",
)
def run(
    model: Path,
    files: tuple[str, ...],
    objective: Objective,
    plan_file: Path | None,
    states: tuple[str, ...],
    exits: str | None,
    tiles: str | None,
    peers: ClusterOptions,
    as_json: bool,
    saved: tuple[str, ...],
) -> None:
    """Compute the outputs of MODEL for one set of inputs."""
    file, state = open_onnx(model), _read_state(states)
    sample = read_inputs(files, file.inputs)
    outputs = {each.name: each for each in file.outputs}
    places = dict(map(name_and_file, saved))
    for name in places:
        if name not in outputs:
            known = printable(", ".join(outputs))
            raise RequestError(f"{name!r:.80} is no output", remedy=f"give one of {known}")
    with open_cluster(peers) as cluster:
        given = sample if sample is not None else made_up_sample(file.inputs)
        with cluster.load_graph(
            model,
            sample=given,
            objective=objective,
            plan=_read_plan(plan_file),
            state=state,
            exit_when=_read_exit(exits),
            tiles=_read_tiles(tiles),
        ) as graph:
            for name in set(places) & set(graph.state):
                raise RequestError(
                    f"{name!r:.80} is state, which stays on its device",
                    remedy="save another output, or leave --state out",
                )
            results = graph.run(_begun(graph, given))
            found = graph.explain()
    for name, place in places.items():
        if name not in results:
            click.echo(printable(f"{name} is not there: the input ended early"), err=True)
            continue
        array = results[name]
        np.save(place, array.astype(str) if array.dtype == object else array, allow_pickle=False)
    if as_json:
        _print_finite(
            {
                "outputs": {
                    name: {
                        "dtype": "string" if array.dtype == object else array.dtype.name,
                        "shape": list(array.shape),
                        "values": array.tolist() if array.size <= _MOST_VALUES else None,
                    }
                    for name, array in results.items()
                },
                **found,
            }
        )
        return
    for name, array in results.items():
        with np.printoptions(threshold=20, edgeitems=3, precision=6):
            dtype = "string" if array.dtype == object else array.dtype.name
            click.echo(f"{printable(name)}: {dtype} {list(array.shape)}\n{array}")


@command.command()
@_graph_options
@click.option("--runs", type=click.IntRange(1, 100_000), default=50, show_default=True)
def bench(
    model: Path,
    files: tuple[str, ...],
    objective: Objective,
    plan_file: Path | None,
    states: tuple[str, ...],
    exits: str | None,
    tiles: str | None,
    peers: ClusterOptions,
    as_json: bool,
    runs: int,
) -> None:
    """Measure MODEL by its plan and on the best single device, beside what was predicted."""
    sample, state = read_inputs(files, open_onnx(model).inputs), _read_state(states)
    given = sample if sample is not None else made_up_sample(open_onnx(model).inputs)
    rows: list[dict[str, Any]] = []
    ends = _read_exit(exits)
    with open_cluster(peers) as cluster:
        with cluster.load_graph(
            model,
            sample=given,
            objective=objective,
            plan=_read_plan(plan_file),
            state=state,
            exit_when=ends,
            tiles=_read_tiles(tiles),
        ) as graph:
            rows.append(_measured(graph, given, runs))
            alone = graph.alone
        if alone is not None and len(rows[0]["devices"]) > 1:
            with cluster.load_graph(
                model,
                sample=given,
                objective=objective,
                plan=alone[0],
                state=state,
                exit_when=ends,
                tiles=_read_tiles(tiles),
            ) as graph:
                rows.append(_measured(graph, given, runs))
    if as_json:
        _print_finite(rows)
        return
    columns: Columns[dict[str, Any]] = {
        "devices": lambda row: ", ".join(row["devices"]),
        "ms/input": lambda row: f"{row['latency_s'] * 1e3:.2f}",
        "predicted": lambda row: f"{row['predicted_latency_s'] * 1e3:.2f}",
        "inputs/s": lambda row: f"{row['inputs_per_s']:.1f}",
        "predicted ": lambda row: f"{row['predicted_inputs_per_s']:.1f}",
    }
    right = [heading for heading in columns if heading != "devices"]
    print_table(make_table(rows, columns, title=f"{model.name}: {runs} inputs", right=right))


@command.command()
@click.argument("folder", type=click.Path(path_type=Path))
@_inputs
@click.option("--text", help="A text for the encoder, if the folder has tokenizer.json.")
@click.option("--tokens", metavar="ID,ID,…", help="Token ids for the encoder.")
@click.option(
    "--sound",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A WAV file to transcribe, by an export of Whisper's kind.",
)
@click.option("--language", help="The language of --sound, as en.  [default: what it sounds like]")
@click.option("--beams", type=click.IntRange(1, 64), help="Rows of beam search; 1 is greedy.")
@click.option("--max-new-tokens", type=click.IntRange(1, 1 << 20), help="Most tokens to make.")
@cluster_options
@json_option
def generate(
    folder: Path,
    files: tuple[str, ...],
    text: str | None,
    tokens: str | None,
    sound: Path | None,
    language: str | None,
    beams: int | None,
    max_new_tokens: int | None,
    peers: ClusterOptions,
    as_json: bool,
) -> None:
    """Answer one input by an encoder–decoder export in FOLDER, as optimum writes it.

    \b
    Examples:
      edge graph generate opus-mt-en-de --text "Good morning."
      edge graph generate t5-small --tokens 71,307,1 --beams 4
      edge graph generate whisper-tiny --sound talk.wav --language en
    """
    inputs: Any = read_inputs(files, ())
    given = [each for each in (inputs, text, tokens, sound) if each is not None]
    if len(given) != 1:
        raise click.UsageError("give one of --input, --text, --tokens and --sound")
    if sound is None and language is not None:
        raise click.UsageError("--language is for --sound")
    if sound is not None and (beams, max_new_tokens) != (None, None):
        raise click.UsageError(
            "--sound is transcribed as the export says, without --beams and --max-new-tokens"
        )
    if tokens is not None:
        if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", tokens):
            raise click.UsageError(f"{tokens!r:.80} is not ID,ID,…")
        inputs = [int(each) for each in tokens.split(",")]
    with (
        open_cluster(peers) as cluster,
        cluster.load_graphs(folder, max_beams=beams or 4) as export,
    ):
        if sound is not None:
            found = export.transcribe(sound, language=language)
        else:
            asked = text if text is not None else inputs
            found = export.generate(asked, num_beams=beams, max_new_tokens=max_new_tokens)
        plans = {name: plan.to_json() for name, plan in export.plans.items()}
    if as_json:
        _print_finite({**asdict(found), "plans": plans})
    else:
        ids = " ".join(map(str, found.token_ids))
        click.echo(ids if found.text is None else printable(found.text))


def _begun(graph: Graph, given: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The inputs of a run, behind a new first state if there is one among them."""
    states = graph.state.values()
    if first := {name: array for name, array in given.items() if name in states}:
        graph.reset(first)
    return {name: array for name, array in given.items() if name not in states}


def _measured(graph: Graph, given: Mapping[str, NDArray[Any]], runs: int) -> dict[str, Any]:
    inputs, tiles = _begun(graph, given), graph.tiles
    for _ in range(3):
        graph.run(inputs)
    times = []
    for _ in range(runs):
        began_s = time.perf_counter()
        graph.run(inputs)
        times.append(time.perf_counter() - began_s)
    began_s = time.perf_counter()
    for _result in graph.stream(repeat(inputs, runs)):
        pass
    stream_s = time.perf_counter() - began_s
    return {
        "devices": list(graph.plan.devices),
        "latency_s": statistics.median(times),
        "predicted_latency_s": graph.estimate.latency_s if tiles is None else tiles.picture_s,
        "inputs_per_s": runs / stream_s,
        "predicted_inputs_per_s": 1 / tiles.interval_s if tiles else graph.estimate.inputs_per_s,
        "plan": graph.plan.to_json(),
    }


def _show_plan(model: Path, found: dict[str, Any]) -> None:
    copies = {stage["copy"] for stage in found["stages"]}
    columns: Columns[dict[str, Any]] = {
        **({"copy": lambda row: str(row["copy"] + 1)} if len(copies) > 1 else {}),
        "device": lambda row: str(row["device"]),
        "atoms": lambda row: f"{row['atoms'][0]}–{row['atoms'][1] - 1}",
        "first node": lambda row: str(row["first_node"]),
        "last node": lambda row: str(row["last_node"]),
        "computes": lambda row: f"{row['compute_s'] * 1e3:.2f} ms",
        "receives": lambda row: f"{row['receive_s'] * 1e3:.2f} ms",
        "sends": lambda row: f"{row['send_s'] * 1e3:.2f} ms",
        "memory": lambda row: format_size(row["memory_bytes"]),
    }
    right = ["copy", "atoms", "computes", "receives", "sends", "memory"]
    console = Console()
    print_table(make_table(found["stages"], columns, title=model.name, right=right), console)
    if (tiles := found["tiles"]) is not None:
        click.echo(
            f"{tiles['count']} tiles of {tiles['size']} pixels: {tiles['picture_s']:.2f} s for the "
            "picture; for each tile"
        )
    click.echo(_predicted("predicted", found))
    if found["exit_share"] is not None:
        click.echo(f"{found['exit_share']:.0%} of the inputs end before atom {found['exit_at']}")
    if found["alone"] is not None:
        click.echo(_predicted(f"alone on {found['alone']['device']}", found["alone"]))


def _predicted(what: str, found: Mapping[str, Any]) -> str:
    return (
        f"{what}: {found['latency_s'] * 1e3:.2f} ms for one input, "
        f"{1 / max(found['interval_s'], 1e-9):.1f} inputs/s in a stream"
    )


def _value_json(value: GraphValue) -> dict[str, Any]:
    shape = None if value.shape is None else list(value.shape)
    return {"name": value.name, "dtype": value.dtype, "shape": shape}


def _print_finite(value: Any) -> None:
    """Print JSON, in which numbers that are infinite or none are null: JSON has no word for
    them."""
    print_json(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _read_state(given: tuple[str, ...]) -> Any:
    if given in ((), ("auto",)):
        return given[0] if given else None
    pairs = [each.partition("=") for each in given]
    for output, sign, name in pairs:
        if not sign or not output or not name:
            raise click.UsageError(f"{output!r:.80} is not OUTPUT=INPUT, nor auto alone")
    return {output: name for output, _sign, name in pairs}


def _read_exit(given: str | None) -> tuple[str, float] | None:
    if given is None:
        return None
    output, _sign, number = given.rpartition("=")
    try:
        return output, float(number)
    except ValueError:
        raise click.UsageError(f"{given!r:.80} is not OUTPUT=NUMBER") from None


def _read_tiles(given: str | None) -> tuple[int, int] | None:
    if given is None:
        return None
    if not re.fullmatch(r"\d{1,6},\d{1,6}", given):
        raise click.UsageError(f"{given!r:.80} is not SIZE,OVERLAP, in pixels")
    size, overlap = map(int, given.split(","))
    return size, overlap


def _read_plan(path: Path | None) -> Any:
    if path is None:
        return "auto"
    try:
        value = parse_json(read_file(path, _MOST_PLAN_BYTES))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} cannot be read as JSON: {error}", remedy="edge graph plan --json writes a plan"
        ) from error
    value = value.get("plan", value) if isinstance(value, dict) else value
    if not isinstance(value, dict):
        raise RequestError(f"{path} is no plan", remedy="edge graph plan MODEL --json writes one")
    return value
