"""Speeds of arrangements, formats and programs that answer in turn."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.llama_files import gguf_of, read_of_token
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import answering, compared, in_turn, local_model
from edge.studies.versus_llama_cpp import Llama, compare

_ARRANGEMENTS = {
    "1 x 1 thread": (1, 1, "auto"),
    "2 x 1 thread": (2, 1, "tensor"),
    "1 x 2 threads": (1, 2, "auto"),
}
"""Peers, threads of each, and the plan."""

_SHORT_TOKENS = 512
"""Behind a longer prompt, the length is told of decoding, too."""

_PREDICTION = re.compile(r"Prediction\s+nTokens: \d+\s+tokens/s: ([0-9.]+)")


@case.case(
    "two peers against one core, in turn",
    case.shape(),
    case.block_size(32),
    *case.lengths(128, 48),
    case.rounds(7),
    case.FOLDER,
)
def two_peers(given: Given) -> Iterator[Found]:
    """What a second peer gains on one machine, and the most that its second core can gain.

    One peer with one thread, two such peers in tensor parallel over loopback, and one peer with two
    threads. The last has no messages and shares the same memory, so what it gains over the first is
    what this machine has to give.
    """
    path, context = given.path, given.context_tokens
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, (peers, threads, plan) in _ARRANGEMENTS.items():
            model = local_model(
                stack, path, peers=peers, threads=threads, plan=plan, dtype="int4-pure",
                block_size=given.block_size, context_tokens=context,
            )  # fmt: skip
            sides[name] = answering(model, given.prompt_tokens, given.new_tokens)
        found = compared(sides, given.rounds, over="1 x 1 thread")
    variant = f"int4-pure/{given.block_size}, float32 wire"
    yield Found(figures=found, variant=variant, model=given.model)


@case.case(
    "two peers against distributed-llama, in turn",
    click.option("--dllama", required=True, help="distributed-llama's program, built here."),
    click.option(
        "--model", "model_file", required=True, help="The same checkpoint, converted to q40 by it."
    ),
    click.option("--tokenizer", required=True),
    case.shape(),
    case.block_size(32),
    case.number("--new-tokens", 64, least=2),
    case.rounds(5),
    case.FOLDER,
)
def dllama(given: Given) -> Iterator[Found]:
    """Two peers in tensor parallel against distributed-llama in the same arrangement.

    Activations travel as q80 there, which is its fast setting, and as float32 here. Edge's one-core
    peer is measured in the same rounds.
    """
    theirs, decode = "distributed-llama 2 x 1 thread", f"decode {given.new_tokens}"
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[int], dict[str, float]]] = {
            theirs: lambda _number: {decode: _distributed_llama(given)}
        }
        for peers in (2, 1):
            model = local_model(
                stack, given.path, peers=peers, plan="tensor" if peers > 1 else "auto",
                dtype="int4-pure", block_size=given.block_size,
                context_tokens=32 + given.new_tokens,
            )  # fmt: skip
            sides[f"Edge {peers} x 1 thread"] = answering(model, 32, given.new_tokens)
        found = Figures()
        for turn in in_turn(sides, given.rounds):
            for name, speeds in turn.items():
                found.add(f"decode, {name}", "tok/s", speeds[decode])
            two, one = (turn[f"Edge {peers} x 1 thread"][decode] for peers in (2, 1))
            found.add("Edge / distributed-llama", "ratio", two / turn[theirs][decode])
            found.add("Edge, two peers / one", "ratio", two / one)
    yield Found(
        figures=found,
        variant=f"int4-pure/{given.block_size} float32 wire; distributed-llama q40 weights, q80 "
        "wire",
        model=given.model,
    )


def _distributed_llama(given: Given) -> float:
    """Tokens per second of a root and one worker, one thread each, over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    quiet = subprocess.DEVNULL
    worker = subprocess.Popen(
        [given.dllama, "worker", "--port", port, "--nthreads", "1"], stdout=quiet, stderr=quiet
    )
    command = [given.dllama, "inference", "--model", given.model_file, "--nthreads", "1"]
    command += ["--tokenizer", given.tokenizer]
    command += ["--buffer-float-type", "q80", "--workers", f"127.0.0.1:{port}"]
    command += ["--prompt", "hello world this is a test", "--steps", str(given.new_tokens + 28)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        worker.kill()
        worker.wait()
    found = _PREDICTION.search(done.stdout)
    if found is None:
        raise SystemExit("distributed-llama printed no prediction speed")
    return float(found[1])


@case.case(
    "one peer against llama.cpp, in turn",
    case.LLAMA_PYTHON,
    case.shape(),
    case.FILE,
    click.option(
        "--gguf",
        type=click.Path(exists=True, path_type=Path),
        help="llama.cpp's file, where Edge takes a checkpoint (--file).",
    ),
    case.text("--form", "Q4_K_M", "Of the shape's file: llama.cpp's format."),
    click.option("--no-flash", is_flag=True, help="llama.cpp without flash attention."),
    click.option("--same-file", is_flag=True, help="Edge takes the shape's file, too."),
    case.dtype(),
    click.option("--block-size", type=int, help="Of --dtype, if not its own."),
    case.number("--threads", 2),
    *case.lengths(128, 64),
    case.number("--requests", 1, "Also this many at once."),
    case.rounds(7),
    case.FOLDER,
)
def llama(given: Given) -> Iterator[Found]:
    """Edge on one peer against llama.cpp: prefill and decode, bytes of weights and their rate.

    The case `quality` tells how far each format is from float32: speeds of unlike quality say
    little. With both at one rate of weights, the ratio of decoding would be that of llama.cpp's
    bytes to Edge's.
    """
    gguf = (
        given.gguf
        or given.file
        or gguf_of(given.shape, given.folder, python=given.llama_python, form=given.form)
    )
    source = gguf if given.same_file else given.path
    dtype, block_size = given.dtype, given.block_size
    ours = f"{dtype}/{block_size}" if block_size else dtype
    if source == gguf:
        name = given.file.name if given.file else given.form
        ours, dtype, block_size = f"{name} as stored", "auto", None
    context, theirs = given.context_tokens, f"llama.cpp {given.form}"
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(
            Llama(
                gguf, python=given.llama_python, threads=given.threads, context_tokens=context,
                requests=given.requests, flash=not given.no_flash,
            )
        )  # fmt: skip
        model = local_model(
            stack, source, threads=given.threads, dtype=dtype, block_size=block_size,
            context_tokens=context, concurrency=given.requests,
        )  # fmt: skip
        measured = compare(
            model, other, prompt_tokens=given.prompt_tokens, new_tokens=given.new_tokens,
            requests=given.requests, rounds=given.rounds,
        )  # fmt: skip
        mine, others = sum(model.token_weight_bytes.values()), read_of_token(gguf)
    found = Figures()
    behind = f" behind {given.prompt_tokens}" if given.prompt_tokens > _SHORT_TOKENS else ""
    for name, pairs in (
        (f"prefill {given.prompt_tokens}", measured.prefill),
        (f"decode {given.new_tokens}{behind}", measured.decode),
        (f"decode {given.requests} at once", measured.batch),
    ):
        for one, two in pairs:
            found.add(f"{name}, Edge", "tok/s", one)
            found.add(f"{name}, {theirs}", "tok/s", two)
            found.add(f"{name}, Edge / llama.cpp", "ratio", one / two)
    found.add("weights for a token, Edge", "MB", mine / 1e6)
    found.add(f"weights for a token, {theirs}", "MB", others / 1e6)
    found.add("weights for a token, llama.cpp / Edge", "ratio", others / mine)
    for one, two in measured.decode:
        found.add("rate of weights, Edge", "GB/s", one * mine / 1e9)
        found.add(f"rate of weights, {theirs}", "GB/s", two * others / 1e9)
        found.add("rate of weights, Edge / llama.cpp", "ratio", one * mine / (two * others))
    yield Found(
        figures=found,
        variant=f"{ours}, {given.threads} threads; llama-cpp-python {other.version} {given.form}"
        + ", no flash attention" * given.no_flash,
        link="none",
        model=given.model,
    )
