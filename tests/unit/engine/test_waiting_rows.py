"""Rows of pictures that wait on a shard for the step that computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge.engine.waiting_rows import WaitingRows
from edge.errors import ProtocolError, RequestError
from edge.models.pictures import PICTURE_IDS
from edge.protocol.step import Step, StepEntry

HIDDEN = 4
ROWS = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)


class Buffers:
    """The buffer of a program, in which numbers of an earlier step are left."""

    def receive_buffer(self, step: Step) -> Any:
        return np.full((step.batch, step.num_tokens, HIDDEN), 9, np.float32)

    def picture_rows(self, step: Step) -> Any:
        self.added = np.zeros((2, step.batch, step.num_tokens, HIDDEN), np.float32)
        return self.added


def step(position: int, *tokens: int) -> Step:
    entry = StepEntry(request="r", position=position, tokens=tokens, logit_rows=0)
    return Step(entries=(entry,))


def waiting(*, is_awaited: bool = True) -> WaitingRows:
    rows = WaitingRows(HIDDEN, most=4, is_awaited=is_awaited)
    if is_awaited:
        rows.add("r", 5, ROWS.tobytes())
    return rows


def test_rows_come_in_the_places_of_their_tokens() -> None:
    rows, ids = waiting(), range(PICTURE_IDS, PICTURE_IDS + 3)
    found = rows.take(step(4, 1, *ids[:2]), Buffers())  # type: ignore[arg-type]
    assert found is not None
    np.testing.assert_array_equal(found, [[[0] * HIDDEN, *ROWS[:2]]])
    assert rows.take(step(0, 1, 2), Buffers()) is None, "no row of a picture"  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="did not come before its step"):
        rows.take(step(5, ids[0]), Buffers())  # type: ignore[arg-type]


def test_a_shard_that_looks_up_none_takes_none() -> None:
    rows = waiting(is_awaited=False)
    assert rows.take(step(5, PICTURE_IDS), Buffers()) is None  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="no rows of a picture for this shard"):
        rows.add("r", 5, ROWS.tobytes())


@pytest.mark.parametrize("is_embedded", [False, True])
def test_what_layers_add_goes_to_the_layers_of_the_shard(is_embedded: bool) -> None:
    rows = WaitingRows(
        HIDDEN,
        most=4,
        is_awaited=True,
        is_embedded=is_embedded,
        picture_layers=3,
        added=range(1, 3),
    )
    whole = np.arange(2 * 4 * HIDDEN, dtype=np.float32).reshape(2, 4, HIDDEN)
    rows.add("r", 1, whole.tobytes())
    buffers = Buffers()
    found = rows.take(step(0, 7, PICTURE_IDS, PICTURE_IDS + 1), buffers)  # type: ignore[arg-type]
    assert (found is not None) == is_embedded
    if found is not None:
        np.testing.assert_array_equal(found[0, 1:], whole[:, 0])
    np.testing.assert_array_equal(buffers.added[:, 0, 0], np.zeros((2, HIDDEN)))
    np.testing.assert_array_equal(buffers.added[:, 0, 1:], whole[:, 2:].swapaxes(0, 1))
    with pytest.raises(ProtocolError, match="no rows of a picture"):
        rows.add("r", 5, bytes(4 * HIDDEN))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes are no rows"),
        (bytes(4 * HIDDEN - 1), "15 bytes are no rows"),
        (np.full(HIDDEN, np.nan, np.float32).tobytes(), "NaN or infinity"),
        (bytes(2 * 4 * HIDDEN), "more than 4 rows of pictures"),
    ],
)
def test_rows_that_cannot_be(content: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        waiting().add("r", 8, content)


def test_rows_of_a_request_that_is_over_take_no_room() -> None:
    rows = waiting()
    rows.forget("r")
    rows.add("s", 0, bytes(4 * 4 * HIDDEN))
