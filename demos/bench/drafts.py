"""A draft model: on the model's own device, and on another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.guesses import QUESTIONS
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import compared

DRAFT = click.option(
    "--draft",
    type=click.Path(exists=True, path_type=Path),
    help="The draft model; without it, the model itself, in int4.",
)


@case.case(
    "what a draft model gains",
    case.FILE,
    case.shape(),
    DRAFT,
    case.dtype("int8"),
    case.number("--threads", 1),
    case.choice("--accuracy", ["fast", "high"], "fast"),
    case.number("--new-tokens", 160, least=8),
    case.rounds(7),
    case.FOLDER,
)
def drafts(given: Given) -> Iterator[Found]:
    """What a draft model gains on new text: beside its large model, and on another device of one
    machine.

    All sides answer the same questions in turn, greedily. Also the share of answers whose tokens
    are those without guesses.
    """
    figures, tokens = Figures(), dict[int, tuple[int, ...]]()
    draft = given.draft or given.path
    with contextlib.ExitStack() as stack:

        def loaded(peers: int, draft: Path | None) -> edge.Model:
            cluster = stack.enter_context(edge.Cluster.local(peers, threads=given.threads))
            alone = cluster.propose(given.path, dtype=given.dtype, measure="nothing").plan
            if len(alone.devices) > 1:
                raise edge.RequestError("the plan leaves out no peer; take a smaller model")
            model = cluster.load(
                given.path,
                dtype=given.dtype,
                accuracy=given.accuracy,
                context_tokens=1024,
                plan=alone,
                draft=draft,
            )
            return stack.enter_context(model)

        models = {
            "off": loaded(1, None),
            "own device": loaded(1, draft),
            "another device": loaded(2, draft),
        }

        def answer(side: str, number: int) -> Mapping[str, float]:
            reply = models[side].chat(
                QUESTIONS[number % len(QUESTIONS)],
                min_tokens=min(32, given.new_tokens),
                max_new_tokens=given.new_tokens,
            )
            known = tokens.setdefault(number, reply.token_ids)
            if number and side != "off":
                per_pass = reply.statistics.get("tokens_per_pass", 1.0)
                figures.add(f"{side}, per pass", "tokens", per_pass)
                figures.add(f"{side}, same tokens", "share", float(known == reply.token_ids))
            return {"new text": reply.tokens_per_s}

        for number in range(given.rounds + 1):  # the tokens without guesses, first
            answer("off", number)
        sides = {side: lambda number, side=side: answer(side, number) for side in models}
        found = compared(sides, given.rounds, over="off", figures=figures)
    variant = f"{given.dtype}, {given.threads} threads, accuracy {given.accuracy}"
    variant += f", draft {given.draft.name if given.draft else 'itself in int4'}"
    yield Found(figures=found, variant=variant, model=given.model)
