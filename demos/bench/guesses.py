"""Guessed tokens, on text that repeats, on new text, and in JSON of a schema."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import compared, local_model
from edge.protocol.step import Speculation
from edge.text.grammar import JsonSchema

_TEXT = Path(__file__).parents[2] / "README.md"
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
    case.rounds(7),
    case.FOLDER,
)
def guesses(given: Given) -> Iterator[Found]:
    """What guessed tokens gain on one peer: a passage of the prompt is repeated, or not; or the
    answer keeps to a schema.

    All sides answer the same prompts in turn, greedily. Also the share of answers whose tokens are
    those without guesses.
    """
    figures, tokens = Figures(), dict[tuple[str, int], tuple[int, ...]]()
    with contextlib.ExitStack() as stack:
        model = local_model(
            stack, given.path, threads=given.threads, accuracy=given.accuracy, context_tokens=2048
        )

        def side(speculate: Speculation) -> _Side:
            def answer(number: int) -> Mapping[str, float]:
                speeds = {}
                for name, prompt in _prompts(number).items():
                    schema = _SCHEMA if name == "schema" else None
                    reply = _answer(model, prompt, given.new_tokens, speculate, schema)
                    speeds[name] = reply.tokens_per_s
                    per_pass = reply.statistics.get("tokens_per_pass", 1.0)
                    known = tokens.setdefault((name, number), reply.token_ids)
                    if number and speculate != "off":
                        figures.add(f"{name}, {speculate}, per pass", "tokens", per_pass)
                        same = float(known == reply.token_ids)
                        figures.add(f"{name}, {speculate}, same tokens", "share", same)
                return speeds

            return answer

        for number in range(given.rounds + 1):  # the tokens without guesses, first
            side("off")(number)
        sides: dict[str, _Side] = {speculate: side(speculate) for speculate in _SIDES}
        found = compared(sides, given.rounds, over="off", figures=figures)
    variant = f"1 x {given.threads} threads, accuracy {given.accuracy}"
    yield Found(figures=found, variant=variant, model=given.model)


def _answer(
    model: edge.Model,
    prompt: str,
    new_tokens: int,
    speculate: Speculation,
    schema: JsonSchema | None,
) -> edge.Reply:
    return model.chat(
        prompt,
        min_tokens=min(32, new_tokens),
        max_new_tokens=new_tokens,
        speculate=speculate,
        json_schema=schema,
    )
