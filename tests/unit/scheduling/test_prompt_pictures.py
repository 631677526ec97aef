"""Pictures in a prompt: rotary positions by three axes, and rows that see each other."""

from __future__ import annotations

import numpy as np
import pytest

from edge.protocol.step import Step, StepEntry
from edge.scheduling.prompt_pictures import PromptPictures, turned
from edge.scheduling.residency import Residency
from tests.support.scheduling import Steps

PROMPT = tuple(range(12))
"""A picture of 2 x 3 rows from token 2 on, and one of 1 x 2 from token 9 on."""

TURNS = turned(PROMPT, {2: (2, 3), 9: (1, 2)})


def test_positions_grow_by_the_longer_side_of_a_picture() -> None:
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    np.testing.assert_array_equal(TURNS, expected)


def placed(first: int, last: int, *, blocks: bool = False) -> StepEntry:
    pictures = PromptPictures(
        turns=None if blocks else TURNS, blocks=((2, 8), (9, 11)) if blocks else ()
    )
    entry = StepEntry(request="r", position=first, tokens=tuple(range(first, last)), logit_rows=0)
    return pictures.placed(entry)


def test_steps_have_positions_of_all_axes_where_these_differ() -> None:
    assert placed(0, 2) == StepEntry(request="r", position=0, tokens=(0, 1), logit_rows=0)
    assert placed(0, 4).turns == (0, 1, 2, 2, 0, 1, 2, 2, 0, 1, 2, 3)
    assert (placed(8, 9).turns, placed(8, 9).shift) == ((), 3)
    assert (placed(10, 13).turns[:3], placed(10, 13).shift) == ((6, 8, 9), 3)
    assert (placed(0, 8).shift, placed(7, 10).shift) == (3, 3)
    assert (placed(12, 13).turns, placed(12, 13).shift) == ((), 3)


def test_parts_of_a_step_keep_their_positions() -> None:
    whole = placed(1, 11)
    for first, last in ((0, 4), (4, 10), (3, 4)):
        part = whole.part(first, last, logit_rows=0)
        expected = TURNS[:, 1 + first : 1 + last].reshape(-1).tolist()
        assert (part.position, list(part.turns)) == (1 + first, expected)
    step = Step(entries=(whole,))
    assert step.cut(3).entries[0].turns == whole.part(0, 7, logit_rows=0).turns
    apart = Step(entries=(whole,), singly=True).apart
    assert [each.entries[0].turns for each in apart] == [
        tuple(TURNS[:, position].tolist()) for position in range(1, 11)
    ]
    end = placed(9, 12).part(0, 3, logit_rows=1)
    (following,) = Step(entries=(end,), run=5).following([7]).entries
    assert (following.position, following.turns, following.shift) == (12, (), 3)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"turns": (0, 0)}, "2 rotary positions of 2 tokens"),
        ({"turns": (4, 4, 4, 4, 4, 7)}, "beyond that of its token"),
        ({"shift": 6}, "rotary positions 6 before 5"),
    ],
)
def test_positions_that_cannot_be(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StepEntry(request="r", position=5, tokens=(1, 2), logit_rows=0, **fields)  # type: ignore[arg-type]


def test_rows_that_see_each_other_are_in_one_step() -> None:
    pictures = PromptPictures(turns=None, blocks=((2, 8), (9, 11)))
    residency = Residency(memory_tokens=100, longest_tokens=100, requests=2)
    steps = Steps(residency, stages=1, chunk_tokens=6, logit_chunk_tokens=6, rows_agree=True)
    steps.add("r", PROMPT, new_tokens=1, pictures=pictures)
    found = []
    while (step := steps.decide().step) is not None:
        (entry,) = step.entries
        found.append((entry.position, entry.end, entry.sees_all))
        steps.answer([1] if entry.logit_rows else [], ends=["length"] if entry.logit_rows else None)
    assert found == [(0, 2, False), (2, 8, True), (8, 9, False), (9, 11, True), (11, 12, False)]
