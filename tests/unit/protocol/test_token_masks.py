"""Masks in a payload: what was written is read, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from edge.errors import ProtocolError
from edge.protocol.messages import RunStep
from edge.protocol.step import Step, StepEntry
from edge.protocol.token_masks import read_masks, write_masks

ENTRIES = tuple(
    StepEntry(request=name, position=3, tokens=(1,), logit_rows=rows)
    for name, rows in (("a", 1), ("b", 0), ("c", 1))
)


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 3000])
def test_what_was_written_is_read(vocab_size: int) -> None:
    draw = np.random.default_rng(vocab_size)
    wanted = draw.random((3, vocab_size)) < 0.5
    wanted[:, 0] = True
    packed = np.packbits(wanted, axis=1, bitorder="little")
    found = read_masks(("a", "b", "c"), write_masks([*packed]), vocab_size)
    assert [*found] == ["a", "b", "c"]
    for row, mask in zip(wanted, found.values(), strict=True):
        assert (np.unpackbits(mask, count=vocab_size, bitorder="little") == row).all()
    assert read_masks((), b"", vocab_size) == {}


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"\x01", "1 bytes for the masks of 1"),
        (b"\x01\x00\x00", "3 bytes for the masks of 1"),
        (b"\x00\x00", "allows no token"),
        (b"\x01\x04", "outside a vocabulary of 10"),
    ],
)
def test_what_nobody_wrote_is_refused(payload: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        read_masks(("a",), payload, 10)


@pytest.mark.parametrize(
    ("masked", "run"), [(("b",), 1), (("x",), 1), (("a", "a"), 1), (("a",), 2)]
)
def test_masks_are_of_requests_that_want_one_token(masked: tuple[str, ...], run: int) -> None:
    entries = ENTRIES if run == 1 else ENTRIES[::2]
    with pytest.raises(ValueError, match=r"masked has|cannot have token masks"):
        RunStep(session="s", step=Step(entries=entries, run=run), masked=masked)
