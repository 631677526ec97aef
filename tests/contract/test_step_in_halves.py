"""A chunk in halves, whose sums are exchanged meanwhile, is two chunks one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge.engine.timing import ShardCounters, TimedCollective
from tests.support.halves import SIZES
from tests.support.processes import run_module
from tests.support.transport_pairs import group


@pytest.mark.parametrize("layout", SIZES)
def test_halves_have_the_bits_of_two_chunks_and_hear_of_lost_peers(
    layout: str, tmp_path: Path
) -> None:
    run_module("tests.support.halves", layout, tmp_path)


def test_only_the_wait_for_a_sum_counts_as_time_of_sums() -> None:
    with group("memory", 2) as members:
        times = ShardCounters()
        timed = TimedCollective(members[0], times)
        ours, theirs = np.ones(5, np.float32), np.ones(5, np.float32)
        work, other = timed.begin_all_reduce(ours), members[1].begin_all_reduce(theirs)
        other.wait()
        assert times.now.reduce_s == 0
        work.wait()
        assert times.now.reduce_s > 0
        assert (ours == 2).all()
