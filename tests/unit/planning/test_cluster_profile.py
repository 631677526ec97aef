"""Of peers that are set up alike, two are measured: what one is to blame for, all were said by."""

from __future__ import annotations

from dataclasses import replace

from edge.planning.cluster_profile import set_up_like
from tests.unit.protocol.test_places import peer


def test_the_peers_whose_measurements_stand_for_one() -> None:
    first, second, third = (
        peer(name, f"127.0.0.1:{port}") for name, port in zip("abc", "567", strict=True)
    )
    slower = replace(peer("d", "127.0.0.1:8"), identity="another")
    elsewhere = replace(peer("e", "10.0.0.2:9"), host="elsewhere")
    peers = (first, second, third, slower, elsewhere)
    assert set_up_like([third.id], peers) == [first, second, third]
    assert set_up_like([slower.id, elsewhere.id], peers) == [slower, elsewhere]
    assert set_up_like([], peers) == []
