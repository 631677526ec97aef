"""The benchmark of layers that stream into a GPU runs through, on a small shape, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.backends.registry import open_backend
from edge.demos.bench.gpu_stream import SPEC, Halves, decoding
from tests.support.specs import changed, shape
from tests.support.triton_face import only_interpreted

SMALL = changed(
    SPEC, num_layers=4, hidden_size=128, num_heads=2, num_kv_heads=1, head_size=64,
    ffn_columns=256, vocab_size=60,
    inverse_frequencies=shape(SPEC).rotary.inverse_frequencies[:32],
)  # fmt: skip


def test_the_full_case_streams_what_the_gpu_has_no_room_for() -> None:
    assert Halves().streamed == 26, "24 places: 22 that stay, and a window of 2"


@pytest.mark.parametrize(("host_layers", "on_disk"), [(4, 0), (0, 4)])
def test_a_small_case_runs_through(host_layers: int, on_disk: int, tmp_path: Path) -> None:
    only_interpreted()
    case = Halves(spec=SMALL, device_layers=2, host_layers=host_layers, warm_ups=1, steps=2)
    speed, share = decoding(case, open_backend("triton", threads=1), tmp_path, copy_rate=1e9)
    assert speed.name.endswith(f"{4 - on_disk} pinned, {on_disk} on disk, speed")
    assert len(speed.values) == len(share.values) == 2
    assert min(*speed.values, *share.values) > 0
