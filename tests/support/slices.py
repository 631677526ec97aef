"""Slices of a small model, measured on a real back end.

A script, as `halves` is: the process of the tests has sessions with pools of threads of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from edge.backends.registry import open_backend
from edge.profiling.cold_caches import Caches
from edge.profiling.loaded_sample import LoadedSample, Site, chunk_step, decode_step
from edge.profiling.sample import Width, weights_sample
from edge.profiling.slice_costs import slice_costs
from tests.support.formats import uniform_format
from tests.support.specs import shared_keys_spec
from tests.unit.profiling.test_profile_sample import spec

WIDTHS: tuple[Width, ...] = ("whole", "half")

INT4 = uniform_format("int4")

SAMPLE = weights_sample(
    spec(num_layers=3, hidden_size=64, num_heads=8, num_kv_heads=2, head_size=16, ffn_columns=256),
    INT4,
    1 << 30,
)


STEPS = [decode_step(1), decode_step(4), chunk_step(256)]


def _site(folder: Path) -> Site:
    return Site(
        backend=open_backend("ort", threads=1),
        folder=folder,
        budget_bytes=64 << 20,
        disk_bytes_per_s=None,
        check=lambda: None,
    )


def check_measured(folder: Path) -> None:
    """Steps of every length, of which the longest is computed in halves."""
    site, steps = _site(folder), STEPS
    found = slice_costs(site, SAMPLE, INT4, Caches(1 << 20), steps, [0.0, 0.0, 0.0])
    assert len(found.slices) == len(steps)
    for half, narrow in found.slices:
        assert (half.attention_bytes, half.feed_forward_bytes) == SAMPLE.part_bytes("half", INT4)
        assert narrow.nbytes <= half.nbytes
        assert min(each.attention_s for each in (half, narrow)) > 0
        assert min(each.feed_forward_s for each in (half, narrow)) > 0
    assert found.run_s > 0
    assert np.isfinite([found.run_s, found.jitter, found.start_s]).all()


def check_inputs_of_tokens(folder: Path) -> None:
    """In the middle of a model, layers that need the embedding of each token."""
    sample = weights_sample(shared_keys_spec(), INT4, 64 << 20)
    for width in WIDTHS:
        loaded = LoadedSample(_site(folder), sample, width, INT4)
        assert min(loaded.seconds(step) for step in STEPS) > 0
        loaded.close()


if __name__ == "__main__":
    check_measured(Path(sys.argv[1]))
    check_inputs_of_tokens(Path(sys.argv[1]))
