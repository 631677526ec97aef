"""Guessed tokens, on text that repeats, on new text, and in JSON of a schema."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.clusters.staged import STAGES, arrangement, model_in_stages
from edge.demos.bench.llama_server import served_by_llama, tokens_per_s
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import compared, random_prompt
from edge.protocol.step import Speculation

_TEXT = Path(__file__).parents[2] / "README.md"
_PATTERN = 12
"""Tokens of a pattern, which are random."""
_LEAST = 0.97
"""Least speed with guesses, relative to that without."""
_PASSAGE = 1200
"""Characters of a passage that is to be repeated."""

QUESTIONS = (
    "Tell me a story about a boy who finds a lighthouse.",
    "Describe how bread is made.",
    "Write a letter to a friend about the sea.",
    "Explain to a child why the sky is blue.",
    "What should I see in Rome in two days?",
    "How does a bicycle stay upright?",
    "Describe an old library in the evening.",
)
_VALUES: Mapping[str, Any] = {
    "customer_first_name": {"type": "string", "maxLength": 8},
    "shipping_address_city": {"type": "string", "maxLength": 8},
    "current_payment_status": {
        "enum": ["waiting_for_confirmation", "completed_successfully", "rejected_by_the_bank"]
    },
    "total_number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
    "estimated_delivery_days": {"type": "integer", "minimum": 1, "maximum": 99},
    "preferred_contact_method": {"enum": ["electronic_mail", "telephone_call", "postal_letter"]},
    "is_returning_customer": {"type": "boolean"},
    "warehouse_location_code": {"type": "string", "pattern": "^[A-Z][0-9]{2}$"},
    "requires_manual_approval": {"type": "boolean"},
    "discount_percentage": {"type": "integer", "minimum": 0, "maximum": 99},
}
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": _VALUES,
    "required": [*_VALUES],
    "additionalProperties": False,
}
_ORDERED = ("a lamp", "two chairs", "some books", "a bicycle", "a kettle", "bread", "a guitar")

_Side = Callable[[int], Mapping[str, float]]
_SIDES: tuple[Speculation, ...] = ("off", "auto", "lookup")
_LOOKUPS = ("none", "ngram-simple", "ngram-mod", "ngram-cache")
"""Ways to guess of llama.cpp that need no model."""


def _prompts(number: int) -> Mapping[str, str]:
    text = _TEXT.read_text()
    first = number * _PASSAGE // 2 % (len(text) - _PASSAGE)
    passage = text[first : first + _PASSAGE]
    return {
        "repeating": f"Repeat this text exactly, without any change:\n\n{passage}",
        "new text": QUESTIONS[number % len(QUESTIONS)],
        "schema": f"A customer orders {_ORDERED[number % len(_ORDERED)]}. Invent the order, as a "
        f"JSON object with the keys {', '.join(_VALUES)}.",
    }


@case.case(
    "what guessed tokens gain",
    case.FILE,
    case.shape(),
    case.number("--threads", 1),
    case.choice("--accuracy", ["fast", "high"], "fast"),
    case.number("--new-tokens", 160, least=8),
    case.number("--clients", 1),
    *STAGES,
    case.text("--llama-server", "", "This program of llama.cpp, beside, with its own lookup."),
    case.rounds(7),
    case.FOLDER,
)
def guesses(given: Given) -> Iterator[Found]:
    """What guessed tokens gain: a passage of the prompt is repeated, or not; a pattern goes on; or
    the answer keeps to a schema.

    All sides answer the same prompts in turn, greedily. Also the share of answers whose tokens are
    those without guesses. Several clients ask at once, each for another passage; their speed is
    that of all their tokens together, from the first question to the last token. Beside it: the
    longest pause of each answer between two tokens, and the slowest client over the fastest.
    """
    figures, tokens = Figures(), dict[tuple[str, int, int], tuple[int, ...]]()
    with contextlib.ExitStack() as stack:
        model = model_in_stages(
            stack, given, accuracy=given.accuracy, context_tokens=2048, speculate="off"
        )

        def requests(number: int) -> Mapping[str, Mapping[str, Any]]:
            if given.file is None:
                return _of_random_weights(model, number)
            return _requests(model, number, with_schema=not given.llama_server)

        clients = range(given.clients)
        pool = stack.enter_context(ThreadPoolExecutor(given.clients))

        def side(speculate: Speculation) -> _Side:
            def reply(request: Mapping[str, Any]) -> tuple[edge.Reply, float]:
                """The reply, and its longest pause between two tokens, in seconds."""
                stream = model.stream(
                    **request,
                    min_tokens=min(32, given.new_tokens),
                    max_new_tokens=given.new_tokens,
                    speculate=speculate,
                )
                came_s = [time.perf_counter() for _token in stream]
                return stream.reply(), max(after - before for before, after in pairwise(came_s))

            def answer(number: int) -> Mapping[str, float]:
                speeds = {}
                asked = [requests(number * given.clients + client) for client in clients]
                for name in asked[0]:
                    start_s = time.perf_counter()
                    found = [*pool.map(reply, [each[name] for each in asked])]
                    took_s = time.perf_counter() - start_s
                    replies = [each for each, _pause_s in found]
                    rates = [each.tokens_per_s for each in replies]
                    speeds[name] = rates[0]
                    if given.clients > 1:
                        speeds[name] = sum(len(each.token_ids) for each in replies) / took_s
                    if given.clients > 1 and number:
                        fairness = f"{name}, {speculate}, slowest / fastest client"
                        figures.add(fairness, "ratio", min(rates) / max(rates))
                        for _reply, pause_s in found:
                            figures.add(f"{name}, {speculate}, longest pause", "ms", 1e3 * pause_s)
                    for client, each in enumerate(replies):
                        per_pass = each.statistics.get("tokens_per_pass", 1.0)
                        known = tokens.setdefault((name, number, client), each.token_ids)
                        if number and speculate != "off":
                            figures.add(f"{name}, {speculate}, per pass", "tokens", per_pass)
                            same = float(known == each.token_ids)
                            figures.add(f"{name}, {speculate}, same tokens", "share", same)
                return speeds

            return answer

        def of_llama(kind: str) -> _Side:
            url = stack.enter_context(
                served_by_llama(
                    given.llama_server, given.path, "-c", "2048", "-np", "1", "--no-webui",
                    "-t", f"{given.threads}", "-tb", f"{given.threads}", "--spec-type", kind,
                )
            )  # fmt: skip

            def answer(number: int) -> Mapping[str, float]:
                return {
                    name: tokens_per_s(url, request["prompt"], given.new_tokens)
                    for name, request in requests(number).items()
                }

            return answer

        for number in range(given.rounds + 1):  # the tokens without guesses, first
            side("off")(number)
        sides: dict[str, _Side] = {speculate: side(speculate) for speculate in _SIDES}
        if given.llama_server:
            sides |= {f"llama.cpp, {kind}": of_llama(kind) for kind in _LOOKUPS}
        found = compared(sides, given.rounds, over="off", figures=figures)
    variant = f"{arrangement(given)}, accuracy {given.accuracy}"
    if given.clients > 1:
        variant += f", {given.clients} clients"
    yield Found(figures=found, variant=variant, model=given.model)


@case.case(
    "requests that guesses slow down",
    case.FILE,
    case.shape(),
    case.number("--threads", 1),
    case.choice("--accuracy", ["fast", "high"], "fast"),
    case.number("--requests", 200),
    *STAGES,
    case.FOLDER,
)
def mixed_guesses(given: Given) -> Iterator[Found]:
    """What `auto` does to requests of mixed kinds, one after another.

    The kind, the length and the sampling of each are drawn. A request that is slower with guesses
    than without is measured three more times, in turn; its ratio is then the median of these, as a
    single reply of a second varies by several hundredths. The same is done with `off` in place of
    `auto`: so many requests seem slower by chance.
    """
    ratios: dict[Speculation, list[float]] = {"auto": [], "off": []}
    with contextlib.ExitStack() as stack:
        model = model_in_stages(
            stack, given, accuracy=given.accuracy, context_tokens=2048, speculate="off"
        )
        model.generate("Hello", max_new_tokens=8)
        for number, (side, found) in itertools.product(range(given.requests), ratios.items()):
            request = _drawn(model, number)

            def ratio(order: int, request: Mapping[str, Any], side: Speculation) -> float:
                def speed(speculate: Speculation) -> float:
                    return float(model.generate(speculate=speculate, **request).tokens_per_s)

                before = speed("off") if order % 2 else 0.0
                asked = speed(side)
                return asked / (before or speed("off"))

            first = ratio(number, request, side)
            if first < _LEAST:
                first = statistics.median(ratio(order, request, side) for order in range(3))
            found.append(first)
    figures = Figures()
    for side, found in ratios.items():
        for each in found:
            figures.add(f"{side} / off", "ratio", each)
        figures.add(f"{side} / off, least", "ratio", min(found))
        below = sum(each < _LEAST for each in found)
        figures.add(f"{side} / off, below {_LEAST}", "requests", below)
    yield Found(
        figures=figures,
        variant=f"{arrangement(given)}, accuracy {given.accuracy}, {given.requests} requests",
        model=given.model,
    )


def _drawn(model: edge.Model, number: int) -> Mapping[str, Any]:
    drawn = np.random.default_rng(number)
    requests = _requests(model, number, with_schema=True)
    return {
        **requests[str(drawn.choice([*requests]))],
        "max_new_tokens": int(drawn.integers(24, 161)),
        "temperature": float(drawn.choice([0.0, 0.7])),
        "seed": number,
    }


def _requests(
    model: edge.Model, number: int, *, with_schema: bool
) -> Mapping[str, Mapping[str, Any]]:
    def chat(prompt: str) -> Mapping[str, Any]:
        ids = model.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return {"prompt": ids, "ignore_eos": True}

    found = {name: chat(prompt) for name, prompt in _prompts(number).items()}
    schema = found.pop("schema")
    if with_schema:
        found["schema"] = {"prompt": schema["prompt"], "json_schema": _SCHEMA}
    some = random_prompt(model, _PATTERN, number)
    return found | {"pattern": {"prompt": some * (100 // _PATTERN), "ignore_eos": True}}


def _of_random_weights(model: edge.Model, number: int) -> Mapping[str, Mapping[str, Any]]:
    """Such a model repeats itself if it is rewarded for that."""
    new = {"prompt": random_prompt(model, 64, number), "ignore_eos": True}
    return {"repeating": {**new, "frequency_penalty": -2.0}, "new text": new}
