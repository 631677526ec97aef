"""Which tokens are guessed, whether at all, and how many at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from edge.engine.drafter import SuffixLookup
from edge.engine.speculation import Speculator, StepSeconds
from edge.kernels.sampling.parameters import SamplingParameters
from edge.partition import draft_length, most_in_turn
from edge.protocol.step import MOST_DRAFTED, SamplingTerms, Speculation


def proposed(tokens: Sequence[int], most: int = 4) -> list[int]:
    return list(SuffixLookup().propose("r", tokens, len(tokens), most))


def test_what_followed_the_same_tokens_is_guessed() -> None:
    assert proposed([1, 2, 3, 7, 8, 9, 6, 1, 2, 3]) == [7, 8, 9, 6]
    assert proposed([1, 2, 3, 7, 8], 4) == []
    assert proposed([2, 3, 7, 8, 2, 3]) == [], "two tokens are alike by chance"
    assert proposed([]) == []


def test_the_place_with_the_most_tokens_in_common_is_taken() -> None:
    long = [5, 4, 1, 2, 3, 7]
    assert proposed([*long, 1, 2, 3, 8, 5, 4, 1, 2, 3], 1) == [7]
    assert proposed([1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3], 1) == [8], "of equal ones the newest"


def test_a_repetition_that_reaches_the_end_goes_on() -> None:
    assert proposed([9, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert proposed([4, 4, 4, 4], 3) == [4, 4, 4]


def test_the_first_tokens_alone_count() -> None:
    """The others may be guesses, which are replaced later."""
    lookup, tokens = SuffixLookup(), [1, 2, 3, 7, 8, 1, 2, 3, 50, 51, 52]
    assert list(lookup.propose("r", tokens, 8, 2)) == [7, 8]
    tokens[8:] = [7, 8, 1]
    assert list(lookup.propose("r", tokens, 11, 2)) == [2, 3]
    lookup.forget("r")
    lookup.forget("r")
    assert list(lookup.propose("r", [1, 2, 3], 3, 2)) == []


def test_a_lookup_step_by_step_is_one_at_once() -> None:
    draw = random.Random(3)
    tokens = [draw.randrange(4) for _ in range(300)]
    lookup = SuffixLookup()
    for end in range(len(tokens) + 1):
        assert list(lookup.propose("r", tokens, end, 5)) == proposed(tokens[:end], 5)


def test_of_a_long_prompt_the_newest_tokens_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs memory."""
    monkeypatch.setattr("edge.engine.drafter._MOST_INDEXED", 8)
    lookup, tokens = SuffixLookup(), [1, 2, 3, 7, *range(20, 30), 4, 5, 6, 8, 1, 2, 3]
    assert list(lookup.propose("r", tokens, len(tokens), 2)) == []
    tokens += [4, 5, 6]
    assert list(lookup.propose("r", tokens, len(tokens), 2)) == [8, 1]


def timed(seconds: dict[int, float]) -> StepSeconds:
    found = StepSeconds()
    for rows, each in seconds.items():
        found.note(rows, 1000.0)  # the first of its kind, for which buffers are made
        found.note(rows, each)
    return found


def test_the_time_of_a_step_that_was_not_timed_is_on_a_line() -> None:
    seconds = timed({1: 1.0, 4: 1.6, 8: 2.0})
    assert seconds.of(4) == 1.6
    assert seconds.of(2) == pytest.approx(1.2)
    assert seconds.of(6) == pytest.approx(1.8)
    assert seconds.of(16) == pytest.approx(2.8)
    assert timed({1: 1.0}).of(3) == pytest.approx(1.3)
    assert StepSeconds().of(4) > StepSeconds().of(2) > 0


def test_what_was_predicted_counts_until_it_is_measured() -> None:
    """Relative to what is known: over a slow link 16 rows take hardly longer than one."""
    seconds = StepSeconds({1: 10.0, 4: 11.0, 16: 14.0})
    assert seconds.of(4) == 11.0
    assert seconds.of(10) == pytest.approx(12.5)
    for _turn in range(2):
        seconds.note(1, 20.0)
    assert seconds.of(1) == 20.0
    assert seconds.of(16) == pytest.approx(28.0)
    for _turn in range(2):
        seconds.note(16, 56.0)
    assert seconds.of(10) == pytest.approx(56.0 * 12.5 / 14), "16 rows are nearer than one"


