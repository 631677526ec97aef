"""What of layers with experts is in memory, and what a step reads of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.partition.plan.expert_tiers import (
    PLACE_BYTES,
    WINDOW_LAYERS,
    LayerBytes,
    expert_bytes,
    expert_tiers,
    held_bytes,
    read_bytes,
)

PLAIN = LayerBytes(others=50)
UNIT = 10 * PLACE_BYTES
"""Of what layers and experts take."""
SPARSE = LayerBytes(others=10 * UNIT, experts=320 * UNIT, num_experts=32, top_k=2)
LEAST = 16 * (10 * UNIT + PLACE_BYTES)
"""Experts that there is room for at least."""

layer = st.builds(
    lambda others, expert, count, top_k: LayerBytes(
        others=others,
        experts=expert * count,
        num_experts=count if expert else 0,
        top_k=min(top_k, count) if expert else 0,
    ),
    others=st.integers(1, 100 * PLACE_BYTES),
    expert=st.integers(0, 50 * PLACE_BYTES),
    count=st.integers(1, 40),
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
        if streamed:
            assert tiers.cache_bytes >= max(each.least_experts for each in layers)
    read = read_bytes(layers, streamed, rows=3)
    assert all(nbytes >= 0 for nbytes in read)
    assert sum(read) <= sum(each.total for each in layers)
    assert held_bytes(layers, streamed, is_whole=True) <= sum(each.total for each in layers)
    if not any(each.experts for each in layers):
        assert held == held_bytes(layers, streamed, is_whole=True)


@given(layers=st.lists(layer, min_size=1, max_size=9), data=st.data())
def test_with_more_layers_on_disk_no_more_is_held(
    layers: list[LayerBytes], data: st.DataObject
) -> None:
    fewer = data.draw(st.integers(1, len(layers)))
    more = data.draw(st.integers(fewer, len(layers)))
    assert held_bytes(layers, more) <= held_bytes(layers, fewer)


@given(layers=st.lists(layer, min_size=1, max_size=9), data=st.data())
def test_what_is_spare_holds_experts_and_no_more_than_all(
    layers: list[LayerBytes], data: st.DataObject
) -> None:
    streamed = data.draw(st.integers(1, len(layers)))
    spare_bytes = data.draw(st.integers(0, 2000 * PLACE_BYTES))
    held = held_bytes(layers, streamed)
    more = held_bytes(layers, streamed, spare_bytes=spare_bytes)
    tiers = expert_tiers(layers, streamed, spare_bytes=spare_bytes)
    if any(each.experts for each in layers):
        everything = sum(each.others + each.placed_experts for each in layers)
        assert more == min(held + spare_bytes, max(held, everything))
        assert tiers.streamed <= expert_tiers(layers, streamed).streamed
        assert sum(read_bytes(layers, streamed, rows=3, spare_bytes=spare_bytes)) <= sum(
            read_bytes(layers, streamed, rows=3)
        )
    else:
        assert more == held
        assert tiers == expert_tiers(layers, streamed)
    whole = held_bytes(layers, streamed, is_whole=True)
    assert held_bytes(layers, streamed, is_whole=True, spare_bytes=spare_bytes) == whole


def test_an_expert_takes_its_place_with_it() -> None:
    layers = [SPARSE] * 20
    of_one = expert_bytes([PLAIN, *layers])
    assert of_one == 10 * UNIT + PLACE_BYTES
    one, two = (expert_tiers(layers, 19, spare_bytes=count * of_one) for count in (0, 1))
    assert two.cache_bytes - one.cache_bytes == of_one
    assert expert_bytes([PLAIN]) == 0


def test_the_rest_of_the_layers_comes_first() -> None:
    layers = [SPARSE] * 20
    tiers = expert_tiers(layers, 19)
    assert tiers.streamed == 0
    assert tiers.cache_bytes == LEAST + (2 * 10 + 330 - 20 * 10) * UNIT


def test_where_it_does_not_fit_it_takes_turns() -> None:
    layers = [SPARSE] * 40
    tiers = expert_tiers(layers, 39)
    assert tiers.streamed == 40 - 33
    assert tiers.cache_bytes == LEAST


def test_few_experts_of_a_layer_need_room_at_once() -> None:
    assert held_bytes([SPARSE] * 20, 20) == 2 * 10 * UNIT + LEAST
    assert held_bytes([SPARSE] * 20, 20, is_whole=True) == 2 * 330 * UNIT
    many = LayerBytes(others=1, experts=100, num_experts=100, top_k=20)
    assert many.least_experts == 40 * (1 + PLACE_BYTES)


def test_layers_without_experts_are_read_whole() -> None:
    assert read_bytes([PLAIN] * 8, 6, rows=1) == (6 * 50, 0)


def test_a_token_reads_what_it_goes_through_and_is_not_there() -> None:
    """It goes through two of 32 in each layer."""
    others, experts = read_bytes([SPARSE] * 10, 7, rows=1)
    cached = expert_tiers([SPARSE] * 10, 7).cache_bytes
    assert cached == LEAST + (2 * 10 + 3 * 330 - 10 * 10) * UNIT
    assert others == 0
    missing = 1 - cached / (10 * (320 * UNIT + 32 * PLACE_BYTES))
    assert experts == pytest.approx(missing * 10 * 20 * UNIT)


def test_many_rows_go_through_nearly_all_of_them() -> None:
    _others, few = read_bytes([SPARSE] * 10, 7, rows=1)
    _others, many = read_bytes([SPARSE] * 10, 7, rows=64)
    assert many == pytest.approx(16 * few, rel=0.02)
