"""What experts cost that are brought in is measured as they run: in memory, and one by one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from edge.backends.ort.program import OrtProgram
from edge.backends.registry import open_backend
from edge.profiling.cold_caches import Caches
from edge.profiling.expert_costs import expert_seconds
from edge.profiling.loaded_sample import LoadedSample, Site, decode_step
from edge.profiling.sample import expert_sample
from edge.protocol.measurements import Profile
from tests.support.formats import uniform_format
from tests.support.processes import run_module
from tests.support.specs import plain_spec, spec_of
from tests.support.stacked_experts import SPEC as NARROW

_FORM = uniform_format("int4")
_SPEC = spec_of([NARROW.kinds[0]] * 4, hidden_size=128, vocab_size=40)


def _main(folder: Path) -> None:
    opened = open_backend("ort", threads=2)
    site = Site(
        backend=opened,
        folder=folder,
        budget_bytes=32 << 20,
        disk_bytes_per_s=None,
        check=lambda: None,
    )
    sample = expert_sample(_SPEC, _FORM, site.budget_bytes)
    assert sample is not None
    assert sample.num_layers > 1
    programs = []
    for is_streamed in (False, True):
        loaded = LoadedSample(site, sample, "whole", _FORM, is_streamed=is_streamed)
        for _ in range(3):
            loaded.seconds(decode_step(1))
        program = loaded._program
        assert isinstance(program, OrtProgram)
        programs.append((loaded, program))
    (whole, in_memory), (streamed, brought_in) = programs
    stacks = [segment.model.count(b"QMoE") for segment in in_memory._graphs.segments]
    assert sum(stacks) >= sample.num_layers, "one node for all experts of a layer, where they stay"
    assert not any(b"QMoE" in segment.model for segment in brought_in._graphs.segments)
    assert in_memory.weight_reads.experts == 0
    reads = brought_in.weight_reads
    assert reads.experts == 3 * sample.num_routed
    assert reads.experts_read == 0, "all of them have room"
    whole.close()
    streamed.close()

    found = expert_seconds(site, Profile(model=_SPEC, weight_format=_FORM), Caches(8 << 20))
    assert found is not None
    assert np.isfinite(found)
    narrow = Profile(model=NARROW, weight_format=_FORM)
    assert expert_seconds(site, narrow, Caches(8 << 20)) is None, "too little to be exchanged"
    dense = Profile(model=plain_spec(), weight_format=_FORM)
    assert expert_seconds(site, dense, Caches(8 << 20)) is None
    assert not list(folder.iterdir()), "nothing is left on the disk"


@pytest.mark.linux_ways
def test_both_ways_to_compute_experts_are_measured(tmp_path: Path) -> None:
    run_module(__name__, tmp_path)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
