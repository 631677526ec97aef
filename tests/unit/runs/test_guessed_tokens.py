"""Answers with guesses, over real peers that compute nothing: the tokens are those without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.answers.answer import Answer
from edge.demos.bundled import MODEL
from edge.engine.speculation import StepSeconds
from edge.errors import PeerLostError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.models.spec import ModelSpec
from edge.protocol.step import Speculation, Step, StepLimits
from edge.runs import run as runs
from edge.scheduling.decide import decide
from edge.scheduling.orders import Orders
from edge.text import Tokenizer
from edge.text.grammar import Grammars, schema_grammar
from edge.weights.checkpoint import Checkpoint
from tests.support.null_peers import expected_tokens, load, null_peers
from tests.support.scripted_peers import Owner, Results, asked
from tests.support.slow_cases import repeats_are_slow

PATIENCE_S = 120.0
"""Only a test that hangs takes as long."""
LIMITS = StepLimits(context_tokens=128, chunk_tokens=16, requests=8, cached_tokens=400)
COUNTS = {"solo": 1, "pipeline_2": 2, "mixed_2x2": 4}
"""Peers of each layout."""
NEW_TOKENS = 60
WHITE = (202, 203, 204, 205, 206, 225)
"""Tokens of white space alone."""
SAMPLED = SamplingParameters(temperature=1.1, repetition_penalty=1.7, top_p=0.9, seed=7)
GREEDY = SamplingParameters()


class Guesses:
    """Knows the answers, and errs at random; every other draft is right."""

    looks_back = True
    answers: list[list[int]]
    looks_back, guess_s = True, 0.0

    def __init__(self) -> None:
        self._draw = np.random.default_rng(5)

    def foresee(self, request: str, tokens: Sequence[int]) -> None:
        pass

    def propose(self, request: str, tokens: Sequence[int], end: int, most: int) -> Sequence[int]:
        begun = list(tokens[:end])
        (known,) = (each for each in self.answers if each[:end] == begun)
        if most == 1 or self._draw.random() < 0.5:
            return known[end : end + most]
        right, count = self._draw.integers(0, most, 2)
        return [*known[end : end + right], *self._draw.integers(0, 700, count).tolist()][:most]

    def accepted(self, request: str, drafted: int, accepted: int) -> None:
        pass

    def forget(self, request: str) -> None:
        pass


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    with Checkpoint.open(MODEL) as checkpoint:
        return checkpoint.spec


def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(3, 700, size=length).tolist())


def answers(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, asks: Sequence[tuple[int, Speculation]]
) -> list[tuple[Answer, Results, list[int]]]:
    """Of these lengths of prompts, every other one sampled; with what they must be."""
    found = []
    for number, (length, speculate) in enumerate(asks):
        parameters, sink = (GREEDY, SAMPLED)[number % 2], Results()
        answer = asked(
            prompt(length), sink, new_tokens=NEW_TOKENS, sampling=parameters, speculate=speculate
        )
        tokens = expected_tokens(spec, prompt(length), NEW_TOKENS, parameters)
        found.append((answer, sink, tokens))
    known = [[*answer.terms.prompt, *tokens] for answer, _sink, tokens in found]
    monkeypatch.setattr(Guesses, "answers", known, raising=False)
    monkeypatch.setattr("edge.engine.shard_engine.SuffixLookup", Guesses)
    return found


async def until_it_has(answer: Answer, tokens: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(answer.tokens) < tokens:  # noqa: ASYNC110  daemons of this loop go on
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("layout", "has_states"),
    # Answers that share steps on other layouts: `test_coordinated_replies.py`.
    repeats_are_slow(product(["pipeline_2", "solo", "mixed_2x2"], [False, True]), of=[1]),
)
def test_answers_that_come_and_go_beside_each_other(
    layout: str,
    has_states: bool,
    tmp_path: Path,
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them has no guesses, so all that share a step have none."""
    asks: list[tuple[int, Speculation]] = [
        (5, "lookup"), (30, "auto"), (17, "off"), (9, "auto"), (3, "lookup"),
    ]  # fmt: skip

    async def main() -> None:
        made = answers(spec, monkeypatch, asks)
        async with null_peers(tmp_path, COUNTS[layout]) as daemons:
            model = await load(daemons, layout, LIMITS, Owner(), tmp_path, has_states=has_states)
            for number, (answer, _sink, _tokens) in enumerate(made):
                model.submit(answer)
                await until_it_has(answer, 12 * ((number + 1) % 3))
            async with asyncio.timeout(PATIENCE_S):
                for _answer, sink, _tokens in made:
                    await sink.ended.wait()
            work = model.work
            await model.aclose()
        for answer, sink, tokens in made:
            assert sink.tokens == tokens
            passes = answer.passes
            assert passes.tokens == NEW_TOKENS
            assert passes.accepted <= min(passes.drafted, NEW_TOKENS - passes.passes)
        first, without = made[0][0].passes, made[2][0].passes
        assert 0 < first.accepted < first.drafted
        assert without.drafted == 0
        assert work.drafted_tokens == sum(answer.passes.drafted for answer, *_rest in made)
        assert work.accepted_tokens == sum(answer.passes.accepted for answer, *_rest in made)

    asyncio.run(main())


