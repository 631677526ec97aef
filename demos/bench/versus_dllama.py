"""Two peers in tensor parallel against distributed-llama in the same arrangement, in turn.

python -m edge.demos.bench.versus_dllama --dllama PATH/dllama --model W-q40.m --tokenizer W.t

The model file is made by distributed-llama's own converter from the same checkpoint (q40 weights);
activations travel as q80 there, which is its fast setting, and as float32 here. Edge's one-core
peer is measured in the same rounds.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.shapes import checkpoint, described

PREDICTION = re.compile(r"Prediction\s+nTokens: \d+\s+tokens/s: ([0-9.]+)")


def distributed_llama(program: str, model: str, tokenizer: str, new_tokens: int) -> float:
    """Tokens per second of a root and one worker, one thread each, over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    worker = subprocess.Popen(
        [program, "worker", "--port", port, "--nthreads", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        prompt, steps = "hello world this is a test", str(new_tokens + 28)
        done = subprocess.run(
            [
                program, "inference", "--model", model, "--tokenizer", tokenizer,
                "--buffer-float-type", "q80", "--prompt", prompt, "--steps", steps,
                "--nthreads", "1", "--workers", f"127.0.0.1:{port}",
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        worker.kill()
        worker.wait()
    found = PREDICTION.search(done.stdout)
    if found is None:
        raise SystemExit("distributed-llama printed no prediction speed")
    return float(found[1])


@click.command()
@click.option("--dllama", required=True, help="distributed-llama's program, built here.")
@click.option("--model", required=True, help="The same checkpoint, converted to q40.")
@click.option("--tokenizer", required=True)
@shape_option()
@click.option("--block-size", type=int, default=32, show_default=True)
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@folder_option
@append_option
def main(
    dllama: str,
    model: str,
    tokenizer: str,
    shape: str,
    block_size: int,
    new_tokens: int,
    rounds: int,
    folder: Path,
    append: bool,
) -> None:
    """Decode speed of three arrangements, and the ratios of each round."""
    path = checkpoint(shape, folder)
    figures = Figures()
    options = {"dtype": "int4-pure", "block_size": block_size, "context_tokens": 32 + new_tokens}
    with (
        edge.Cluster.local(2, threads=1) as pair,
        edge.Cluster.local(1, threads=1) as solo,
        pair.load(path, plan="tensor", **options) as split,  # type: ignore[arg-type]
        solo.load(path, **options) as whole,  # type: ignore[arg-type]
    ):
        prompt: list[int] = np.random.default_rng(1).integers(split.vocab_size, size=32).tolist()

        def speed(loaded: edge.Model) -> float:
            reply = loaded.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
            return reply.tokens_per_s

        for number in range(rounds + 1):
            two = speed(split)
            theirs = distributed_llama(dllama, model, tokenizer, new_tokens)
            one = speed(whole)
            if number:  # the first round warms up
                figures.add("decode, Edge 2 x 1 thread", "tok/s", two)
                figures.add("decode, distributed-llama 2 x 1 thread", "tok/s", theirs)
                figures.add("decode, Edge 1 x 1 thread", "tok/s", one)
                figures.add("Edge / distributed-llama", "ratio", two / theirs)
                figures.add("Edge, two peers / one", "ratio", two / one)
    results.publish(
        figures.metrics(),
        question="two peers against distributed-llama, in turn",
        variant=f"int4-pure/{block_size} float32 wire; distributed-llama q40 weights, q80 wire",
        link="TCP over loopback",
        model=described(shape),
        keep=append,
    )


if __name__ == "__main__":
    sys.exit(main())
