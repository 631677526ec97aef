"""When a search for peers ends: by who was found, and by a clock that only the test moves on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

import edge
from edge import transport
from edge.errors import EdgeError
from edge.membership.membership import Change, Membership, credentials
from edge.membership.roles import USE
from edge.protocol import announced_peers, discovery
from edge.protocol.discovery import (
    MISSING_S,
    SETTLE_S,
    _reach_all,
    browse,
    find_peers,
    watch_peers,
)
from edge.protocol.peer_info import PeerInfo, describe_all, describe_peer, expulsion
from edge.transport import DiscoveryBus, MemoryDiscovery, PeerRecord
from tests.support.members import Kept
from tests.support.null_peers import null_peers
from tests.support.passing_time import let_pass, somebody_waits_for
from tests.support.transport_pairs import Silent, run


def announced(name: str, *addresses: str) -> PeerRecord:
    return PeerRecord(id=name, name=name, cluster="default", addresses=addresses)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_it_goes_on_until_enough_are_found_and_then_for_a_moment() -> None:
    async def look() -> list[str]:
        bus = DiscoveryBus()
        ours, theirs = (MemoryDiscovery(bus, cluster="c") for _ in range(2))
        searching = asyncio.create_task(browse(ours, timeout_s=1e9, at_least=2))
        for name in ("first", "second", "third"):
            assert not searching.done()
            await theirs.announce(
                PeerRecord(id=name, name=name, cluster="c", addresses=("127.0.0.1:5",))
            )
            await turns(20)
            if name == "first":
                let_pass(1000 * SETTLE_S)
                await turns(20)
        let_pass(2 * SETTLE_S)
        found = await searching
        await asyncio.gather(ours.aclose(), theirs.aclose())
        return [record.name for record in found]

    assert asyncio.run(look()) == ["first", "second", "third"]


def test_it_ends_in_time_with_fewer_or_none() -> None:
    async def look() -> int:
        looking = MemoryDiscovery(DiscoveryBus(), cluster="c")
        searching = asyncio.create_task(browse(looking, timeout_s=1e6, at_least=2))
        await turns(5)
        let_pass(1e6)
        found = await searching
        await looking.aclose()
        return len(found)

    assert asyncio.run(look()) == 0


def test_a_peer_is_left_out_of_which_another_one_tells_that_it_was_expelled(tmp_path: Path) -> None:
    """By whoever looks for peers and was away meanwhile."""
    attic = Membership.founded("attic")
    assert attic.authority is not None
    cellar, phone = (
        Membership.enrolled(attic.authority, attic.tag_key, name) for name in ("cellar", "phone")
    )
    attic = attic.expelling(cellar.identity.id)

    def hear(change: Change) -> None:
        nonlocal phone
        phone = change(phone)

    async def scenario() -> None:
        shown = credentials(lambda: phone, hear)
        async with (
            null_peers(tmp_path / "a", 1, membership=attic) as (knowing,),
            null_peers(tmp_path / "c", 1, membership=cellar) as (expelled,),
        ):
            addresses = [each.resources.addresses[0] for each in (expelled, knowing)]
            peer, other = [await describe_peer(each, shown) for each in addresses]
            assert "has been expelled" in str(expulsion(peer))
            assert expulsion(other) is None
            found, failures = await describe_all(dict.fromkeys(addresses, shown))
            assert [each.address for each in found] == addresses[1:]
            assert "has been expelled" in str(failures[addresses[0]])

    asyncio.run(scenario())


def test_addresses_that_do_not_answer_hold_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer is in several networks, of which this device is in one."""
    monkeypatch.setattr(discovery, "ASKED_WITHIN_S", 1e9)
    monkeypatch.setattr(announced_peers, "NEXT_AFTER_S", 0)

    async def scenario() -> None:
        silent = Silent()
        async with (
            silent.listening() as nothing,
            null_peers(tmp_path, 1) as (daemon,),
        ):
            (there,) = daemon.resources.addresses
            record = announced(daemon.resources.id, *[nothing] * 7, there)
            (found,) = await _reach_all([record], None)
            assert isinstance(found, PeerInfo)
            assert found.address == there
            assert silent.calls.qsize() == 7

    run(scenario)


