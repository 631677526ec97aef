"""A chunk of a prompt beside tokens of other requests: each has the bits of a step of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from edge_kernels import kernels

from edge.backends.interface import StageProgram
from edge.backends.registry import open_backend
from edge.errors import RequestError
from edge.profiling.random_weights import written_weights
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.transport import SoloCollective
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import KvDtype, weight_format
from edge.weights.layout import shard_layout
from tests.support.plans import make_plan
from tests.support.processes import run_module
from tests.support.specs import few_random_bytes

if TYPE_CHECKING:
    from tests.support.checkpoints import TinyCheckpoint

LIMITS = StepLimits(context_tokens=96, chunk_tokens=16, requests=4, cached_tokens=384)
TOKENS = np.random.default_rng(3).integers(3, 120, (4, 60))


@contextmanager
def loaded(path: Path, folder: Path, kv_dtype: KvDtype) -> Iterator[StageProgram]:
    """int4 as this machine has it: where there are fast kernels, in blocks of files."""
    with Checkpoint.open(path) as checkpoint:
        spec = checkpoint.spec
    form = weight_format(spec, "int4")
    spec = form.graded(spec)
    shard = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)
    with few_random_bytes(), written_weights(shard, form, folder) as weights:
        found = open_backend("ort", threads=2).load(
            spec, shard, weights, form, limits=LIMITS, kv_dtype=kv_dtype
        )
        if kv_dtype != "float32":
            compute(found, entry(0, 0, 12))
            found.calibrate("0")
        yield found
        found.close()


def entry(request: int, first: int, last: int, rows: int = 0) -> StepEntry:
    tokens = tuple(TOKENS[request, first:last].tolist())
    return StepEntry(request=str(request), position=first, tokens=tokens, logit_rows=rows)


def compute(program: StageProgram, *entries: StepEntry) -> Any:
    found = program.logits(Step(entries=entries), None, SoloCollective())
    return found.array().copy()


def begin(program: StageProgram) -> None:
    for request, tokens in enumerate((9, 16, 2)):
        compute(program, entry(request, 0, tokens))


def _check_bits(program: StageProgram) -> None:
    assert program.mixes
    begin(program)
    apart = []
    for number in range(4):
        answers = [entry(request, at + number, at + number + 1, 1)
                   for request, at in enumerate((9, 16, 2))]  # fmt: skip
        apart.append([compute(program, each)[0] for each in answers])
        compute(program, entry(3, 5 * number, 5 * number + 5))
    last = compute(program, entry(3, 20, 23, 1))[0]
    for request in range(4):
        program.release(str(request))
    begin(program)
    for number in range(4):
        answers = [entry(request, at + number, at + number + 1, 1)
                   for request, at in enumerate((9, 16, 2))]  # fmt: skip
        found = compute(program, *answers, entry(3, 5 * number, 5 * number + 5))
        np.testing.assert_array_equal(found[:3], apart[number])
    found = compute(program, entry(0, 13, 14, 1), entry(3, 20, 23, 1))
    np.testing.assert_array_equal(found[1], last)


def _check_refusals(program: StageProgram) -> None:
    program.release("3")
    with pytest.raises(RequestError, match="takes up to 4 requests or 16 tokens"):
        compute(program, entry(0, 14, 15, 1), entry(3, 0, 16))


@pytest.mark.skipif(kernels() == "plain", reason="this processor has no fast kernels: not run")
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("llama", "float32"),
        ("llama", "int8"),
        ("llama", "int4"),
        ("gemma2", "int4"),
        ("glm4_moe_lite", "float32"),
    ],
)
def test_bits_are_those_of_steps_of_their_own(
    family: str, kv_dtype: str, tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    path = tiny_checkpoint(family).path
    run_module("tests.contract.test_steps_with_chunks", path, tmp_path, kv_dtype)


if __name__ == "__main__":
    with loaded(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]) as only:  # type: ignore[arg-type]
        _check_bits(only)
        _check_refusals(only)