def test_steps_of_another_kind_count_until_one_of_this_kind_is_timed() -> None:
    speculator = Speculator({"lookup": SuffixLookup()})
    for _number in range(2):  # the first prepares
        speculator.shared_seconds.note(1, 0.05)
        speculator.shared_seconds.note(2, 0.06)
    assert speculator.seconds.of(3) == pytest.approx(0.07)
    for _number in range(2):
        speculator.seconds.note(2, 0.09)
    assert speculator.seconds.of(2) == 0.09
    assert speculator.shared_seconds.of(2) == 0.06


def test_a_slow_step_is_an_outlier() -> None:
    seconds = timed({2: 1.0})
    seconds.note(2, 100.0)
    assert seconds.of(2) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("right", "seconds", "expected"),
    [
        (0.0, {1: 1.0, 2: 1.1}, 1),
        (0.98, {1: 1.0, 2: 1.01, 16: 1.1}, MOST_DRAFTED),
        (0.9, {1: 1.0, 2: 1.3, 4: 1.9, 8: 2.7, 16: 4.7}, 7),
        (0.5, {1: 1.0, 2: 1.3, 4: 1.9, 8: 2.7, 16: 4.7}, 1),
        (0.5, {1: 1.0, 2: 1.01, 4: 1.02, 16: 1.2}, 5),
    ],
)
def test_the_length_gives_the_most_tokens_per_second(
    right: float, seconds: dict[int, float], expected: int
) -> None:
    assert draft_length(right, timed(seconds).of, MOST_DRAFTED) == expected
    assert draft_length(right, timed(seconds).of, min(expected, 3)) == min(expected, 3)
    assert draft_length(right, timed(seconds).of, 0) == 1, "a draft makes a step even"


PROSE = random.Random(5).sample(range(5000), 400)
QUOTED = [*PROSE[:200], *PROSE[40:160]]


def terms(speculate: Speculation, prompt_tokens: int) -> SamplingTerms:
    return SamplingTerms(
        sampling=SamplingParameters(),
        end_ids=frozenset(),
        max_new_tokens=999,
        prompt_tokens=prompt_tokens,
        speculate=speculate,
    )


def drafts(
    tokens: Sequence[int],
    speculate: Speculation,
    seconds: StepSeconds,
    *,
    prompt: int = 200,
    every: int = 1,
    most: int = MOST_DRAFTED,
    has_experts: bool = False,
) -> dict[int, tuple[int, ...]]:
    """By the number of tokens so far. every: tokens between two questions."""
    speculator = Speculator({"lookup": SuffixLookup()}, has_experts=has_experts)
    speculator.seconds = seconds
    return {
        end: speculator.draft("r", tokens[:end], terms(speculate, prompt), most=most)
        for end in range(prompt + 1, len(tokens) + 1, every)
    }


def test_new_text_costs_nothing() -> None:
    assert not any(drafts(PROSE, "auto", StepSeconds()).values())
    assert not any(drafts(QUOTED, "off", StepSeconds()).values())
    assert not any(drafts(QUOTED, "lookup", StepSeconds(), most=0).values())


def test_an_answer_that_begins_to_quote_is_guessed() -> None:
    found = drafts(QUOTED, "auto", timed({1: 1.0, 2: 1.05, 16: 1.5}))
    assert not found[202]
    first = next(end for end, draft in found.items() if draft)
    assert first < 210
    assert all(draft for end, draft in found.items() if end >= first)
    assert max(map(len, found.values())) == MOST_DRAFTED
    assert all(len(draft) % 2 for draft in found.values() if draft)
    later = [*QUOTED, *PROSE[200:260]]
    found = drafts(later, "auto", timed({1: 1.0, 2: 1.05, 16: 1.5}))
    assert found[len(QUOTED)]
    assert not found[len(QUOTED) + 12], "it does not quote any more"


