"""When a step is computed in halves, and what the halves are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.backends.overlap import MIN_TOKENS, parts_of
from edge.protocol.step import Step, StepEntry


def chunk(tokens: int, *, position: int = 0, logit_rows: int = 0) -> Step:
    entry = StepEntry(
        request="r", position=position, tokens=tuple(range(tokens)), logit_rows=logit_rows
    )
    return Step(entries=(entry,))


@settings(max_examples=200)
@given(tokens=st.integers(MIN_TOKENS, 600), position=st.integers(0, 5000), rows=st.floats(0.0, 1.0))
def test_the_halves_are_the_chunk(tokens: int, position: int, rows: float) -> None:
    step = chunk(tokens, position=position, logit_rows=round(rows * tokens))
    first, second = parts_of(step, is_split=True)
    (whole,), (before,), (after,) = step.entries, first.entries, second.entries
    assert before.tokens + after.tokens == whole.tokens
    assert (before.position, after.end) == (whole.position, whole.end)
    assert before.end == after.position
    assert before.logit_rows + after.logit_rows == whole.logit_rows
    assert not before.logit_rows or after.logit_rows == after.end - after.position
    assert first.num_tokens % 32 == 0
    assert abs(first.num_tokens - second.num_tokens) <= 32


@pytest.mark.parametrize(
    ("step", "is_split"),
    [
        (chunk(MIN_TOKENS), False),
        (chunk(MIN_TOKENS - 1), True),
        (chunk(1), True),
        (
            Step(
                entries=tuple(
                    StepEntry(request=str(index), position=3, tokens=(1,), logit_rows=1)
                    for index in range(2 * MIN_TOKENS)
                )
            ),
            True,
        ),
    ],
    ids=["not split", "short", "decode", "batch"],
)
def test_what_is_computed_whole(step: Step, is_split: bool) -> None:
    assert parts_of(step, is_split=is_split) == (step,)
