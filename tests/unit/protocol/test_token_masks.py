"""Masks in a payload: what was written is read, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edge.errors import ProtocolError
from edge.protocol.step import MOST_DRAFTED, Step, StepEntry
from edge.protocol.step_frames import RunStep
from edge.protocol.token_masks import most_mask_bytes, read_masks, unpacked, write_masks

ENTRIES = tuple(
    StepEntry(request=name, position=3, tokens=(1,), logit_rows=rows)
    for name, rows in (("a", 1), ("b", 0), ("c", 1))
)


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 32, 33, 3000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.04, 0.5])
def test_what_was_written_is_read(vocab_size: int, share: float) -> None:
    draw = np.random.default_rng(vocab_size)
    wanted = draw.random((3, 2, vocab_size)) < share
    wanted[:, :, draw.integers(vocab_size)] = True
    packed = np.packbits(wanted, axis=2, bitorder="little")
    written = write_masks(itertools.chain(*packed))
    assert len(written) <= most_mask_bytes(6, vocab_size)
    found = read_masks(("a", "b", "c"), 2, written, vocab_size)
    assert [*found] == ["a", "b", "c"]
    for rows, masks in zip(packed, found.values(), strict=True):
        assert [unpacked(mask, vocab_size).tolist() for mask in masks] == rows.tolist()
    assert read_masks((), 1, b"", vocab_size) == {}


def test_masks_of_a_forced_text_are_short() -> None:
    """Of 15 guesses in a vocabulary of 150,000: one mask is of any text, the others of the few
    tokens that begin a text."""
    bits = np.zeros((1 + MOST_DRAFTED, 150_000 // 8), np.uint8)
    bits[0], bits[1:, :12] = 0xFF, 0x10
    assert len(write_masks([*bits])) == 4 + 150_000 // 8 + MOST_DRAFTED * (4 + 12 * 4)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "0 bytes for 1 masks each of 1"),
        (b"\0\0\0", "3 bytes for 1 masks each of 1"),
        (b"\0\0\0\0" + b"\1" * 12, "16 bytes for 1 masks each of 1"),
        (b"\0\0\0\0" + b"\1" * 14, "18 bytes for 1 masks each of 1"),
        (b"\1\0\0\0" + b"\1\0\0", "7 bytes for 1 masks each of 1"),
        (b"\1\0\0\0" + b"\1\0\0\0\0", "9 bytes for 1 masks each of 1"),
        (b"\4\0\0\0" + b"\1\0\0\0" * 4, "20 bytes for 1 masks each of 1"),  # bits are shorter
        (b"\xff\xff\xff\xff" + b"\1\0\0\0", "8 bytes for 1 masks each of 1"),
        (b"\0\0\0\0" + b"\0" * 13, "allows no token"),
        (b"\0\0\0\0" + b"\1" * 12 + b"\x10", "outside a vocabulary of 100"),
        (b"\1\0\0\0" + b"\x64\0\0\0", "outside a vocabulary of 100"),
    ],
)
def test_what_nobody_wrote_is_refused(payload: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        read_masks(("a",), 1, payload, 100)


def test_every_row_has_a_mask() -> None:
    mask = np.packbits(np.arange(100) == 7, bitorder="little")
    with pytest.raises(ProtocolError, match="16 bytes for 3 masks each of 1"):
        read_masks(("a",), 3, write_masks([mask] * 2), 100)
    assert len(read_masks(("a",), 2, write_masks([mask] * 2), 100)["a"]) == 2


def test_ids_are_bits_only_where_they_are_used() -> None:
    """A frame of some bytes must not take thousands of times as much memory."""
    mask = np.packbits(np.arange(150_000) == 7, bitorder="little")
    (read,) = read_masks(("a",), 1, write_masks([mask]), 150_000)["a"]
    assert read.nbytes == 4


@pytest.mark.parametrize(
    ("masked", "run"), [(("b",), 1), (("x",), 1), (("a", "a"), 1), (("a",), 2)]
)
def test_masks_are_of_requests_that_want_one_token(masked: tuple[str, ...], run: int) -> None:
    entries = ENTRIES if run == 1 else ENTRIES[::2]
    with pytest.raises(ValueError, match=r"masked has|cannot have token masks"):
        RunStep(session="s", step=Step(entries=entries, run=run), masked=masked)


@pytest.mark.parametrize(("run", "refused"), [(1, False), (4, False), (5, True)])
def test_a_run_with_masks_is_one_step(run: int, refused: bool) -> None:
    draft = StepEntry(request="a", position=3, tokens=(1, 2, 3, 4), logit_rows=4)
    step = Step(entries=(draft,), run=run, drafts=15)
    if not refused:
        RunStep(session="s", step=step, masked=("a",))
        return
    with pytest.raises(ValueError, match="cannot have token masks"):
        RunStep(session="s", step=step, masked=("a",))
