"""Peers that call themselves alike, told apart."""

from __future__ import annotations

from edge.protocol.peer_info import PeerInfo, with_unique_names
from tests.support.peer_infos import peer_info


def peer(id: str, name: str) -> PeerInfo:
    return peer_info(name, id=id)


def names(*peers: PeerInfo) -> list[str]:
    return [each.name for each in peers]


def test_names_that_are_unique_stay() -> None:
    assert names(*with_unique_names([peer("b", "desk"), peer("a", "attic")])) == ["desk", "attic"]


def test_the_least_id_keeps_the_name_and_the_order_stays() -> None:
    found = with_unique_names([peer("c", "vm"), peer("a", "vm"), peer("b", "vm")])
    assert names(*found) == ["vm-3", "vm", "vm-2"]
    assert [each.own_name for each in found] == ["vm", "vm", "vm"]


def test_a_number_that_another_one_calls_itself_by_is_not_given_twice() -> None:
    found = with_unique_names([peer("a", "vm"), peer("b", "vm"), peer("c", "vm-2")])
    assert names(*found) == ["vm", "vm-3", "vm-2"]
    found = with_unique_names([peer("a", "vm-2"), peer("b", "vm-2"), peer("c", "vm")])
    assert names(*found) == ["vm-2", "vm-2-2", "vm"]


def test_who_is_known_keeps_its_name_when_others_go_and_come() -> None:
    known = with_unique_names([peer("a", "vm"), peer("b", "vm")])
    assert names(*with_unique_names([peer("b", "vm")], known)) == ["vm-2"]
    assert names(*with_unique_names([peer("b", "vm"), peer("0", "vm")], known)) == ["vm-2", "vm"]
    assert names(*with_unique_names(known, known)) == ["vm", "vm-2"]


def test_daemons_of_one_device_that_change_ids_keep_their_own_names() -> None:
    known = with_unique_names([peer("a", "left"), peer("b", "right")])
    assert names(*with_unique_names([peer("b", "left"), peer("a", "right")], known)) == [
        "left",
        "right",
    ]


def test_alone_it_is_called_as_it_calls_itself() -> None:
    (found,) = with_unique_names([peer_info("vm-2", own_name="vm")])
    assert found.name == "vm"
