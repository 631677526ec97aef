"""How long chunks are beside answers, by devices whose times are formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edge.scheduling.fairness import PRIORITIES, Who
from edge.scheduling.pacing import MixedPacing, Pacing, time_of_prompts


def chunks(
    chunk_s: Callable[[int], float], *, decode_s: float, answers: int = 4, times: float = 1.0
) -> list[int]:
    """Sizes of 200 chunks, one after the other."""
    pacing, sizes = Pacing(), []
    for _chunk in range(200):
        pacing.decoded(decode_s)
        sizes.append(pacing.chunk_tokens(256, answers=answers, times=times))
        pacing.read(sizes[-1], chunk_s(sizes[-1]))
    return sizes


@pytest.mark.parametrize(
    ("chunk_s", "decode_s", "times", "usual"),
    [
        pytest.param(lambda n: 0.6 + 0.235 * n, 1.5, 1.0, 4, id="memory"),
        pytest.param(lambda n: 0.6 + 0.235 * n, 4.4, 1.0, 16, id="memory, 16 answers"),
        pytest.param(lambda n: 0.6 + 0.235 * n, 1.5, 12.0, 64, id="many wait for a first token"),
        pytest.param(lambda n: 10 + 0.235 * n, 10.9, 1.0, 12, id="network: hardly longer"),
        pytest.param(lambda n: 270 + n, 350.0, 1.0, 64, id="hardly longer, but than a token"),
        pytest.param(lambda n: 0.1 * n, 100.0, 1.0, 256, id="as long as can be"),
        pytest.param(lambda n: 9.0 * n, 1.0, 1.0, 4, id="as short as can be"),
    ],
)
def test_a_chunk_takes_no_longer_than_a_token(
    chunk_s: Callable[[int], float], decode_s: float, times: float, usual: int
) -> None:
    sizes = chunks(chunk_s, decode_s=decode_s, times=times)[20:]
    assert sizes.count(usual) >= 0.95 * len(sizes), "also where larger ones are tried"
    assert all(size % 2 == 0 for size in sizes)


@pytest.mark.parametrize(
    ("row_s", "times", "usual"),
    [
        pytest.param(2.0, 1.0, 4, id="rows take the processor's time"),
        pytest.param(0.5, 1.0, 16, id="rows are almost free"),
        pytest.param(0.5, 4.0, 64, id="many wait for a first token"),
    ],
)
def test_a_chunk_beside_answers_makes_their_step_no_longer_than_two(
    row_s: float, times: float, usual: int
) -> None:
    pacing, sizes, alone_s = MixedPacing(), [], 9.0
    assert not pacing.knows(4)
    pacing.decoded(alone_s, answers=4)
    for _chunk in range(200):
        if not pacing.knows(4):
            pacing.decoded(alone_s, answers=4)
        sizes.append(pacing.chunk_tokens(252, answers=4, times=times))
        pacing.read(sizes[-1], alone_s + row_s * sizes[-1])
    assert sizes[20:].count(usual) >= 0.9 * len(sizes[20:]), "also where larger ones are tried"
    assert alone_s + row_s * usual <= (1 + times) * alone_s
    assert not pacing.knows(5), "of another number of answers"


def test_what_is_slower_now_is_noticed_and_one_that_was_held_up_is_not() -> None:
    pacing = Pacing()
    for _chunk in range(40):
        pacing.decoded(16.0)
        size = pacing.chunk_tokens(256, answers=4, times=1.0)
        pacing.read(size, float(size))
    assert size in (12, 16)
    pacing.read(size, 1000.0)
    assert pacing.chunk_tokens(256, answers=4, times=1.0) >= 8
    for _chunk in range(40):
        size = pacing.chunk_tokens(256, answers=4, times=1.0)
        pacing.read(size, 4.0 * size)
    assert size == 4


def test_prompts_have_half_of_the_time_or_what_their_clients_are_due() -> None:
    a, b, c, d = map(Who, "abcd")
    assert time_of_prompts([a], [a]) == 1.0
    assert time_of_prompts([a], [a] * 9) == 1.0
    assert time_of_prompts([a] * 12, [a]) == pytest.approx(12.0)
    assert time_of_prompts([a] * 50, [b] * 4) == pytest.approx(1.0)
    assert time_of_prompts([a] * 50, [a, b]) == 1.0
    assert time_of_prompts([a, b, c], [d]) == pytest.approx(3.0)


def test_who_is_in_no_hurry_takes_less_time_of_others() -> None:
    high, normal, low = (Who("a", each) for each in PRIORITIES)
    assert time_of_prompts([high], [normal] * 9) == pytest.approx(4.0)
    assert time_of_prompts([high], [low]) == pytest.approx(16.0)
    assert time_of_prompts([low], [normal]) == pytest.approx(1 / 4)
    assert time_of_prompts([low], [normal, Who("b")]) == pytest.approx(1 / 4)
    assert time_of_prompts([low] * 3, [low]) == pytest.approx(3.0)
    pacing = Pacing()
    for _chunk in range(40):
        pacing.decoded(16.0)
        size = pacing.chunk_tokens(256, answers=4, times=1 / 4)
        pacing.read(size, 3.0 + size / 8)
    assert size in (6, 8), "as long as a quarter of a step"
