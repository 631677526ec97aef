"""Which format is said to fit, where the one that was asked for does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge import partition
from edge.partition import ClusterSpec, DeviceSpec
from edge.planning.choosing import choose_plan
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.nothing_fits import nothing_fits
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import Dtype

DEMO = Path(__file__).parents[3] / "demos" / "model"
OPTIONS = LoadOptions(dtype="int8", stream="off", context_tokens=16, plan="pipeline")


def device_of(memory_bytes: int) -> ClusterSpec:
    device = DeviceSpec(id="a", name="a", memory_bytes=memory_bytes, threads=1)
    return ClusterSpec(devices=(device,))


def said(checkpoint: Checkpoint, memory_bytes: int) -> str:
    cluster, sizes = device_of(memory_bytes), LoadSizes.of(OPTIONS, checkpoint.spec)
    with pytest.raises(partition.CapacityError) as raised:
        choose_plan(checkpoint, cluster, OPTIONS, sizes)
    return nothing_fits(raised.value, checkpoint, cluster, OPTIONS, sizes)


def least_bytes(checkpoint: Checkpoint, dtype: Dtype, block_size: int | None = None) -> int:
    """Of memory with which there is a plan."""
    low, high = 0, 1 << 30
    options = replace(OPTIONS, dtype=dtype, block_size=block_size)
    sizes = LoadSizes.of(OPTIONS, checkpoint.spec)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            choose_plan(checkpoint, device_of(middle), options, sizes)
            high = middle
        except partition.CapacityError:
            low = middle
    return high


def test_a_format_that_loses_much_is_the_last_remedy_and_says_so() -> None:
    with Checkpoint.open(DEMO) as checkpoint:
        needed = {dtype: least_bytes(checkpoint, dtype) for dtype in ("int4", "int3", "int2")}
        assert needed["int4"] > needed["int3"] > needed["int2"]
        assert "With int4 it would fit." in said(checkpoint, needed["int4"])
        assert "With int3, which makes answers much worse, it would fit." in said(
            checkpoint, needed["int3"]
        )
        assert "With int2, which makes answers much worse, it would fit." in said(
            checkpoint, needed["int2"]
        )
        least = least_bytes(checkpoint, "int2", 128)
        assert least < needed["int2"]
        assert "No smaller dtype would be enough" in said(checkpoint, least - 1)