def test_a_short_answer_is_not_slowed_down() -> None:
    """Four right guesses in a row are enough only once a wrong one would cost little of it."""
    quote = PROSE[40:47]  # of which three tokens are looked up
    assert not any(drafts([*PROSE[:200], *quote, *PROSE[200:220]], "auto", StepSeconds()).values())
    longer = [*PROSE[:260], *quote, *PROSE[260:280]]
    assert any(drafts(longer, "auto", StepSeconds()).values())


def test_whether_to_guess_follows_from_the_tokens_alone() -> None:
    """Not from when it was asked, nor from how long steps take."""
    fast, slow = timed({1: 1.0, 2: 1.05}), timed({1: 1.0, 2: 3.0, 16: 90.0})
    one_by_one = drafts(QUOTED, "auto", fast)
    for every in (3, 7):
        for seconds in (fast, slow):
            found = drafts(QUOTED, "auto", seconds, every=every)
            assert {end: bool(draft) for end, draft in found.items()} == {
                end: bool(one_by_one[end]) for end in found
            }


def test_more_must_be_right_where_rows_use_different_experts() -> None:
    changed = [
        6000 + place if place >= 200 and not place % 8 else token
        for place, token in enumerate(QUOTED)
    ]
    assert any(drafts(changed, "auto", StepSeconds()).values())
    assert not any(drafts(changed, "auto", StepSeconds(), has_experts=True).values())
    assert any(drafts(QUOTED, "auto", StepSeconds(), has_experts=True).values())


def test_lookup_has_a_row_beside_each_token() -> None:
    found = drafts(PROSE, "lookup", StepSeconds(), prompt=10)
    assert set(found.values()) == {(token,) for token in PROSE[10:]}


def in_turn(
    *answers: Sequence[int], at_once: int = 1, together_s: float = 1.05, ways: Speculation = "auto"
) -> list[tuple[int, int]]:
    """Of each answer, the guesses and for how many answers they are faster in turn. together_s: the
    time of a step of two answers, where one takes 1 and a draft's step 1.5."""
    speculator = Speculator({"lookup": SuffixLookup()})
    speculator.seconds = timed({1: 1.0, 2: 1.05, 16: 1.5})
    speculator.shared_seconds = timed({1: 1.0, 2: together_s})
    asked = [(f"r{at}", tokens, terms(ways, 200)) for at, tokens in enumerate(answers)]
    found = speculator.in_turn(asked, most=MOST_DRAFTED, at_once=at_once)
    return [(len(each.tokens), each.in_turn) for each in found]


def test_answers_take_turns_if_each_is_guessed() -> None:
    ((count, fitting), *_other) = in_turn(QUOTED, QUOTED)
    assert count == MOST_DRAFTED
    assert fitting > 4
    assert in_turn(QUOTED, PROSE[:250]) == []
    assert in_turn(QUOTED, PROSE[:250], at_once=2) == [(count, fitting), (0, 0)]
    assert in_turn(QUOTED, QUOTED, ways="off") == []
    assert in_turn(PROSE[:250]) == []


def test_a_shared_step_that_takes_longer_makes_more_take_turns() -> None:
    (cheap, _other), (dear, _another) = (
        in_turn(QUOTED, QUOTED, together_s=seconds) for seconds in (1.0, 1.9)
    )
    assert 0 < cheap[1] < dear[1]


@pytest.mark.parametrize(
    ("right", "length", "shared", "expected"),
    [
        # Guesses that are wrong gain nothing.
        (0.0, 1, [1.0, 1.0], 0),
        # Sixteen tokens in a step of 1.6, against one token of each answer in a step of 1.
        (1.0, 15, [1.0] * 16, 9),
        # Where a step of many takes as long as steps one by one, any number takes turns.
        (1.0, 15, [float(count) for count in range(1, 17)], 16),
    ],
)
def test_how_many_are_faster_in_turn(
    right: float, length: int, shared: Sequence[float], expected: int
) -> None:
    def turns(*, rewinds: bool) -> int:
        return most_in_turn(
            right,
            lambda rows: 1 + 0.6 * (rows - 1) / 15,
            lambda requests: shared[requests - 1],
            length=length,
            most=len(shared),
            rewinds=rewinds,
        )

    assert turns(rewinds=False) == expected
    assert turns(rewinds=True) <= expected