def test_the_first_address_is_taken_where_the_announced_one_answers_and_the_last_error_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several devices may have one address, as of a bridge of containers."""
    monkeypatch.setattr(announced_peers, "NEXT_AFTER_S", 1e9)

    async def scenario() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            refusing = f"127.0.0.1:{closed.getsockname()[1]}"
            await ask(refusing)

    async def ask(refusing: str) -> None:
        async with null_peers(tmp_path, 2) as daemons:
            one, other = (daemon.resources.addresses[0] for daemon in daemons)
            id = daemons[1].resources.id
            asked = [
                announced(id, refusing, one, other),
                announced("attic", one),
                announced("cellar", refusing),
                announced("nowhere"),
            ]
            found, elsewhere, failed, nowhere = await _reach_all(asked, None)
        assert isinstance(found, PeerInfo)
        assert (found.id, found.address) == (id, other)
        assert f"another peer answers at {one}" in str(elsewhere)
        assert refusing in str(failed)
        assert "announces no address" in str(nowhere)

    run(scenario)


@pytest.mark.parametrize("comes", [True, False])
def test_a_paired_device_that_answers_late_is_waited_for(
    comes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = DiscoveryBus()
    monkeypatch.setattr(
        transport, "ZeroconfDiscovery", lambda **_: MemoryDiscovery(bus, cluster="default")
    )
    attic = Kept.founded()
    kitchen, cellar = (attic.taking_in(name).membership for name in ("kitchen", "cellar"))
    attic.taking_in("phone", roles=[USE])

    async def scenario() -> None:
        async with null_peers(tmp_path / "c", 1, membership=cellar, announce=True) as daemons:
            looking = asyncio.create_task(
                find_peers(
                    "default",
                    credentials(attic.current),
                    timeout_s=1e9,
                    interfaces=None,
                    expected=attic.current().lenders,
                )
            )
            while not somebody_waits_for(SETTLE_S):  # noqa: ASYNC110
                await asyncio.sleep(0)
            let_pass(SETTLE_S)
            while not somebody_waits_for(MISSING_S):  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert not looking.done()
            async with contextlib.AsyncExitStack() as stack:
                if comes:
                    later = null_peers(tmp_path / "k", 1, membership=kitchen, announce=True)
                    daemons += await stack.enter_async_context(later)
                else:
                    let_pass(MISSING_S)
                found, _ = await looking
            assert {peer.id for peer in found} == {daemon.resources.id for daemon in daemons}

    assert set(attic.current().lenders.values()) == {"kitchen", "cellar"}
    run(scenario)


def test_a_peer_in_use_hides_no_other_one_that_has_one_of_its_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = DiscoveryBus()
    monkeypatch.setattr(
        transport, "ZeroconfDiscovery", lambda **_: MemoryDiscovery(bus, cluster="default")
    )

    async def scenario() -> None:
        announcing = MemoryDiscovery(bus, cluster="default")
        async with null_peers(tmp_path, 2) as daemons:
            one, other = [await describe_peer(d.resources.addresses[0], None) for d in daemons]
            await announcing.announce(announced(one.id, one.address, "[fe80::1%lan]:7"))
            await announcing.announce(announced(other.id, one.address, other.address))
            looks = watch_peers("default", None, interfaces=None, every_s=1e9, used=lambda: [one])
            async with contextlib.aclosing(looks):
                async for look in looks:
                    if look.peers:
                        break
            assert [peer.id for peer in look.peers] == [other.id]
        await announcing.aclose()

    run(scenario)


def test_so_many_peers_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a token can announce a thousand that do not answer."""
    monkeypatch.setattr(discovery, "ASKED_WITHIN_S", 1e9)
    monkeypatch.setattr(discovery, "MOST_AT_ONCE", 2)

    async def scenario() -> None:
        silent = Silent()
        async with silent.listening() as nothing:
            asked = [announced(str(number), nothing) for number in range(4)]
            looking = asyncio.create_task(_reach_all(asked, None))
            for _ in range(2):
                called = [await silent.calls.get() for _ in range(2)]
                await turns(20)
                assert silent.calls.empty()
                for writer in called:
                    writer.close()
            assert all(isinstance(each, EdgeError) for each in await looking)

    run(scenario)


@pytest.mark.parametrize("count", [0, -1, True, "2"])
def test_a_number_of_peers_that_cannot_be(count: object) -> None:
    with pytest.raises(edge.RequestError, match="at_least must be a whole number of 1 or more"):
        edge.Cluster.discover(at_least=count)  # type: ignore[arg-type]
