"""What slices of layers cost: bytes and what is fixed, taken apart."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.backends.registry import open_backend
from edge.profiling.cold_caches import Caches
from edge.profiling.loaded_sample import LoadedSample, Site, chunk_step, decode_step
from edge.profiling.sample import Width, weights_sample
from edge.profiling.slice_costs import SliceTimes, _whole_parts, byte_and_fixed_s, slice_costs
from edge.protocol.measurements import MOST_OF_WHOLE
from tests.support.formats import uniform_format
from tests.support.processes import run_module
from tests.support.specs import shared_keys_spec
from tests.unit.profiling.test_profile_sample import spec

_WIDTHS: tuple[Width, ...] = ("whole", "half")

INT4 = uniform_format("int4")

SAMPLE = weights_sample(
    spec(num_layers=3, hidden_size=64, num_heads=8, num_kv_heads=2, head_size=16, ffn_columns=256),
    INT4,
    1 << 30,
)


_STEPS = [decode_step(1), decode_step(4), chunk_step(256)]


def _site(folder: Path) -> Site:
    return Site(
        backend=open_backend("ort", threads=1),
        folder=folder,
        budget_bytes=64 << 20,
        disk_bytes_per_s=None,
        check=lambda: None,
    )


def _check_measured(folder: Path) -> None:
    """Steps of every length, of which the longest is computed in halves."""
    site, steps = _site(folder), _STEPS
    found = slice_costs(site, SAMPLE, INT4, Caches(1 << 20), steps, [0.0, 0.0, 0.0])
    assert len(found.slices) == len(steps)
    for half, narrow in found.slices:
        assert (half.attention_bytes, half.feed_forward_bytes) == SAMPLE.part_bytes("half", INT4)
        assert narrow.nbytes <= half.nbytes
        assert min(each.attention_s for each in (half, narrow)) > 0
        assert min(each.feed_forward_s for each in (half, narrow)) > 0
    assert found.run_s > 0
    assert np.isfinite([found.run_s, found.jitter, found.start_s]).all()


def _check_inputs_of_tokens(folder: Path) -> None:
    """In the middle of a model, layers that need the embedding of each token."""
    sample = weights_sample(shared_keys_spec(), INT4, 64 << 20)
    for width in _WIDTHS:
        loaded = LoadedSample(_site(folder), sample, width, INT4)
        assert min(loaded.seconds(step) for step in _STEPS) > 0
        loaded.close()


ROOT = Path(__file__).parents[3]

RUN_S = 2e-5
LAYER_BYTES = 11_000_000


def times(part: float, byte_s: float, attention_s: float, feed_forward_s: float) -> SliceTimes:
    """A slice that takes just so long."""
    attention_bytes, feed_forward_bytes = int(2_000_000 * part), int(9_000_000 * part)
    return SliceTimes(
        attention_bytes=attention_bytes,
        feed_forward_bytes=feed_forward_bytes,
        attention_s=RUN_S + attention_s + attention_bytes * byte_s,
        feed_forward_s=RUN_S + feed_forward_s + feed_forward_bytes * byte_s,
    )


micro = st.floats(0, 2e-4)


@given(st.floats(1e-11, 1e-9), micro, micro)
def test_two_slices_tell_bytes_from_what_is_fixed(
    byte_s: float, attention_s: float, feed_forward_s: float
) -> None:
    half, narrow = (times(part, byte_s, attention_s, feed_forward_s) for part in (1 / 2, 1 / 8))
    whole_s = byte_s + (2 * RUN_S + attention_s + feed_forward_s) / LAYER_BYTES
    found = byte_and_fixed_s(whole_s, half, narrow, RUN_S, LAYER_BYTES)
    assert found == pytest.approx((byte_s, attention_s, feed_forward_s), rel=1e-6, abs=1e-12)


def test_a_byte_of_a_slice_may_take_longer_than_of_a_whole_layer() -> None:
    """As where a step is computed in halves, but only where layers are split."""
    half, narrow = (times(part, 5e-11, 1e-5, 0.0) for part in (1 / 2, 1 / 8))
    found = byte_and_fixed_s(4e-11, half, narrow, RUN_S, LAYER_BYTES)
    assert found == pytest.approx((5e-11, 1e-5, 0.0), rel=1e-6, abs=1e-12)


def test_slices_as_wide_as_each_other_go_with_the_bytes_of_whole_layers() -> None:
    one = times(1 / 2, 4e-11, 3e-5, 1e-5)
    byte_s, attention_s, feed_forward_s = byte_and_fixed_s(4e-11, one, one, RUN_S, LAYER_BYTES)
    assert 0 < byte_s < 4e-11
    assert (attention_s, feed_forward_s) == pytest.approx((3e-5, 1e-5))


def test_slices_with_as_many_columns_go_with_them_too() -> None:
    """Of few blocks of columns a half is as many as an eighth, and a byte of a head may take 12
    times as long as one of experts."""
    half, narrow = (
        SliceTimes(
            attention_bytes=nbytes,
            attention_s=seconds,
            feed_forward_bytes=16_000_000,
            feed_forward_s=3e-4,
        )
        for nbytes, seconds in ((600_000, 1.9e-4), (370_000, 1.7e-4))
    )
    byte_s, attention_s, feed_forward_s = byte_and_fixed_s(1.7e-11, half, narrow, RUN_S, 33_000_000)
    assert byte_s < 1.7e-11
    assert attention_s == pytest.approx(1.8e-4 - 485_000 * 1.7e-11 - RUN_S)
    assert feed_forward_s == pytest.approx(3e-4 - 16_000_000 * 1.7e-11 - RUN_S)


@given(*[st.floats(1e-6, 1e-2)] * 4, st.floats(1e-12, 1e-8))
def test_noise_makes_nothing_negative(
    one: float, two: float, three: float, four: float, whole_s: float
) -> None:
    half = SliceTimes(
        attention_bytes=1_000_000, feed_forward_bytes=4_500_000, attention_s=one, feed_forward_s=two
    )
    narrow = SliceTimes(
        attention_bytes=250_000, feed_forward_bytes=1_100_000, attention_s=three,
        feed_forward_s=four,
    )  # fmt: skip
    byte_s, *fixed_s = byte_and_fixed_s(whole_s, half, narrow, RUN_S, LAYER_BYTES)
    assert 0 < byte_s <= MOST_OF_WHOLE * whole_s
    assert min(fixed_s) >= 0


def test_halves_of_a_graph_count_together() -> None:
    """Two layers; the last graph follows all sums at once."""
    once = [[1.0, 2.0, 3.0, 4.0, 9.0]]
    assert _whole_parts(once, 4).tolist() == once
    halved = [[0.5, 0.5, 1.0, 1.0, 2.0, 1.0, 1.0, 3.0, 9.0]]
    assert _whole_parts(halved, 4).tolist() == once


def test_the_bytes_of_a_slice_are_those_of_its_plan() -> None:
    widths: tuple[Width, ...] = ("whole", "half", "narrow")
    for width in widths:
        assert SAMPLE.num_layers * sum(SAMPLE.part_bytes(width, INT4)) == SAMPLE.nbytes(width, INT4)


def test_real_slices_are_measured_in_steps_of_every_length(tmp_path: Path) -> None:
    run_module(__name__, tmp_path)


if __name__ == "__main__":
    _check_measured(Path(sys.argv[1]))
    _check_inputs_of_tokens(Path(sys.argv[1]))
