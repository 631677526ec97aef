"""Tokens with guesses are those without, and a wrong guess leaves no trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.protocol.step import MOST_DRAFTED, Step, StepEntry
from tests.support.linked_shards import LIMITS, REPORT_WITHIN_S, VOCAB, Shards, linked, make_plan

PLANS = {
    "solo": make_plan([VOCAB], stage_before=False),
    "pipeline": make_plan([VOCAB], stage_before=True),
    "tensor": make_plan([1100, 0, 1900], stage_before=False),
    "mixed": make_plan([1100, 1900], stage_before=True),
}
LONGEST = 24
"""Tokens of an answer."""


@dataclass
class ScriptedDrafter:
    """Knows the answer, and errs at the places that it is told."""

    known: list[int] = field(default_factory=list)
    """Prompt and answer."""
    calls: Iterator[tuple[int, int]] = field(default_factory=lambda: iter(()))
    """Of each draft, how many tokens are right, and how many there are."""
    drafted: int = 0
    right: int = 0
    looks_back: bool = True
    guess_s: float = 0.0

    def foresee(self, request: str, tokens: Sequence[int]) -> None:
        assert list(tokens) == self.known[: len(tokens)], "of the prompt"

    def propose(self, request: str, tokens: Sequence[int], end: int, most: int) -> Sequence[int]:
        assert list(tokens[:end]) == self.known[:end], "only what was chosen is known"
        if most == 1:
            return self.known[end : end + 1]
        right, length = next(self.calls)
        guesses = self.known[end : end + min(length, most)]
        return [*guesses[:right], *((each + 1) % VOCAB for each in guesses[right:])]

    def accepted(self, request: str, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.right += accepted

    def forget(self, request: str) -> None:
        pass


@pytest.fixture(params=PLANS, scope="module")
def shards(request: pytest.FixtureRequest) -> Iterator[tuple[Shards, ScriptedDrafter]]:
    drafter = ScriptedDrafter()
    limits = replace(LIMITS, requests=1 + MOST_DRAFTED)
    with linked(PLANS[request.param], limits=limits, drafter=drafter, shortlist_tokens=4) as found:
        yield found, drafter


NAMES = (f"r{number}" for number in itertools.count())


@dataclass(frozen=True)
class Said:
    request: str = field(compare=False)
    tokens: list[int]
    logprobs: list[Logprobs | None]
    ends: list[str | None]


def said(
    shards: Shards,
    prompt: Sequence[int],
    parameters: SamplingParameters,
    *,
    runs: Sequence[int] = (LONGEST,),
    drafts: int = 0,
    end_ids: frozenset[int] = frozenset(),
    logprobs: int | None = None,
) -> Said:
    """An answer in runs of so many tokens each; the request is still there."""
    request = next(NAMES)
    shards.begin(
        request,
        parameters,
        prompt_tokens=len(prompt),
        logprobs=logprobs,
        end_ids=end_ids,
        max_new_tokens=LONGEST + 1,
        speculate="lookup" if drafts else "off",
    )
    chunk = StepEntry(request=request, position=0, tokens=tuple(prompt), logit_rows=1)
    shards.told.clear()
    shards.told.append(shards.tokens(Step(entries=(chunk,))))
    tokens = [*prompt, *shards.told[0].tokens]
    for run in runs:
        left = len(prompt) + 1 + LONGEST - len(tokens)
        if shards.told[-1].ends[-1] or not left:
            break
        tokens += shards.go_on(request, tokens, min(run, left), drafts=drafts)
    return Said(
        request,
        tokens[len(prompt) :],
        [each for told in shards.told for each in told.logprobs],
        [each for told in shards.told for each in told.ends],
    )


def kept(shards: Shards, request: str, tokens: Sequence[int]) -> bool:
    """Whether every shard has the keys and values of these tokens of the request, and no more."""
    found: list[Future[bool]] = []
    for session, program in zip(shards.sessions, shards.programs, strict=True):
        done: Future[bool] = Future()
        found.append(done)

        def look(program=program, done=done) -> None:  # type: ignore[no-untyped-def]
            count = len(tokens)
            rows = program.rows(request, 0, count)
            more = program.rows(request, 0, count + 1)
            ids = [each.view(np.int32)[..., 0] for each in rows or ()]
            same = all((each == np.asarray(tokens)).all() for each in ids)
            done.set_result(rows is not None and more is None and same)

        session.at_turn(look)
    return all(each.result(REPORT_WITHIN_S) for each in found)


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=12),
    parameters=st.sampled_from(
        [
            SamplingParameters(),
            SamplingParameters(temperature=0.9, seed=5),
            SamplingParameters(temperature=1.1, top_k=7, top_p=0.8, seed=6, repetition_penalty=1.3),
            SamplingParameters(
                temperature=0.7, seed=7, frequency_penalty=0.5, presence_penalty=0.4, min_tokens=9
            ),
        ]
    ),
    right=st.lists(st.integers(0, MOST_DRAFTED), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, MOST_DRAFTED), min_size=1, max_size=6),
    drafts=st.sampled_from([1, 3, 7, MOST_DRAFTED]),
    runs=st.lists(st.integers(1, LONGEST), min_size=1, max_size=6),
    end=st.none() | st.integers(0, LONGEST - 1),
    logprobs=st.sampled_from([None, 2]),
)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_tokens_are_those_without_guesses(
    shards: tuple[Shards, ScriptedDrafter],
    prompt: list[int],
    parameters: SamplingParameters,
    right: list[int],
    lengths: list[int],
    drafts: int,
    runs: list[int],
    end: int | None,
    logprobs: int | None,
) -> None:
    found, drafter = shards
    whole = said(found, prompt, parameters, logprobs=logprobs)
    found.finish(whole.request)
    ends = frozenset() if end is None else frozenset({whole.tokens[end]})
    plain = whole
    if ends:
        plain = said(found, prompt, parameters, end_ids=ends, logprobs=logprobs)
        found.finish(plain.request)
    drafter.known = [*prompt, *plain.tokens, *whole.tokens[len(plain.tokens) :]]
    drafter.calls = zip(itertools.cycle(right), itertools.cycle(lengths), strict=False)
    guessed = said(
        found, prompt, parameters, runs=(*runs, *[7] * LONGEST), drafts=drafts, end_ids=ends,
        logprobs=logprobs,
    )  # fmt: skip
    assert guessed == plain
    assert kept(found, guessed.request, [*prompt, *guessed.tokens[:-1]])
    found.finish(guessed.request)


def test_right_guesses_save_steps(shards: tuple[Shards, ScriptedDrafter]) -> None:
    found, drafter = shards
    plain = said(found, [5, 6, 7, 8], SamplingParameters())
    found.finish(plain.request)
    drafter.known, drafter.drafted, drafter.right = [5, 6, 7, 8, *plain.tokens], 0, 0
    drafter.calls = itertools.repeat((MOST_DRAFTED, MOST_DRAFTED))
    before = found.programs[0].counts.steps
    guessed = said(found, [5, 6, 7, 8], SamplingParameters(), drafts=MOST_DRAFTED)
    assert guessed == plain
    assert found.programs[0].counts.steps - before <= 2 + LONGEST // 2, "two or more at once"
    assert drafter.right > drafter.drafted // 2
    found.finish(guessed.request)