class Until(Results):
    """Does something at some of its tokens."""

    def __init__(self, deeds: Mapping[int, Callable[[], None]]) -> None:
        super().__init__()
        self._deeds = deeds

    def token(self, *given: Any) -> bool:
        super().token(*given)
        self._deeds.get(len(self.tokens), lambda: None)()
        return False


@pytest.mark.parametrize(
    ("layout", "has_states"),
    repeats_are_slow(product(["solo", "pipeline_2", "pipeline_3"], [False, True])),
)
def test_an_answer_is_computed_again_in_the_same_steps_after_a_loss(
    layout: str,
    has_states: bool,
    tmp_path: Path,
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one device, after one of several is lost; others have come before that."""
    again: list[Step] = []

    def decided(*given: Any) -> Orders:
        orders = decide(*given)
        again.extend([orders.step] if orders.step is not None else [])
        return orders

    async def main() -> None:
        monkeypatch.setattr(runs, "decide", decided)
        made = answers(spec, monkeypatch, [(5, "lookup"), (40, "auto"), (7, "off")])
        first, count = made[0][0], int(layout[-1]) if layout[-1].isdigit() else 1
        async with null_peers(tmp_path, 3) as daemons:
            owner = Owner()
            model = await load(
                daemons[:count], layout, LIMITS, owner, tmp_path, has_states=has_states
            )

            def others_come() -> None:
                for answer, _sink, _tokens in made[1:]:
                    model.submit(answer)

            lost = PeerLostError("null-0", "it is gone")
            first.sink = sink = Until({9: others_come, 33: lambda: model.fail(lost)})
            model.submit(first)
            async with asyncio.timeout(PATIENCE_S):
                await owner.told.wait()
            await model.abort()
            again.clear()
            assert len(owner.unfinished) == len(made)
            together = {each for span in first.together for each in range(*span)}
            assert together
            model = await load(
                daemons[-1:], "solo", LIMITS, Owner(), tmp_path, has_states=has_states
            )
            for answer in owner.unfinished:
                model.submit(answer)
            async with asyncio.timeout(PATIENCE_S):
                for each in (sink, *(sink for _answer, sink, _tokens in made[1:])):
                    await each.ended.wait()
            await model.aclose()
        for answer, _sink, tokens in made:
            assert answer.tokens == tokens
        answered = set(range(len(first.terms.prompt), len(first.terms.prompt) + 32))
        found: dict[bool, set[int]] = {True: set(), False: set()}
        for step in again:
            for entry in step.entries:
                if entry.request == first.id and not entry.logit_rows:
                    found[step.singly].update(range(entry.position, entry.end - step.spare))
                    assert step.singly or len(entry.tokens) % 2 == 0 or not entry.position
        assert found[True] == answered - together
        assert found[False] & answered == answered & together

    asyncio.run(main())


@pytest.mark.parametrize(
    ("layout", "has_states"), repeats_are_slow(product(COUNTS, [False, True]), of=[1])
)
def test_answers_beside_each_other_have_drafts_in_turn(
    layout: str,
    has_states: bool,
    tmp_path: Path,
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is cancelled meanwhile; and after a loss the others go on elsewhere, in turn as well."""
    asks: list[tuple[int, Speculation]] = [(5, "lookup"), (30, "lookup"), (9, "lookup")]
    in_turn = 0
    deeds: dict[int, Callable[[], None]] = {}

    def decided(*given: Any) -> Orders:
        nonlocal in_turn
        orders = decide(*given)
        step = orders.step
        if step is not None and step.drafted and len(given[0].active) > 1:
            in_turn += 1
            asyncio.get_running_loop().call_soon(deeds.pop(in_turn, lambda: None))
        return orders

    async def main() -> None:
        nonlocal in_turn
        monkeypatch.setattr(runs, "decide", decided)
        monkeypatch.setattr(StepSeconds, "of", lambda *_given: 1.0)
        monkeypatch.setattr("edge.engine.draft_runs._MOST_UNHEARD", 2)
        made = answers(spec, monkeypatch, asks)
        count = COUNTS[layout]
        async with null_peers(tmp_path, count + 1) as daemons, asyncio.timeout(PATIENCE_S):
            owner = Owner()
            model = await load(
                daemons[:count], layout, LIMITS, owner, tmp_path, has_states=has_states
            )
            lost = PeerLostError("null-0", "it is gone")
            deeds[2] = partial(model.cancel, made[2][0].id)
            deeds[4] = partial(model.fail, lost)
            for answer, _sink, _tokens in made:
                model.submit(answer)
            await owner.told.wait()
            await model.abort()
            assert made[2][0] not in owner.unfinished
            begun, in_turn = in_turn, 0
            model = await load(
                daemons[-1:], "solo", LIMITS, Owner(), tmp_path, has_states=has_states
            )
            for answer in owner.unfinished:
                model.submit(answer)
            for _answer, sink, _tokens in made[:2]:
                await sink.ended.wait()
            await model.aclose()
        assert begun >= 4
        assert in_turn
        for answer, _sink, tokens in made[:2]:
            assert answer.tokens == tokens
            assert answer.passes.accepted <= answer.passes.drafted
        assert made[2][0].tokens == made[2][2][: len(made[2][0].tokens)]

    asyncio.run(main())


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_the_cat": {"type": "string", "maxLength": 6},
        "place_of_the_cat": {"enum": ["in the barn", "in the house"]},
    },
    "required": ["name_of_the_cat", "place_of_the_cat"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.open(MODEL)
    return Grammars(
        tokenizer.vocabulary,
        vocab_size=tokenizer.vocab_size,
        end_ids=frozenset({2}),
        encode=tokenizer.encode_part,
    )


def led(grammars: Grammars, sink: Results, speculate: Speculation, number: int) -> Answer:
    """An answer with a schema, and with a bias against white space."""
    answer = asked(
        prompt(20 + number),
        sink,
        new_tokens=NEW_TOKENS,
        sampling=replace((GREEDY, SAMPLED)[number % 2], logit_bias=dict.fromkeys(WHITE, -100.0)),
        end_ids=frozenset({2}),
        speculate=speculate,
    )
    answer.matcher = grammars.begin(schema_grammar(SCHEMA), guesses=speculate != "off")
    return answer


@pytest.mark.parametrize(
    ("layout", "number"),
    repeats_are_slow(product(["mixed_2x2", "pipeline_2", "solo"], [0, 1]), of=[1]),
)
def test_an_answer_with_a_schema_goes_on_elsewhere(
    layout: str, number: int, tmp_path: Path, grammars: Grammars
) -> None:
    """Alone, then beside another, then on another device; its tokens are those without guesses."""

    async def main() -> None:
        count = COUNTS[layout]
        plain, sink, beside = Results(), Results(), Results()
        async with null_peers(tmp_path, count + 1) as daemons, asyncio.timeout(PATIENCE_S):
            owner = Owner()
            model = await load(daemons[:count], layout, LIMITS, owner, tmp_path)
            model.submit(led(grammars, plain, "off", number))
            await plain.ended.wait()
            other = led(grammars, beside, "auto", number + 1)
            lost = PeerLostError("null-0", "it is gone")
            deeds = {12: lambda: model.submit(other), 25: lambda: model.fail(lost)}
            first = led(grammars, sink, "auto", number)
            first.sink = sink = Until(deeds)
            model.submit(first)
            await owner.told.wait()
            await model.abort()
            assert first.together
            model = await load(daemons[-1:], "solo", LIMITS, Owner(), tmp_path)
            for answer in owner.unfinished:
                model.submit(answer)
            await sink.ended.wait()
            await beside.ended.wait()
            await model.aclose()
        assert sink.tokens == plain.tokens
        assert first.passes.passes < len(plain.tokens)
        assert 0 < first.passes.accepted < first.passes.drafted

    asyncio.run(main())


def test_rows_in_pairs_follow_from_the_tokens_of_a_schema(
    tmp_path: Path, grammars: Grammars
) -> None:
    """Not from how long drafts may be, which is another with another load."""
    found: dict[int, Answer] = {}

    async def main() -> None:
        async with null_peers(tmp_path, 1) as daemons, asyncio.timeout(PATIENCE_S):
            for chunk in (2, 4, 16):
                limits = replace(LIMITS, chunk_tokens=chunk)
                model = await load(daemons, "solo", limits, Owner(), tmp_path)
                sink = Results()
                found[chunk] = led(grammars, sink, "auto", 1)
                model.submit(found[chunk])
                await sink.ended.wait()
                await model.aclose()

    asyncio.run(main())
    assert found[2].tokens == found[4].tokens == found[16].tokens
    assert found[2].together == found[4].together == found[16].together
    passes = [answer.passes.passes for answer in found.values()]
    assert passes == sorted(passes, reverse=True)
    assert passes[0] > passes[-1]
