"""Layers in the shape of a real model through a window of a real GPU: as tests/gpu is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.backends.interface import StageProgram
from edge.backends.registry import open_backend
from edge.demos.bench.gpu_decode import SPEC
from edge.offload import DerivedCache, DiskKVTier
from edge.profiling.random_weights import written_weights
from edge.profiling.sample import Sample
from edge.protocol.step import StepLimits
from edge.transport import SoloCollective
from edge.weights.layout import shard_layout
from tests.gpu.test_whole_shards import LIMITS, NOT_RUN, hidden, step
from tests.support.formats import uniform_format
from tests.support.specs import changed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NOT_RUN), reason=NOT_RUN)]

LAYERS = 6
SAMPLE = Sample(
    spec=changed(SPEC, num_layers=LAYERS + 2),
    num_layers=LAYERS,
    chunk_rows=512,
    is_narrowed=False,
)
LAYER_BYTES = 120 << 20
"""More than one of these takes in int4, and less than two."""


@contextmanager
def loaded(
    folder: Path, *, streamed: int, host_layers: int, limits: StepLimits = LIMITS
) -> Iterator[StageProgram]:
    """The file of weights stays: layers may have to be packed later."""
    chosen = uniform_format("int4", 128)
    layout = shard_layout(SAMPLE.spec, SAMPLE.plan("whole", chosen), stage=1, rank=0)
    layout = replace(layout, streamed_layers=streamed)
    backend = open_backend("triton", threads=4)
    packed = DerivedCache(folder / "packed", 1 << 40)
    tier = DiskKVTier(folder / "kv", 1 << 40)
    with written_weights(layout, chosen, folder) as weights:
        given = replace(weights, packed=packed, host_bytes=host_layers * LAYER_BYTES)
        program = backend.load(SAMPLE.spec, layout, given, chosen, limits=limits, kv_tier=tier)
        try:
            yield program
        finally:
            program.close()
            tier.close()


def outcome(program: StageProgram, request: str) -> bytes:
    """A chunk, then tokens: the first is launched, the second recorded, the others run again."""
    found = [program.forward(step((request, 0), tokens=300), hidden(1, 1, 300), SoloCollective())]
    found = [found[0].copy()]
    for position in range(300, 306):
        given = hidden(position, 1, 1)
        rows = program.forward(step((request, position)), given, SoloCollective())
        assert np.isfinite(rows).all()
        found.append(rows.copy())
    program.release(request)
    return b"".join(each.tobytes() for each in found)


def test_streamed_layers_have_the_bits_of_layers_in_memory(tmp_path: Path) -> None:
    """Out of pinned memory, out of that and from disk, and from disk alone."""
    with loaded(tmp_path, streamed=0, host_layers=0) as program:
        expected = outcome(program, "a")
    for host_layers in (LAYERS, 4, 0):
        with loaded(tmp_path, streamed=LAYERS, host_layers=host_layers) as program:
            assert outcome(program, "a") == expected
            assert outcome(program, "b") == expected
            assert program.disk_wait_s > 0


def test_a_budget_that_moves_changes_no_bit(tmp_path: Path) -> None:
    with loaded(tmp_path, streamed=0, host_layers=3) as program:
        expected = outcome(program, "a")
        for number, count in enumerate((LAYERS, 4, LAYERS, 0)):
            program.stream(count)
            assert outcome(program, str(number)) == expected


def test_a_request_on_disk_comes_back_to_the_bit(tmp_path: Path) -> None:
    with loaded(tmp_path, streamed=LAYERS, host_layers=LAYERS) as program:
        prompt, token = hidden(1, 1, 300), hidden(2, 1, 1)
        found = []
        for name in "ab":
            program.forward(step((name, 0), tokens=300), prompt, SoloCollective())
            if name == "b":
                program.swap_out("b")
                program.forward(step(("c", 0), tokens=300), hidden(3, 1, 300), SoloCollective())
            rows = program.forward(step((name, 300)), token, SoloCollective())
            found.append(rows.tobytes())
        assert found[0] == found[1]


def test_a_request_longer_than_memory_has_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    """Memory for 200 tokens in six layers: of 306 tokens three layers at once, one of them stays.

    Long enough that steps of it are recorded and run again, in turns with a request that fits.
    """
    with loaded(tmp_path, streamed=0, host_layers=0) as program:
        expected, other = outcome(program, "a"), short_outcome(program)
    limits = replace(LIMITS, cached_tokens=200, disk_tokens=1 << 16)
    for streamed in (0, LAYERS):
        with loaded(tmp_path, streamed=streamed, host_layers=2, limits=limits) as program:
            assert outcome(program, "a") == expected
            assert short_outcome(program) == other
            assert outcome(program, "c") == expected


def short_outcome(program: StageProgram) -> bytes:
    rows = program.forward(step(("b", 0), tokens=50), hidden(7, 1, 50), SoloCollective())
    found = rows.tobytes()
    program.release("b")
    return found
