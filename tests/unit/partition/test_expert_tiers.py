"""What of layers with experts is in memory, and what a step reads of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.partition.plan.expert_tiers import (
    WINDOW_LAYERS,
    LayerBytes,
    expert_tiers,
    held_bytes,
    read_bytes,
)

PLAIN = LayerBytes(others=50)
SPARSE = LayerBytes(others=10, experts=160, num_experts=16, top_k=2)

layer = st.builds(
    lambda others, expert, count, top_k: LayerBytes(
        others=others,
        experts=expert * count,
        num_experts=count if expert else 0,
        top_k=min(top_k, count) if expert else 0,
    ),
    others=st.integers(1, 100),
    expert=st.integers(0, 50),
    count=st.integers(1, 16),
    top_k=st.integers(1, 16),
)


@given(layers=st.lists(layer, min_size=1, max_size=9), data=st.data())
def test_no_more_is_held_than_layers_from_disk_leave(
    layers: list[LayerBytes], data: st.DataObject
) -> None:
    streamed = data.draw(st.integers(0, len(layers)))
    held, tiers = held_bytes(layers, streamed), expert_tiers(layers, streamed)
    largest = max(each.others for each in layers)
    turns = tiers.streamed > WINDOW_LAYERS
    others = (WINDOW_LAYERS + len(layers) - tiers.streamed) * largest
    if not turns:
        others = sum(each.others for each in layers)
    if any(each.experts for each in layers):
        assert others + tiers.cache_bytes <= held
        if turns:
            assert tiers.cache_bytes >= max(each.experts for each in layers)
    read = read_bytes(layers, streamed, rows=3)
    assert all(nbytes >= 0 for nbytes in read)
    assert sum(read) <= sum(each.total for each in layers)


def test_the_rest_of_the_layers_comes_first() -> None:
    layers = [SPARSE] * 20
    tiers = expert_tiers(layers, 20)
    assert tiers.streamed == 0
    assert tiers.cache_bytes == 2 * 170 - 20 * 10


def test_where_it_does_not_fit_it_takes_turns() -> None:
    layers = [SPARSE] * 40
    tiers = expert_tiers(layers, 40)
    assert tiers.streamed == 40 - (340 - 160 - 20) // 10
    assert tiers.cache_bytes == 160


def test_layers_without_experts_are_read_whole() -> None:
    assert read_bytes([PLAIN] * 8, 6, rows=1) == (6 * 50, 0)


def test_a_token_reads_what_it_goes_through_and_is_not_there() -> None:
    """Experts in memory: 700 of 1,600 bytes. A token goes through 20 bytes of each layer."""
    others, experts = read_bytes([SPARSE] * 10, 7, rows=1)
    cached = expert_tiers([SPARSE] * 10, 7).cache_bytes
    assert cached == 5 * 170 - 10 * 10
    assert others == 0
    assert experts == pytest.approx((1 - cached / 1600) * 10 * 20)


def test_many_rows_go_through_nearly_all_of_them() -> None:
    _others, few = read_bytes([SPARSE] * 10, 7, rows=1)
    _others, many = read_bytes([SPARSE] * 10, 7, rows=64)
    assert many == pytest.approx(8 * few, rel=0.01)
