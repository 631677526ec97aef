"""Addresses: how they are read, listened on and connected to, and what is said when not."""

import asyncio
import errno
import socket
from ipaddress import IPv6Address

import pytest

from edge.transport import (
    AddressError,
    Channel,
    Listener,
    connect,
    format_address,
    listen,
    listener,
    parse_address,
    parse_number,
)
from tests.support.transport_pairs import refuse_channel, refuse_link


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("laptop.local:4000", "laptop.local", 4000),
        ("127.0.0.1:0", "127.0.0.1", 0),
        (":65535", "", 65535),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_an_address_is_read_and_written(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    ["", "laptop", "laptop:", "laptop:http", "::1:80", "[]:80", "[::1]", "a b:80", "a:65536",
     "a:-1", "a:٣", "a:80\n", "a:000080"],
)  # fmt: skip
def test_what_is_not_an_address_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert f"'{text}' is not an address" in str(caught.value)


def test_what_is_a_number() -> None:
    assert parse_number("[fe80::1%eth0]:80") == (IPv6Address("fe80::1%eth0"), 80)
    for text in ("localhost:80", "127.1:80", ":80", "1.2.3.4"):
        with pytest.raises(AddressError):
            parse_number(text)


def test_no_name_server_is_asked_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for one beside an interface that is not here."""

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("somebody is asked")

    async def scenario() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", asked, raising=False)
        with pytest.raises(AddressError, match="cannot find 'fe80::1%nowhere'"):
            await connect("[fe80::1%nowhere]:4000", credentials=None, hello={})

    asyncio.run(scenario())


async def quiet_listener(address: str) -> Listener:
    return await listen(
        address, credentials=None, hello={}, on_channel=refuse_channel, on_link=refuse_link
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (":4000", "names no host"),
        ("127.0.0.1:0", "names no port"),
        ("nowhere", "is not an address"),
        ("no-such-host.invalid:4000", "cannot find 'no-such-host.invalid'"),
    ],
)
def test_connecting_nowhere_names_cause_and_remedy(address: str, message: str) -> None:
    with pytest.raises(AddressError, match=message) as caught:
        asyncio.run(connect(address, credentials=None, hello={}))
    assert address in str(caught.value)


def test_connecting_to_a_port_without_a_daemon() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens there, nor can
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(AddressError, match="check that Edge is running") as caught:
            asyncio.run(connect(address, credentials=None, hello={}))
    assert address in str(caught.value)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere", "is not an address"),
        ("no-such-host.invalid:0", "cannot find"),
        ("192.0.2.1:0", "no interface of this device"),
    ],
)
def test_listening_nowhere_names_cause_and_remedy(address: str, message: str) -> None:
    with pytest.raises(AddressError, match=message) as caught:
        asyncio.run(quiet_listener(address))
    assert address in str(caught.value)


def test_a_port_in_use_is_said_to_be() -> None:
    async def scenario() -> None:
        listener = await quiet_listener("127.0.0.1:0")
        try:
            with pytest.raises(AddressError, match="choose another port"):
                await quiet_listener(listener.addresses[0])
        finally:
            await listener.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("address", [":0", "0.0.0.0:0", "localhost:0", "127.0.0.1:0", "[::1]:0"])
def test_every_form_of_address_can_be_listened_on(address: str) -> None:
    async def scenario() -> None:
        seen: asyncio.Queue[Channel] = asyncio.Queue()
        try:
            listener = await listen(
                address, credentials=None, hello={}, on_channel=seen.put, on_link=refuse_link
            )
        except AddressError as error:
            if address.startswith("[") and "no interface of this device" in str(error):
                pytest.skip("this device has no IPv6")
            raise
        try:
            host = "[::1]" if address.startswith("[") else "127.0.0.1"
            assert all(one.endswith(f":{listener.port}") for one in listener.addresses)
            ours = await connect(f"{host}:{listener.port}", credentials=None, hello={})
            theirs = await seen.get()
            await ours.aclose()
            await theirs.aclose()
        finally:
            await listener.aclose()

    asyncio.run(scenario())


def test_without_a_host_both_versions_of_ip_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port that the system chose for one may be taken for the other: another is tried."""
    bind, bound = listener._bind, []

    def first_is_taken(family: int, place: tuple[object, ...]) -> socket.socket:
        bound.append(family)
        if bound == [socket.AF_INET, socket.AF_INET6]:
            raise OSError(errno.EADDRINUSE, "taken")
        return bind(family, place)

    monkeypatch.setattr(listener, "_bind", first_is_taken)

    async def scenario() -> None:
        found = await quiet_listener(":0")
        try:
            hosts = {parse_address(each) for each in found.addresses}
            assert ("0.0.0.0", found.port) in hosts
            assert hosts <= {("0.0.0.0", found.port), ("::", found.port)}
            assert bound == 2 * [socket.AF_INET, socket.AF_INET6]
            with pytest.raises(AddressError, match="choose another port"):
                await quiet_listener(f":{found.port}")
        finally:
            await found.aclose()

    asyncio.run(scenario())
