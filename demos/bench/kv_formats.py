"""What number formats of keys and values cost: their loss, their bytes and their speed.

python -m edge.demos.bench.kv_formats --append

The model and its text are those of edge.demos.bench.quality, and so is the loss: against the logits
of Edge in float32 throughout. All formats of keys and values are loaded at once for a format of
weights and answer in turn, so that ratios of speeds are taken within a round.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.quality import MODEL, WANTED, Logits, against, gguf_file, windows_of_text
from edge.demos.bench.results import Figures
from edge.memory.step_memory import cache_token_bytes, state_bytes
from edge.planning.load_options import LoadOptions
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import KV_DTYPES, Dtype
from edge.weights.layout import whole_layout

QUESTION = "what a format of keys and values costs"
WEIGHTS: tuple[Dtype, ...] = ("int4", "float32")
_PROMPT_TOKENS, _NEW_TOKENS = 320, 64


@click.command()
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--rounds", type=int, default=7, show_default=True)
@folder_option
@append_option
def main(threads: int, rounds: int, folder: Path, append: bool) -> None:
    """Loss, bytes of a token and tokens per second, for each format of weights."""
    path = gguf_file(folder)
    with Checkpoint.open(path) as checkpoint:
        spec, encode = checkpoint.spec, checkpoint.tokenizer.encode
        windows = windows_of_text(encode)
    prompt = windows[0, :_PROMPT_TOKENS].tolist()

    def load(held: contextlib.ExitStack, options: LoadOptions) -> edge.Model:
        cluster = held.enter_context(edge.Cluster.local(1, threads=threads))
        context = WANTED.window_tokens
        return held.enter_context(cluster.load(path, options, context_tokens=context))

    with contextlib.ExitStack() as held:
        model = load(held, LoadOptions(dtype="float32"))
        reference: Logits = np.stack([model.logits(window) for window in windows.tolist()])
    for dtype in WEIGHTS:
        with contextlib.ExitStack() as held:
            models = {
                kv_dtype: load(held, LoadOptions(dtype=dtype, kv_dtype=kv_dtype))
                for kv_dtype in KV_DTYPES
            }
            figures = {kv_dtype: Figures() for kv_dtype in KV_DTYPES}
            for kv_dtype, model in models.items():
                found = against(reference, map(model.logits, windows.tolist()), windows)
                figures[kv_dtype].add("mean KL", "nats", found.mean_kl)
                figures[kv_dtype].add("99 % KL", "nats", found.p99_kl)
                figures[kv_dtype].add("same top", "%", 100 * found.same_top)
                token_bytes = cache_token_bytes(whole_layout(spec), kv_dtype)
                figures[kv_dtype].add("keys and values of a token", "B", token_bytes)
                beside = state_bytes(whole_layout(spec), kv_dtype)
                figures[kv_dtype].add("beside them, of a request", "B", beside)
            for number in range(rounds + 1):
                speeds = {
                    kv_dtype: model.generate(
                        prompt, max_new_tokens=_NEW_TOKENS, ignore_eos=True
                    ).tokens_per_s
                    for kv_dtype, model in models.items()
                }
                if number == 0:
                    continue  # it warms all of them up
                for kv_dtype, speed in speeds.items():
                    figures[kv_dtype].add("decode", "tok/s", speed)
                    ratio = speed / speeds["float32"]
                    figures[kv_dtype].add("decode / KV float32", "ratio", ratio)
        for kv_dtype, found_of in figures.items():
            variant = f"weights {dtype}, KV {kv_dtype}"
            print(variant)
            results.publish(
                found_of.metrics(),
                question=QUESTION,
                variant=variant,
                link="none",
                model=MODEL,
                keep=append,
            )


if __name__ == "__main__":
    sys.exit(main())
