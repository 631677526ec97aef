"""Links to who is named by a coordinator: what it learns where nobody of the cluster is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from edge.errors import NetworkError
from edge.membership.membership import Membership, credentials
from edge.peer.dialling import dial
from edge.protocol.topology import Place
from edge.transport import Credentials
from tests.support.transport_listeners import echoing

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
            yield {name: f"127.0.0.1:{each.getsockname()[1]}" for name, each in found.items()} | {
                "without a name": "nowhere.invalid:80"
            }


def test_a_member_learns_nothing_of_ports_where_no_member_is() -> None:
    own = Membership.founded("own")
    neighbour = Membership.founded("neighbour").identity.id

    async def refusal(address: str) -> tuple[str, bool]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        place = Place(name="it", addresses=(address,), device=neighbour)
        with pytest.raises(NetworkError) as caught:
            await dial(place, {}, shown(own), timeout_s=LIMIT_S)
        return str(caught.value), loop.time() - begun_s >= LIMIT_S

    async def scenario() -> None:
        async with addresses() as there:
            told = await asyncio.gather(*map(refusal, there.values()))
        (sentence, took_all) = told[0]
        assert set(told) == {(sentence, True)}, dict(zip(there, told, strict=True))
        assert "cannot link to it: it could not be reached" in sentence
        assert took_all

    asyncio.run(scenario())


def test_an_address_before_the_right_one_tells_nothing_by_its_time() -> None:
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
                (await dial(place, {}, shown(own), timeout_s=LIMIT_S)).close()
                return loop.time() - begun_s >= LIMIT_S

            assert all(await asyncio.gather(*map(takes_all, there.values())))

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
                await dial(place, {}, shown(own))
            with pytest.raises(BlockingIOError):
                listening.accept()

    asyncio.run(scenario())
