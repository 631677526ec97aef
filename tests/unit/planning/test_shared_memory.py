"""Several daemons of one machine or control group: each tells all that is free."""

from __future__ import annotations

import pytest

from edge.partition import ClusterSpec
from edge.planning.shared_memory import sharing, with_memory_divided
from tests.support.peer_infos import peer_info

MIB = 1 << 20


def test_peers_of_one_pool_share_what_is_free_in_it() -> None:
    pooled = [peer_info(name, memory_pool="m", pool_free_bytes=9) for name in "ab"]
    others = [peer_info("c", memory_pool="n"), peer_info("d"), peer_info("e")]
    assert list(sharing([*pooled, *others])) == [(pooled, 9)]


@pytest.mark.parametrize(
    ("planned", "divided"),
    [
        ({"a": 600}, None),
        ({"a": 300, "b": 300}, None),
        ({"a": 300, "far": 600}, None),
        ({"a": 500, "b": 500}, [289, 289, 289, 800]),
        ({"a": 290, "b": 290, "c": 300}, [289, 289, 289, 800]),
    ],
)
def test_a_plan_that_takes_it_twice_gets_parts(
    planned: dict[str, int], divided: list[int] | None
) -> None:
    """900 MiB are free for three daemons, of which each offers 800, and steps take 11."""
    peers = [
        peer_info(name, memory_pool="m", pool_free_bytes=900 * MIB, free_bytes=800 * MIB)
        for name in "abc"
    ]
    peers.append(peer_info("far", memory_pool="n", pool_free_bytes=900 * MIB, free_bytes=800 * MIB))
    cluster = ClusterSpec(devices=tuple(peer.device() for peer in peers))
    found = with_memory_divided(
        cluster,
        peers,
        {name: size * MIB for name, size in planned.items()},
        {peer.id: 11 * MIB for peer in peers},
    )
    sizes = found and [device.memory_bytes // MIB for device in found.devices]
    assert sizes == divided
