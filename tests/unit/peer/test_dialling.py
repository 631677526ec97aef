"""Links to who is named by a coordinator: what it learns where nobody of the cluster is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from edge.errors import NetworkError
from edge.membership.membership import Membership, credentials
from edge.peer import dialling
from edge.peer.dialling import dial
from edge.protocol.topology import Place
from edge.transport import Credentials, Link
from tests.support.passing_time import let_pass
from tests.support.transport_pairs import echoing

LIMIT_S = 0.3


def shown(membership: Membership) -> Credentials:
    return credentials(lambda: membership)


@contextlib.asynccontextmanager
async def addresses() -> AsyncIterator[dict[str, str]]:
    """What a port may be, and where."""

    async def banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await reader.read()
        writer.close()

    async def hangs_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))
        talking = await asyncio.start_server(banner, "127.0.0.1", 0)
        ending = await asyncio.start_server(hangs_up, "127.0.0.1", 0)
        async with talking, ending:
            found = {
                "closed": closed,
                "silent": silent,
                "of another program": talking.sockets[0],
                "hung up": ending.sockets[0],
            }
            yield {name: f"127.0.0.1:{each.getsockname()[1]}" for name, each in found.items()}


def test_a_member_learns_nothing_of_ports_where_no_member_is() -> None:
    own = Membership.founded("own")
    neighbour = Membership.founded("neighbour").identity.id

    async def refusal(address: str) -> tuple[str, bool]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        place = Place(name="it", addresses=(address,), device=neighbour)
        with pytest.raises(NetworkError) as caught:
            await dial(place, {}, shown(own), {}, timeout_s=LIMIT_S)
        return str(caught.value), loop.time() - begun_s >= LIMIT_S

    async def scenario() -> None:
        async with addresses() as there:
            told = await asyncio.gather(*map(refusal, there.values()))
        (sentence, took_all) = told[0]
        assert set(told) == {(sentence, True)}, dict(zip(there, told, strict=True))
        assert "cannot link to it: it could not be reached" in sentence
        assert took_all

    asyncio.run(scenario())


def test_an_address_before_the_right_one_tells_nothing_by_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine too slow for the moment that each has asks again, with time enough."""
    monkeypatch.setattr(dialling, "_QUICK_S", LIMIT_S)
    own = Membership.founded("own")
    assert own.authority is not None
    neighbour = Membership.enrolled(own.authority, own.tag_key, "neighbour")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with echoing(credentials=shown(neighbour)) as listener, addresses() as there:

            async def takes_all(first: str) -> bool:
                place = Place(
                    name="it", addresses=(first, *listener.addresses), device=neighbour.identity.id
                )
                begun_s = loop.time()
                (await dial(place, {}, shown(own), {}, timeout_s=20)).close()
                return loop.time() - begun_s >= LIMIT_S

            assert all(await asyncio.gather(*map(takes_all, there.values())))

    asyncio.run(scenario())


def test_dead_addresses_of_a_neighbour_cost_their_time_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialling, "_QUICK_S", 60.0)
    own = Membership.founded("own")
    assert own.authority is not None
    neighbour = Membership.enrolled(own.authority, own.tag_key, "neighbour")
    id, asked = neighbour.identity.id, [0]
    reached: dict[str, str] = {}

    async def ends(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked[0] += 1
        writer.close()
        let_pass(60)  # all of its time: the right one has as much, however slow this machine is

    async def keep(link: Link, _hello: Mapping[str, Any]) -> None:
        link.close()

    async def scenario() -> None:
        dead = await asyncio.start_server(ends, "127.0.0.1", 0)
        async with dead, echoing(credentials=shown(neighbour), on_link=keep) as listener:
            (right,) = listener.addresses
            wrong = f"127.0.0.1:{dead.sockets[0].getsockname()[1]}"
            for _ in range(3):
                place = Place(name="it", addresses=(wrong, right), device=id)
                (await dial(place, {}, shown(own), reached, timeout_s=60)).close()
                assert asked == [1]
                assert reached == {id: right}

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def busy_at_first(address: str) -> AsyncIterator[tuple[str, list[int]]]:
    """Where the first who comes hears nothing, and the others are put through to `address`; and
    how many have come."""
    host, port = address.split(":")
    came = [0]

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(1 << 16):
            writer.write(content)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came[0] += 1
        if came[0] == 1:
            await reader.read()
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", came


def test_a_neighbour_that_is_slow_at_first_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several addresses has a moment, and where none answered in it the whole time."""
    monkeypatch.setattr(dialling, "_QUICK_S", 0.05)
    own = Membership.founded("own")
    assert own.authority is not None
    neighbour = Membership.enrolled(own.authority, own.tag_key, "neighbour")

    async def scenario() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            dead = f"127.0.0.1:{closed.getsockname()[1]}"
            async with (
                echoing(credentials=shown(neighbour), on_link=keep) as listener,
                busy_at_first(listener.addresses[0]) as (slow, came),
            ):
                place = Place(name="it", addresses=(slow, dead), device=neighbour.identity.id)
                (await dial(place, {}, shown(own), {}, timeout_s=60)).close()
                assert came == [2]

    async def keep(link: Link, _hello: Mapping[str, Any]) -> None:
        link.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("device", [None, "expelled"])
def test_who_can_be_no_member_is_not_dialled(device: str | None) -> None:
    own = Membership.founded("own")
    assert own.authority is not None
    other = Membership.enrolled(own.authority, own.tag_key, "other")
    own = own.expelling(other.identity.id)
    named = device and other.identity.id

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            place = Place(
                name="it", addresses=(f"127.0.0.1:{listening.getsockname()[1]}",), device=named
            )
            with pytest.raises(NetworkError, match="no device of this cluster"):
                await dial(place, {}, shown(own), {})
            with pytest.raises(BlockingIOError):
                listening.accept()

    asyncio.run(scenario())
