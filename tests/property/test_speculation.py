"""Tokens with guesses are those without, and a wrong guess leaves no trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.rules import Bits
from edge.protocol.step import MOST_DRAFTED, Step, StepEntry
from tests.support.linked_shards import LIMITS, REPORT_WITHIN_S, VOCAB, Shards, linked, make_plan
from tests.support.slow_cases import shown_in_parts

PLANS = {
    "solo": make_plan([VOCAB], stage_before=False),
    "pipeline": make_plan([VOCAB], stage_before=True),
    "tensor": make_plan([1100, 0, 1900], stage_before=False),
    "mixed": make_plan([1100, 1900], stage_before=True),
}
LONGEST = 48
"""Tokens of an answer."""
PARAMETERS = [
    SamplingParameters(),
    SamplingParameters(temperature=0.9, seed=5),
    SamplingParameters(temperature=1.1, top_k=7, top_p=0.8, seed=6, repetition_penalty=1.3),
    SamplingParameters(
        temperature=0.7, seed=7, frequency_penalty=0.5, presence_penalty=0.4, min_tokens=9
    ),
]


@dataclass
class ScriptedDrafter:
    """Knows the answer, and errs at the places that it is told."""

    known: list[int] = field(default_factory=list)
    """Prompt and answer."""
    prompt_tokens: int = 0
    wrong: frozenset[int] = frozenset()
    """Places in the answer."""
    drafted: int = 0
    right: int = 0
    looks_back: bool = True
    guess_s: float = 0.0

    def foresee(self, request: str, tokens: Sequence[int]) -> None:
        assert list(tokens) == self.known[: len(tokens)], "of the prompt"

    def propose(self, request: str, tokens: Sequence[int], end: int, most: int) -> Sequence[int]:
        assert list(tokens[:end]) == self.known[:end], "only what was chosen is known"
        return [
            (each + (place - self.prompt_tokens in self.wrong)) % VOCAB
            for place, each in enumerate(self.known[end : end + most], start=end)
        ]

    def accepted(self, request: str, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.right += accepted

    def forget(self, request: str) -> None:
        pass


REPEATS = ("pipeline", "mixed", "solo, states", "tensor, states", "pipeline, states")
"""The others have shards alone, beside and behind others, and states behind and beside them."""
IN_PARTS = shown_in_parts("property/test_speculation.py")


@pytest.fixture(
    params=[
        pytest.param(name, marks=IN_PARTS if name in REPEATS else ())
        for name in (*PLANS, *(f"{name}, states" for name in PLANS))
    ],
    scope="module",
)
def shards(request: pytest.FixtureRequest) -> Iterator[tuple[Shards, ScriptedDrafter]]:
    """With states: of keys and values in 4 bits, beside which some tokens are kept unrounded."""
    name, _, states = request.param.partition(", ")
    drafter = ScriptedDrafter()
    limits = replace(LIMITS, requests=1 + MOST_DRAFTED, context_tokens=64, cached_tokens=400)
    with linked(
        PLANS[name],
        limits=limits,
        kv_dtype="int4" if states else "float32",
        drafter=drafter,
        shortlist_tokens=4,
    ) as found:
        yield found, drafter


NAMES = (f"r{number}" for number in itertools.count())


@dataclass(frozen=True)
class Said:
    request: str = field(compare=False)
    tokens: list[int]
    logprobs: list[Logprobs | None]
    ends: list[str | None]
    behind: int = field(compare=False)
    """Tokens that its state does not cover, because a guess was wrong."""


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
    has_states, behind = not shards.programs[0]._cache.pool.can_cut, 0
    for run in runs:
        left = len(prompt) + 1 + LONGEST - len(tokens)
        if shards.told[-1].ends[-1] or not left:
            break
        heard = len(shards.told)
        tokens += shards.go_on(request, tokens, min(run, left), drafts=drafts, behind=behind)
        for told in shards.told[heard:] if has_states else ():
            is_right = len(told.tokens) > told.drafted
            behind = 0 if is_right else behind + len(told.tokens)
    return Said(
        request,
        tokens[len(prompt) :],
        [each for told in shards.told for each in told.logprobs],
        [each for told in shards.told for each in told.ends],
        behind,
    )


def kept(shards: Shards, said: Said, prompt: Sequence[int]) -> bool:
    """Whether every shard has the keys and values of the answer's tokens, or the state of them, and
    no more once it hears how the last step ended."""
    request, tokens = said.request, [*prompt, *said.tokens[:-1]]
    found: list[Future[bool]] = []
    for session, program in zip(shards.sessions, shards.programs, strict=True):
        done: Future[bool] = Future()
        found.append(done)

        runs = session._runs

        def look(program=program, runs=runs, done=done) -> None:  # type: ignore[no-untyped-def]
            count = len(tokens)
            runs.hear_of(request, program)
            if not program._cache.pool.can_cut:  # it raises an error for a wrong state
                length = program._cache.pool.length(program._cache.pool.open(request))
                done.set_result(length == count - said.behind)
                return
            rows = program.rows(request, 0, count)
            more = program.rows(request, 0, count + 1)
            ids = [each.view(np.int32)[..., 0] for each in rows or ()]
            same = all((each == np.asarray(tokens)).all() for each in ids)
            done.set_result(rows is not None and more is None and same)

        session.at_turn(look)
    return all(each.result(REPORT_WITHIN_S) for each in found)


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=12),
    parameters=st.sampled_from(PARAMETERS),
    wrong=st.frozensets(st.integers(0, LONGEST), max_size=8),
    drafts=st.sampled_from([1, 3, 7, MOST_DRAFTED]),
    runs=st.lists(st.integers(1, LONGEST), min_size=1, max_size=6),
    end=st.none() | st.integers(0, LONGEST - 1),
    logprobs=st.sampled_from([None, 2]),
)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_tokens_are_those_without_guesses(
    shards: tuple[Shards, ScriptedDrafter],
    prompt: list[int],
    parameters: SamplingParameters,
    wrong: frozenset[int],
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
    drafter.prompt_tokens, drafter.wrong = len(prompt), wrong
    guessed = said(
        found, prompt, parameters, runs=(*runs, *[27] * LONGEST), drafts=drafts, end_ids=ends,
        logprobs=logprobs,
    )  # fmt: skip
    assert guessed == plain
    assert kept(found, guessed, prompt)
    found.finish(guessed.request)


def mask_after(tokens: Sequence[int]) -> Bits:
    """What a made-up grammar allows behind these tokens: one token, a few, or most."""
    draw = np.random.default_rng(list(tokens))
    allowed = np.zeros(VOCAB, bool)
    allowed[draw.integers(0, VOCAB, draw.choice([1, 5, 3 * VOCAB]))] = True
    return np.packbits(allowed, bitorder="little")


def led(
    shards: Shards,
    prompt: Sequence[int],
    parameters: SamplingParameters,
    *,
    draft: Callable[[Sequence[int]], Sequence[int]] = lambda tokens: (),
    end_ids: frozenset[int] = frozenset(),
    logprobs: int | None = None,
) -> Said:
    """An answer of which each step has masks, as a coordinator sends them."""
    request, tokens, behind = next(NAMES), list(prompt), 0
    has_states = not shards.programs[0]._cache.pool.can_cut
    shards.begin(
        request,
        parameters,
        prompt_tokens=len(prompt),
        logprobs=logprobs,
        end_ids=end_ids,
        max_new_tokens=LONGEST,
        speculate="auto",
    )
    shards.told.clear()
    while len(tokens) < len(prompt) + LONGEST and not (shards.told and shards.told[-1].ends[-1]):
        position, sent, guesses = 0, list(prompt), list[int]()
        if len(tokens) > len(prompt):
            most = min(len(prompt) + LONGEST - len(tokens) - 1, MOST_DRAFTED - behind)
            position = len(tokens) - 1 - behind
            guesses = [*draft(tokens)][:most]
            sent = [*tokens[position:], *guesses]
            sent += tokens[-1:] * (len(sent) % 2 if guesses or behind else 0)
        rows = len(sent) - behind if position else 1
        entry = StepEntry(request=request, position=position, tokens=tuple(sent), logit_rows=rows)
        masks = [mask_after([*tokens, *guesses[:count]]) for count in range(1 + len(guesses))]
        drafts = MOST_DRAFTED if rows > 1 or behind else 0
        step = Step(entries=(entry,), run=1 + len(guesses), drafts=drafts)
        told = shards.tokens(step, {request: masks})
        assert told.last, "the next step needs further masks"
        assert told.drafted == rows - 1
        shards.told.append(told)
        tokens += told.tokens
        is_right = len(told.tokens) > told.drafted or not has_states
        behind = 0 if is_right else behind + len(told.tokens)
    return Said(
        request,
        tokens[len(prompt) :],
        [each for told in shards.told for each in told.logprobs],
        [each for told in shards.told for each in told.ends],
        behind,
    )


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=12),
    parameters=st.sampled_from(PARAMETERS),
    right=st.lists(st.integers(0, MOST_DRAFTED), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, MOST_DRAFTED), min_size=1, max_size=6),
    end=st.none() | st.integers(0, LONGEST - 1),
    logprobs=st.sampled_from([None, 2]),
)
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_tokens_of_a_grammar_are_those_without_guesses(
    shards: tuple[Shards, ScriptedDrafter],
    prompt: list[int],
    parameters: SamplingParameters,
    right: list[int],
    lengths: list[int],
    end: int | None,
    logprobs: int | None,
) -> None:
    """The mask of each row is that behind the guesses before it."""
    found, _drafter = shards
    plain = led(found, prompt, parameters, logprobs=logprobs)
    found.finish(plain.request)
    ends = frozenset() if end is None else frozenset({plain.tokens[end]})
    known = [*prompt, *plain.tokens]
    if ends:
        plain = led(found, prompt, parameters, end_ids=ends, logprobs=logprobs)
        found.finish(plain.request)
        known = [*prompt, *plain.tokens, *known[len(prompt) + len(plain.tokens) :]]
    calls = zip(itertools.cycle(right), itertools.cycle(lengths), strict=False)

    def draft(tokens: Sequence[int]) -> list[int]:
        count, length = next(calls)
        guesses = known[len(tokens) : len(tokens) + length]
        return [*guesses[:count], *((each + 1) % VOCAB for each in guesses[count:])]

    guessed = led(found, prompt, parameters, draft=draft, end_ids=ends, logprobs=logprobs)
    assert guessed == plain
    assert kept(found, guessed, prompt)
    found.finish(guessed.request)


def test_right_guesses_save_steps(shards: tuple[Shards, ScriptedDrafter]) -> None:
    found, drafter = shards
    plain = said(found, [5, 6, 7, 8], SamplingParameters())
    found.finish(plain.request)
    drafter.known, drafter.drafted, drafter.right = [5, 6, 7, 8, *plain.tokens], 0, 0
    drafter.prompt_tokens, drafter.wrong = 4, frozenset()
    before = found.programs[0].counts.steps
    guessed = said(found, [5, 6, 7, 8], SamplingParameters(), drafts=MOST_DRAFTED)
    assert guessed == plain
    assert found.programs[0].counts.steps - before <= 2 + LONGEST // 2, "two or more at once"
    assert drafter.right > drafter.drafted // 2
    found.finish(guessed.request)


def test_steps_ahead_keep_the_stages_busy(shards: tuple[Shards, ScriptedDrafter]) -> None:
    """Where the sampler is alone behind other stages. What is dropped after a wrong guess is what
    the stage before has computed for nothing."""
    found, drafter = shards
    plain = said(found, [5, 6, 7, 8], SamplingParameters())
    found.finish(plain.request)
    first, *_others, last = [each.counts for each in found.programs] * 2
    begun = first.steps, last.steps
    drafter.known, drafter.prompt_tokens = [5, 6, 7, 8, *plain.tokens], 4
    drafter.wrong = frozenset({36})
    guessed = said(found, [5, 6, 7, 8], SamplingParameters(), drafts=3)
    assert guessed == plain
    dropped = (first.steps - begun[0]) - (last.steps - begun[1])
    can_go_ahead = len(found.programs) == 2 and found.sessions[1].links.seat == (1, 0)
    assert (dropped > 0) == (can_go_ahead and found.programs[0]._cache.pool.can_cut)
    assert kept(found, guessed, [5, 6, 7, 8])
    found.finish(guessed.request)
