"""Shards in the shapes of real models on a real GPU: TRITON_INTERPRET=0 scripts/test tests/gpu"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.interface import StageProgram
from edge.backends.registry import open_backend
from edge.demos.bench.gpu_decode import SPEC
from edge.host.cuda_driver import num_cuda_devices
from edge.profiling.random_weights import written_weights
from edge.profiling.sample import Sample
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.transport import Collective, SoloCollective
from edge.weights.formats import KV_DTYPES, KvDtype
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.transport_pairs import group, on_every_rank

NOT_RUN = ""
if not num_cuda_devices():
    NOT_RUN = "there is no CUDA device: not run"
elif os.environ.get("TRITON_INTERPRET") == "1":
    NOT_RUN = "Triton interprets its kernels here: not run; set TRITON_INTERPRET=0"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NOT_RUN), reason=NOT_RUN)]

LIMITS = StepLimits(context_tokens=2048, chunk_tokens=512, requests=8, cached_tokens=8192)
SAMPLE = Sample(spec=SPEC, num_layers=2, chunk_rows=512, is_narrowed=False)
"""Two layers of the middle: hidden states come in and go out."""


Array = NDArray[np.float32]


@contextmanager
def loaded(
    folder: Path, *, dtype: str = "int4", kv_dtype: KvDtype = "float32", ranks: int = 1
) -> Iterator[list[StageProgram]]:
    """Loading checks every operator against its reference."""
    chosen = uniform_format(dtype, 128)
    plan = SAMPLE.plan("whole" if ranks == 1 else "half", chosen)
    backend = open_backend("triton", threads=4)
    programs = []
    try:
        for rank in range(ranks):
            layout = shard_layout(SAMPLE.spec, plan, stage=1, rank=rank)
            with written_weights(layout, chosen, folder) as weights:
                programs.append(
                    backend.load(
                        SAMPLE.spec, layout, weights, chosen, limits=LIMITS, kv_dtype=kv_dtype
                    )
                )
        yield programs
    finally:
        for program in programs:
            program.close()


def step(*entries: tuple[str, int], tokens: int = 1) -> Step:
    return Step(
        entries=tuple(
            StepEntry(request=name, position=position, tokens=(0,) * tokens, logit_rows=0)
            for name, position in entries
        )
    )


def hidden(seed: int, batch: int, tokens: int) -> Array:
    random = np.random.default_rng(seed)
    return random.standard_normal((batch, tokens, SPEC.hidden_size), dtype=np.float32)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_every_format_agrees_and_computes_numbers(
    dtype: str, kv_dtype: KvDtype, tmp_path: Path
) -> None:
    with loaded(tmp_path, dtype=dtype, kv_dtype=kv_dtype) as (program,):
        for tokens, position in ((333, 0), (512, 333), (1, 845)):
            given = hidden(position, 1, tokens)
            found = program.forward(step(("a", position), tokens=tokens), given, SoloCollective())
            assert found.shape == given.shape
            assert np.isfinite(found).all()
            assert (found != given).any()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_recorded_step_has_the_bits_of_a_launched_one(batch: int, tmp_path: Path) -> None:
    """The first is launched, the second recorded and run, the third is run again."""
    with loaded(tmp_path) as (program,):
        names = [str(number) for number in range(batch)]
        for name in names:
            program.forward(step((name, 0), tokens=50), hidden(1, 1, 50), SoloCollective())
        decode, given = step(*((name, 50) for name in names)), hidden(2, batch, 1)
        found = [program.forward(decode, given, SoloCollective()).copy() for _ in range(3)]
        assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
        later = step(*((name, 51) for name in names))
        assert (program.forward(later, hidden(3, batch, 1), SoloCollective()) != found[0]).any()


def test_shards_compute_in_halves_and_graphs_together(tmp_path: Path) -> None:
    """Two shards on one GPU; each repeats its steps to the bit."""
    with loaded(tmp_path, ranks=2) as programs, group("memory", 2) as members:

        def run(member: Collective) -> list[bytes]:
            program = programs[member.rank]
            found = []
            for _ in range(3):
                program.forward(step(("a", 0), tokens=400), hidden(4, 1, 400), member)
                rows = program.forward(step(("a", 400)), hidden(5, 1, 1), member)
                assert np.isfinite(rows).all()
                found.append(rows.tobytes())
            return found

        first, second = on_every_rank(members, run)
        assert first == second
        assert len(set(first)) == 1
