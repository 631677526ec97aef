"""Layers in a device's memory, its host's and on disk: budgets are used, and kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.offload.streaming.device_window import previous_use
from edge.partition import WeightTiers, weight_tiers
from edge.partition.fit.weight_tiers import LEAST_STAGING_LAYERS

LAYER_BYTES = 1000


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(layers, streamed, window, host bytes)"""
    layers = draw(st.integers(0, 90))
    return (
        layers,
        draw(st.integers(0, layers)),
        draw(st.integers(2, 4)),
        draw(st.integers(0, 100 * LAYER_BYTES)),
    )


def made(situation: tuple[int, int, int, int]) -> WeightTiers:
    layers, streamed, window, host_bytes = situation
    return weight_tiers(
        layers, streamed=streamed, window=window, layer_bytes=LAYER_BYTES, host_bytes=host_bytes
    )


@given(situations())
def test_every_layer_is_in_one_tier(situation: tuple[int, int, int, int]) -> None:
    layers, streamed, window, _host_bytes = situation
    tiers = made(situation)
    assert tiers.resident + tiers.pinned + tiers.on_disk == layers
    assert min(tiers.resident, tiers.pinned, tiers.on_disk) >= 0
    assert tiers.streamed == (streamed if streamed > window else 0)


@given(situations())
def test_budgets_are_kept_and_used(situation: tuple[int, int, int, int]) -> None:
    layers, streamed, window, host_bytes = situation
    tiers = made(situation)
    assert tiers.resident + tiers.window == min(layers, layers - streamed + window)
    least = LEAST_STAGING_LAYERS * LAYER_BYTES if tiers.on_disk else 0
    assert tiers.host_places * LAYER_BYTES <= max(host_bytes, least)
    if tiers.on_disk:
        assert (tiers.host_places + 1) * LAYER_BYTES > host_bytes, "another would have fit"
        assert tiers.staging >= LEAST_STAGING_LAYERS
    else:
        assert tiers.staging == 0


@given(situations(), st.integers(0, 20 * LAYER_BYTES), st.integers(0, 20))
def test_more_memory_never_brings_more_from_disk(
    situation: tuple[int, int, int, int], more_bytes: int, fewer: int
) -> None:
    layers, streamed, window, host_bytes = situation
    tiers = made(situation)
    assert made((layers, streamed, window, host_bytes + more_bytes)).on_disk <= tiers.on_disk
    assert made((layers, max(0, streamed - fewer), window, host_bytes)).on_disk <= tiers.on_disk


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="3 of 2 layers cannot be streamed"):
        made((2, 3, 2, 0))
    with pytest.raises(ValueError, match="4 layers cannot go through a window of 1"):
        made((4, 4, 1, 0))


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 60))
def test_the_previous_use_of_a_place_is_the_last_one_before(
    extents: int, places: int, number: int
) -> None:
    def place(use: int) -> int:
        return use % extents % places

    found = previous_use(number, extents=extents, places=places)
    before = [use for use in range(number) if place(use) == place(number)]
    assert found == before[-1] if before else found < 0
