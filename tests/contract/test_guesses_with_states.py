"""After wrong guesses a request's states come back, and its right tokens are computed again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.interface import StageProgram
from edge.backends.registry import open_backend
from edge.errors import RequestError
from edge.profiling.random_weights import written_weights
from edge.protocol.step import MOST_DRAFTED, Step, StepEntry, StepLimits
from edge.transport import SoloCollective
from edge.weights.checkpoint import Checkpoint
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.plans import make_plan
from tests.support.processes import run_module
from tests.support.slow_cases import repeats_are_slow
from tests.support.specs import few_random_bytes

if TYPE_CHECKING:
    from tests.support.checkpoints import TinyCheckpoint

ROWS = 1 + MOST_DRAFTED
LIMITS = StepLimits(context_tokens=96, chunk_tokens=ROWS, requests=ROWS, cached_tokens=256)
TOKENS = tuple(np.random.default_rng(3).integers(3, 120, 41).tolist())
PROMPT = 9


@contextmanager
def loaded(path: Path, dtype: str, folder: Path) -> Iterator[StageProgram]:
    with Checkpoint.open(path) as checkpoint:
        spec = checkpoint.spec
    form = uniform_format(dtype, block_size=32)
    shard = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)
    with few_random_bytes(), written_weights(shard, form, folder) as weights:
        found = open_backend("ort", threads=1).load(spec, shard, weights, form, limits=LIMITS)
        assert found.rows_agree
        yield found
        found.close()


def compute(program: StageProgram, position: int, tokens: tuple[int, ...], rows: int) -> Any:
    """Logits [rows, vocabulary] of a step with a draft of one less."""
    entry = StepEntry(request="r", position=position, tokens=tokens, logit_rows=rows)
    step = Step(entries=(entry,), run=ROWS, drafts=MOST_DRAFTED)
    return program.logits(step, None, SoloCollective()).array()[0].copy()


def answered(program: StageProgram, guesses: Iterator[tuple[int, int]]) -> NDArray[np.float32]:
    """Logits behind each token of the answer; by the number of guesses, and of right ones."""
    found = [compute(program, 0, TOKENS[:PROMPT], 1)]
    start = known = PROMPT
    while known < len(TOKENS):
        again = known - start
        count, right = next(guesses)
        count = min(count, MOST_DRAFTED - again)
        count -= (count + again + 1) % 2
        right = min(right, max(0, count), len(TOKENS) - 1 - known)
        wrong = (5,) * (max(0, count) - right)
        tokens = (*TOKENS[start : known + 1 + right], *wrong)
        rows = compute(program, start, tokens, 1 + max(0, count))
        found.append(rows[: 1 + right])
        known += 1 + right
        if wrong:
            program.cut("r", start)
        else:
            start = known
    program.release("r")
    return np.concatenate(found)


def _check_bits(program: StageProgram) -> None:
    """Rows that are used have the same bits beside any guesses."""
    draw = np.random.default_rng(1)

    def some(most: int) -> Iterator[tuple[int, int]]:
        while True:
            count = int(draw.integers(1, most + 1))
            yield count, int(draw.integers(0, count + 1))

    def of_one() -> Iterator[tuple[int, int]]:
        while True:
            yield 1, 0

    expected = answered(program, of_one())
    for most in (1, 3, 7, MOST_DRAFTED, MOST_DRAFTED):
        np.testing.assert_array_equal(answered(program, some(most)), expected)


def _check_cuts(program: StageProgram) -> None:
    """Only the state before the last guesses comes back."""
    compute(program, 0, TOKENS[:PROMPT], 1)
    with pytest.raises(RequestError, match="not saved"):
        program.cut("r", PROMPT - 1)
    compute(program, PROMPT, TOKENS[PROMPT : PROMPT + 2], 2)
    with pytest.raises(RequestError, match="not saved"):
        program.cut("r", PROMPT + 1)
    program.cut("r", PROMPT)
    program.release("r")


@pytest.mark.parametrize(
    ("tokens", "rows", "drafts", "computed"),
    [(2, 1, 3, 2), (4, 3, 3, 4), (4, 2, 3, 2), (1, 1, 3, 1), (9, 1, 3, 1), (2, 1, 0, 1)],
)
def test_a_head_has_no_row_alone_behind_wrong_guesses(
    tokens: int, rows: int, drafts: int, computed: int
) -> None:
    entry = StepEntry(request="r", position=0, tokens=(7,) * tokens, logit_rows=rows)
    assert Step(entries=(entry,), run=4, drafts=drafts).head_rows == computed


@pytest.mark.parametrize(
    ("family", "dtype"),
    repeats_are_slow([("qwen3_5", "float32"), ("qwen3_5", "int4"), ("lfm2", "int8")], of=[0]),
)
def test_bits_are_those_with_other_guesses(
    family: str, dtype: str, tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    path = tiny_checkpoint(family).path
    run_module("tests.contract.test_guesses_with_states", path, dtype, tmp_path)


if __name__ == "__main__":
    with loaded(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])) as only:
        _check_bits(only)
        _check_cuts(only)
