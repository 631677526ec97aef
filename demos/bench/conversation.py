"""A conversation that grows: what each next turn computes, and how long it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.llama_server import answered, served_by_llama
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import local_model, random_prompt

_Turn = Callable[[list[int]], Mapping[str, float]]
"""Answers a prompt, which it lengthens by the answer."""


@case.case(
    "what the turns of a conversation cost",
    case.FILE,
    case.shape("M"),
    *case.peers(1, 1, "auto"),
    case.dtype(),
    case.number("--turns", 30),
    case.number("--turn-tokens", 900, "That each turn adds."),
    case.number("--new-tokens", 100, least=8),
    case.text("--llama-server", "", "llama.cpp's server: its own cache of the file, beside."),
    case.FOLDER,
)
def conversation(given: Given) -> Iterator[Found]:
    """What the turns of a long conversation cost, against llama-server with as many threads in all
    and its own caching.

    Each turn sends all tokens so far, some more, and gets an answer. Computed: tokens of a turn's
    prompt that were computed, relative to those that are new since the last answer.
    """
    if given.llama_server and not given.file:
        raise SystemExit("llama-server reads a GGUF file: name it by --file")
    figures = Figures()
    context = given.turns * (given.turn_tokens + given.new_tokens)
    with contextlib.ExitStack() as stack:
        dtype = "auto" if given.file else given.dtype
        model = local_model(
            stack, given.path, peers=given.peers, threads=given.threads, plan=given.plan,
            dtype=dtype, context_tokens=context,
        )  # fmt: skip
        sides: dict[str, _Turn] = {"Edge": _edge(model, given.new_tokens)}
        if given.llama_server:
            sides["llama.cpp"] = _llama(stack, given, context)
        said: dict[str, list[int]] = {side: [] for side in sides}
        for number in range(given.turns):
            told: dict[str, Mapping[str, float]] = {}
            for side in list(sides)[:: 1 if number % 2 else -1]:
                said[side] += random_prompt(model, given.turn_tokens, number)
                told[side] = sides[side](said[side])
            for side, each in told.items():
                for name, value in each.items():
                    unit = {"computed": "ratio", "decode": "tok/s"}.get(name, "s")
                    figures.add(f"{name}, {side}", unit, value)
            if "llama.cpp" in told:
                for name in ("first token", "whole turn"):
                    ratio = told["llama.cpp"][name] / told["Edge"][name]
                    figures.add(f"speed of {name}, Edge / llama.cpp", "ratio", ratio)
    lengths = f"{given.turns} turns of {given.turn_tokens} + {given.new_tokens} tokens"
    yield Found(figures=figures, variant=f"{given.arrangement}, {lengths}", model=given.model)


def _edge(model: edge.Model, new_tokens: int) -> _Turn:
    known = 0

    def turn(prompt: list[int]) -> Mapping[str, float]:
        nonlocal known
        begun = time.perf_counter()
        reply = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
        whole_s = time.perf_counter() - begun
        computed = len(prompt) - reply.statistics["found_tokens"]
        told = {
            "computed": computed / (len(prompt) - known),
            "first token": reply.statistics["first_token_s"],
            "whole turn": whole_s,
            "decode": reply.tokens_per_s or 0.0,
        }
        prompt += reply.token_ids
        known = len(prompt)
        return told

    return turn


def _llama(stack: contextlib.ExitStack, given: Given, context: int) -> _Turn:
    threads = str(given.peers * given.threads)
    arguments = ["-c", str(context), "-np", "1", "-t", threads, "--no-webui"]
    url = stack.enter_context(served_by_llama(given.llama_server, given.path, *arguments))
    known = 0

    def turn(prompt: list[int]) -> Mapping[str, float]:
        nonlocal known
        begun = time.perf_counter()
        found = answered(url, prompt, given.new_tokens, cache_prompt=True)
        whole_s = time.perf_counter() - begun
        times = found["timings"]
        told = {
            "computed": times["prompt_n"] / (len(prompt) - known),
            "first token": times["prompt_ms"] / 1e3,
            "whole turn": whole_s,
            "decode": times["predicted_per_second"],
        }
        prompt += found["tokens"]
        known = len(prompt)
        return told

    return turn
