"""How fast each weight format reads a prompt and decodes, Edge's and llama.cpp's, all in turn.

python -m edge.demos.bench.format_speeds --llama-python OTHER_ENVIRONMENT/bin/python --append

Everything is loaded at once, so a round runs through all formats within a minute, and the ratios to
Q4_K_M are taken within a round. The names of the rows are those of edge.demos.bench.quality, so
that a format's speed and loss can be put next to each other; edge.demos.bench.quality_plot does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

import edge
from edge.api.quality import format_name
from edge.api.versus_llama_cpp import Llama
from edge.demos.bench import llama_logits, results
from edge.demos.bench.limited.sides import gguf_of
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.quality import EDGE_FORMATS, FEW_BIT_FORMATS, calibrated_name
from edge.demos.bench.results import Figures
from edge.demos.shapes import checkpoint, described
from edge.planning.load_options import LoadOptions
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import DTYPES, Dtype

QUESTION = "how fast a weight format decodes"
YARDSTICK = "Q4_K_M"
PARTS = ("decode", "prefill")
_PROMPT_TOKENS = 128


@click.command()
@click.option("--llama-python", required=True, help="A Python with llama-cpp-python and gguf.")
@shape_option()
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--new-tokens", type=int, default=48, show_default=True)
@click.option("--rounds", type=int, default=7, show_default=True)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help=f"Of Edge: these, and of llama.cpp {YARDSTICK} alone.",
)
@click.option(
    "--bits",
    "several_bits",
    type=float,
    multiple=True,
    help="Of edge quantize as well: folders of so many bits, which are made if they are not there.",
)
@folder_option
@append_option
def main(
    llama_python: str,
    shape: str,
    threads: int,
    new_tokens: int,
    rounds: int,
    dtypes: tuple[Dtype, ...],
    several_bits: tuple[float, ...],
    folder: Path,
    append: bool,
) -> None:
    """Tokens per second of each format, and the ratio to llama.cpp's Q4_K_M."""
    path = checkpoint(shape, folder)
    context = _PROMPT_TOKENS + new_tokens
    speeds_of: dict[str, Callable[[], dict[str, float]]] = {}
    with contextlib.ExitStack() as held:

        def ours(model: edge.Model) -> Callable[[], dict[str, float]]:
            random = np.random.default_rng(1)

            def run() -> dict[str, float]:
                # Another one each time, of which nothing is found.
                prompt: list[int] = random.integers(model.vocab_size, size=_PROMPT_TOKENS).tolist()
                reply = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
                first_s = reply.statistics["first_token_s"]
                return {"decode": reply.tokens_per_s, "prefill": _PROMPT_TOKENS / first_s}

            return run

        def theirs(llama: Llama) -> Callable[[], dict[str, float]]:
            def run() -> dict[str, float]:
                took = llama.run(_PROMPT_TOKENS, new_tokens)
                return {
                    "decode": (new_tokens - 1) / took["decode_s"],
                    "prefill": _PROMPT_TOKENS / took["prefill_s"],
                }

            return run

        opened = held.enter_context(Checkpoint.open(path))
        formats = tuple(LoadOptions(dtype=dtype) for dtype in dtypes)
        for options in formats or EDGE_FORMATS + FEW_BIT_FORMATS:
            if options.dtype == "float32":
                continue  # nobody decodes with it, and it takes as much memory as all others
            cluster = held.enter_context(edge.Cluster.local(1, threads=threads))
            model = held.enter_context(cluster.load(path, options, context_tokens=context))
            name = format_name(options.weight_format(opened), options)
            speeds_of[f"Edge {name}"] = ours(model)
        for bits in several_bits:
            rounded = folder / f"{shape}-{bits:g}-bits"
            cluster = held.enter_context(edge.Cluster.local(1, threads=threads))
            if not rounded.exists():
                cluster.quantize(path, rounded, bits=bits)
            model = held.enter_context(cluster.load(rounded, context_tokens=context))
            speeds_of[calibrated_name(bits)] = ours(model)
        for form in [YARDSTICK] if dtypes else llama_logits.FORMATS:
            gguf = gguf_of(shape, folder, python=llama_python, form=form)
            llama = Llama(gguf, python=llama_python, threads=threads, context_tokens=context)
            held.enter_context(llama)
            speeds_of[f"llama.cpp {form} (llama-cpp-python {llama.version})"] = theirs(llama)
        (yardstick,) = (name for name in speeds_of if f"llama.cpp {YARDSTICK} " in name)
        figures = {name: Figures() for name in speeds_of}
        for number in range(rounds + 1):
            speeds = {name: run() for name, run in speeds_of.items()}
            if number == 0:
                continue  # it warms all of them up
            for name, speed in speeds.items():
                for part in PARTS:
                    figures[name].add(part, "tok/s", speed[part])
                    ratio = speed[part] / speeds[yardstick][part]
                    figures[name].add(f"{part} / llama.cpp {YARDSTICK}", "ratio", ratio)
    for name, found in figures.items():
        print(name)
        results.publish(
            found.metrics(),
            question=QUESTION,
            variant=name,
            link="none",
            model=described(shape),
            keep=append,
        )


if __name__ == "__main__":
    sys.exit(main())
