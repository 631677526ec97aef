"""Which devices read pictures, and how long that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.memory.tower_memory import tower_use
from edge.models.towers.part import TowerPart
from edge.planning.tower_place import (
    divided,
    parts_seconds,
    place_in_words,
    reading_order,
    tile_seconds,
    tower_rates,
)
from edge.protocol.peer_info import PeerInfo
from edge.weights.formats import weight_format
from tests.support.peer_infos import peer_info
from tests.unit.models.test_towers import made
from tests.unit.partition.test_plan_streaming import RATES
from tests.unit.planning.test_streaming_sentence import proposal

TOWER = replace(made("qwen2_5_vl"), max_patches=16)  # so that layers are most of it
FORMAT = weight_format(TOWER.encoder, "float32")
WHOLE = TowerPart.whole(TOWER)
NEED = tower_use(WHOLE, FORMAT).total


def names(peers: list[PeerInfo]) -> str:
    return "".join(peer.name for peer in peers)


@pytest.mark.parametrize(
    ("seconds", "order"),
    [
        ({}, "cba"),  # not measured: those outside the plan, by memory
        ({"a": 1.0, "b": 2.0}, "cba"),
        ({"a": 1.0, "b": 2.0, "c": 4.0}, "abc"),
        ({"a": 1.1, "b": 2.0, "c": 4.0}, "bac"),
        ({"a": 9.0, "b": 2.0, "c": 1.0}, "cba"),
    ],
)
def test_a_device_of_the_plan_reads_if_it_is_twice_as_fast(
    seconds: dict[str, float], order: str
) -> None:
    peers = [peer_info(name, free_bytes=ord(name)) for name in "bca"]
    assert names(reading_order(peers, {"a"}, seconds)) == order


def test_a_device_that_leaves_reads_nothing() -> None:
    assert not reading_order([replace(peer_info("a"), is_leaving=True)], (), {})


def test_a_tower_is_cut_over_as_few_devices_as_have_room() -> None:
    first, two, middle, last = (
        tower_use(TowerPart(tower=TOWER, layers=layers), FORMAT).total
        for layers in (range(1), range(2), range(1, 2), range(2, 3))
    )

    def cuts(**rooms: int) -> dict[str, range] | None:
        found = divided(TOWER, FORMAT, rooms)
        return None if found is None else {device: part.layers for device, part in found}

    assert cuts(a=NEED, b=NEED) == {"a": range(3)}
    assert cuts(a=two, b=last, c=NEED - 1) == {"a": range(2), "b": range(2, 3)}
    assert cuts(a=first, b=NEED - 1, c=NEED - 1) == {"a": range(1), "b": range(1, 3)}
    assert cuts(a=0, b=two, c=last) == {"b": range(2), "c": range(2, 3)}
    assert cuts(a=first, b=middle, c=last) == {"a": range(1), "b": range(1, 2), "c": range(2, 3)}
    assert cuts(a=0, b=NEED - 1, c=0) is None
    assert cuts() is None
    deep = made("qwen3_vl")
    assert divided(deep, FORMAT, {"a": 1 << 40, "b": 1 << 40}) is None


def test_seconds_of_parts_are_those_of_the_whole() -> None:
    patches = TOWER.max_patches
    parts = divided(TOWER, FORMAT, {"a": NEED - 1, "b": NEED - 1})
    assert parts is not None
    whole_s = tile_seconds(WHOLE, FORMAT, RATES, patches)
    both = parts_seconds(parts, FORMAT, {"a": RATES, "b": RATES}, patches)
    assert both == pytest.approx(whole_s)
    assert parts_seconds(parts, FORMAT, {"a": RATES}, patches) is None
    assert 0 < tile_seconds(WHOLE, FORMAT, RATES, patches // 4) < whole_s


def test_rates_of_a_gpu_are_not_those_of_its_processor() -> None:
    plan = proposal(1 << 20, peers=2)
    peers = [peer_info("a"), peer_info("b", backend="triton"), peer_info("c")]
    assert tower_rates(plan, peers) == {"a": RATES}


def test_the_place_is_told() -> None:
    plan = proposal(1 << 20)
    taken = plan.rows[0].memory.total
    a, b = peer_info("a", free_bytes=taken + NEED - 1), peer_info("b", free_bytes=NEED)
    assert place_in_words(TOWER, FORMAT, plan, [a, b]).startswith("pictures are read on b, which")
    cut = place_in_words(TOWER, FORMAT, plan, [a, replace(b, free_now_bytes=NEED - 1)])
    assert cut.startswith("what reads pictures fits on no single device and is cut over 2: b with")
    assert "of 3 layers, a with" in cut
    assert place_in_words(TOWER, FORMAT, plan, [a]).endswith("are refused")
    alone = place_in_words(TOWER, FORMAT, plan, [replace(a, free_now_bytes=taken + NEED)])
    assert alone.startswith("pictures are read on a, beside a part of the plan")
    assert alone.endswith(" s for the largest")
