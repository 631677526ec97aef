"""Images in a conversation: the time to read one, on one device or another, and of later turns."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import edge
from edge.demos.bench import case, llama_pictures
from edge.demos.bench.case import Found, Given
from edge.demos.bench.llama_files import gguf_of, llama_process
from edge.demos.bench.results import Figures
from edge.demos.bench.seeing import seeing_checkpoint
from edge.demos.bench.turns import in_turn, random_prompt
from edge.demos.fleet import Fleet

WIDTH, HEIGHT = 1024, 768
_ASKED = "What is this? " * 4
_OPTIONS: dict[str, Any] = {"context_tokens": 2048, "speculate": "off"}


@case.case(
    "what an image takes to read",
    case.shape("M"),
    case.choice("--dtype", ["int8", "float32"], "int8"),
    case.number("--threads", 1, "Of the peer, and of llama.cpp."),
    case.number("--beside", 0, "Threads of a second peer, without a part of the plan.", least=0),
    case.rounds(5),
    case.text("--llama-python", "", "A Python with gguf, and llama-cpp-python with mtmd."),
    case.FOLDER,
)
def pictures(given: Given) -> Iterator[Found]:
    """What an image of 1024 x 768 takes to read, against llama.cpp's mtmd and against the
    prediction; and the first token of the next turn against its new tokens alone.

    With --beside instead: how much sooner the first token is there if a second peer reads the
    image, measured and predicted.
    """
    path = seeing_checkpoint(given.shape, given.folder)
    variant = f"{given.dtype}, {given.threads} threads"
    with contextlib.ExitStack() as stack:
        if given.beside:
            figures = _beside(stack, given, path)
            variant += f", beside a peer of {given.beside}"
        else:
            figures = _alone(stack, given, path)
    yield Found(figures=figures, variant=variant, model=f"{given.model}, SmolVLM's tower")


def _alone(stack: contextlib.ExitStack, given: Given, path: Path) -> Figures:
    figures = Figures()
    cluster = stack.enter_context(edge.Cluster.local(1, threads=given.threads))
    cluster.propose(path, dtype=given.dtype, context_tokens=2048)  # measures the peer
    model = stack.enter_context(cluster.load(path, dtype=given.dtype, **_OPTIONS))

    def read(number: int) -> dict[str, float]:
        messages = _question(number)
        reply = model.chat(messages, max_new_tokens=2)
        told = reply.statistics
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": reply.text}]},
            {"role": "user", "content": [{"type": "text", "text": _ASKED}]},
        ]
        later = model.chat(messages, max_new_tokens=2).statistics
        assert not later["tiles_read"]
        new = later["prompt_tokens"] - later["found_tokens"]
        alone = model.generate(random_prompt(model, new, number), max_new_tokens=2)
        ratio = later["first_token_s"] / alone.statistics["first_token_s"]
        return {
            "seconds": told["pictures_s"],
            "tiles": told["tiles_read"],
            "predicted": told["predicted_pictures_s"] or float("nan"),
            "later": ratio,
        }

    sides: dict[str, Callable[[int], dict[str, float]]] = {"Edge": read}
    if given.llama_python:
        form = {"int8": "Q8_0", "float32": "F32"}[given.dtype]
        mmproj = _mmproj(path, given.llama_python, form)
        text = gguf_of(given.shape, given.folder, python=given.llama_python)
        ask = stack.enter_context(
            llama_process(given.llama_python, llama_pictures, text, mmproj, given.threads)
        )
        sides["llama.cpp"] = lambda number: ask({"width": WIDTH, "height": HEIGHT, "seed": number})
    for turn in in_turn(sides, given.rounds):
        own = turn["Edge"]
        for side, told in turn.items():
            figures.add(f"an image, {side}", "s", told["seconds"])
        figures.add("tiles of an image", "tiles", own["tiles"])
        figures.add("reading, measured / predicted", "ratio", own["seconds"] / own["predicted"])
        figures.add("first token of the next turn / its new tokens alone", "ratio", own["later"])
        if "llama.cpp" in turn:
            other = turn["llama.cpp"]
            assert other["tiles"] == own["tiles"], "the images were cut in different ways"
            speed = other["seconds"] / own["seconds"]
            figures.add("speed of reading, Edge / llama.cpp", "ratio", speed)
    return figures


def _beside(stack: contextlib.ExitStack, given: Given, path: Path) -> Figures:
    """The same plan in a cluster of its own device, and in one with a second device."""
    figures = Figures()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    names = ("first", "second")
    threads = {"first": given.threads, "second": given.beside}
    options = {name: ("--threads", str(each)) for name, each in threads.items()}
    fleet = stack.enter_context(Fleet(names, folder, options=options))
    for name in names:
        fleet.start(name)
    plan: Any = "auto"
    sides: dict[str, Callable[[int], dict[str, float]]] = {}
    sizes: tuple[tuple[str, ...], ...] = (names[:1], names)
    for peers in sizes:
        addresses = [fleet.addresses[name] for name in peers]
        cluster = stack.enter_context(edge.Cluster.connect(addresses))
        if plan == "auto":
            plan = cluster.propose(path, dtype=given.dtype, context_tokens=2048).plan
        else:
            cluster.propose(path, dtype=given.dtype, context_tokens=2048)  # measures the second
        model = stack.enter_context(
            cluster.load(path, plan=plan, dtype=given.dtype, replan="off", **_OPTIONS)
        )

        def read(number: int, model: edge.Model = model) -> dict[str, float]:
            told = model.chat(_question(number), max_new_tokens=2).statistics
            return {
                "seconds": told["first_token_s"],
                "predicted": told["predicted_first_token_s"],
                "reading": told["pictures_s"] / (told["predicted_pictures_s"] or float("nan")),
            }

        sides["alone" if len(peers) == 1 else "beside"] = read
    for turn in in_turn(sides, given.rounds):
        alone, beside = turn["alone"], turn["beside"]
        for side, told in turn.items():
            figures.add(f"first token, {side}", "s", told["seconds"])
            figures.add(f"first token, {side}, predicted", "s", told["predicted"])
            figures.add(f"reading, {side}, measured / predicted", "ratio", told["reading"])
        measured = alone["seconds"] - beside["seconds"]
        predicted = alone["predicted"] - beside["predicted"]
        figures.add("sooner, measured / predicted", "ratio", measured / predicted)
    return figures


def _question(number: int) -> list[dict[str, Any]]:
    """A question about an image of random pixels, another one for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG")
    parts = [{"type": "image", "image": held.getvalue()}, {"type": "text", "text": _ASKED}]
    return [{"role": "user", "content": parts}]


def _mmproj(path: Path, python: str, form: str) -> Path:
    target = path / f"mmproj-{form}.gguf"
    if not target.exists():
        partial = target.with_suffix(".partial")
        command = [python, llama_pictures.__file__, "mmproj", str(path), str(partial), form]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            raise SystemExit(f"{python} cannot make an mmproj file; it needs numpy and gguf")
        partial.rename(target)
    return target
