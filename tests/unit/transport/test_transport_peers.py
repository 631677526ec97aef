"""Peers and their records: what is merged, what is announced, what of a stranger is believed."""

import asyncio
import hashlib
import hmac
import socket
import uuid
from collections.abc import Mapping

import pytest
from zeroconf import NotRunningException
from zeroconf._logger import QuietLogger
from zeroconf._protocol.incoming import DNSIncoming
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from edge.transport import (
    PROTOCOL_VERSION,
    AddressError,
    PeerFound,
    PeerGone,
    PeerRecord,
    ZeroconfDiscovery,
)
from edge.transport.discovery.peers import MAX_ADDRESSES, MAX_PEERS, PeerTable
from edge.transport.discovery.zeroconf import INTERFACES_EVERY_S
from edge.transport.discovery.zeroconf_record import (
    SERVICE_TYPE,
    addresses_of,
    interface_addresses,
    record_of,
    services_of,
)
from tests.support.passing_time import let_pass


def record(peer: str = "one", *addresses: str, **changes: object) -> PeerRecord:
    fields: dict[str, object] = {
        "id": peer,
        "name": "laptop",
        "cluster": "default",
        "addresses": addresses or ("10.0.0.1:1",),
    }
    return PeerRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_peer_is_there_while_one_source_has_it() -> None:
    table = PeerTable()
    assert table.seen("eth0", record()) == [PeerFound(record())]
    assert table.seen("eth0", record()) == []
    assert table.seen("wlan0", record()) == []
    assert table.lost("eth0") == []
    assert table.lost("eth0") == []
    assert table.peers() == (record(),)
    assert table.lost("wlan0") == [PeerGone("one")]
    assert table.lost("wlan0") == []
    assert table.peers() == ()


def test_addresses_are_merged_and_the_latest_record_wins() -> None:
    table = PeerTable()
    table.seen("eth0", record("one", "10.0.0.1:1"))
    [found] = table.seen("wlan0", record("one", "192.168.0.1:1", name="renamed"))
    assert found == PeerFound(record("one", "10.0.0.1:1", "192.168.0.1:1", name="renamed"))
    assert table.lost("wlan0") == [PeerFound(record("one", "10.0.0.1:1"))]


def test_a_source_may_become_another_peer() -> None:
    table = PeerTable()
    table.seen("eth0", record("one"))
    assert table.seen("eth0", record("two")) == [PeerGone("one"), PeerFound(record("two"))]


def test_a_flood_of_peers_is_cut_off() -> None:
    table = PeerTable()
    for number in range(MAX_PEERS + 10):
        table.seen(str(number), record(str(number)))
    assert len(table.peers()) == MAX_PEERS
    table.lost("0")
    assert table.seen("late", record("late")) == [PeerFound(record("late"))]


def believed(service: AsyncServiceInfo, key: bytes | None = None) -> PeerRecord | None:
    return record_of(service.name, service.properties, "default", key)


def test_what_is_announced_is_what_is_read() -> None:
    announced = record(
        "one",
        "10.0.0.1:7",
        "10.0.0.2:7",
        name="Zoë's laptop",
        properties={"empty": "", "id": "not mine", "ünlike": "x"} | {"k" * 50: "v" * 202},
    )
    with pytest.raises(ValueError, match="names are ASCII"):
        services_of(announced, (), None)
    announced = record(
        "one",
        "10.0.0.1:7",
        "10.0.0.2:7",
        name="Zoë's laptop",
        protocol=3,
        properties={"empty": "", "id": "not mine", "k" * 50: "v" * 202},
    )
    [service] = services_of(announced, (), None)
    assert believed(service) == announced


def test_one_service_for_each_port_and_all_interfaces_for_a_wildcard() -> None:
    told = record("one", "0.0.0.0:7", "10.0.0.9:8", ":8")
    services = services_of(told, ("10.0.0.1", "10.0.0.2"), None)
    assert [believed(service).addresses for service in services] == [  # type: ignore[union-attr]
        ("10.0.0.1:7", "10.0.0.2:7"),
        ("10.0.0.9:8", "10.0.0.1:8", "10.0.0.2:8"),
    ]
    assert len({service.name for service in services}) == 2
    assert [(service.port, service.parsed_addresses()) for service in services] == [
        (7, ["10.0.0.1", "10.0.0.2"]),
        (8, ["10.0.0.9", "10.0.0.1", "10.0.0.2"]),
    ]


def test_a_wildcard_is_announced_as_the_addresses_of_its_kind() -> None:
    own = ("10.0.0.1", "fd00::1", "fe80::1%eth0")
    four, six = ("10.0.0.1:7",), ("[fd00::1]:7", "[fe80::1]:7")
    for told, meant in (
        (("0.0.0.0:7",), four),
        (("[::]:7",), six),
        ((":7",), four + six),
        (("0.0.0.0:7", "[::]:7"), four + six),
    ):
        [service] = services_of(record("one", *told), own, None)
        assert believed(service) == record("one", *meant)
    [named] = services_of(record("one", "[fe80::1%eth0]:7"), own, None)
    assert believed(named) == record("one", "[fe80::1]:7")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record("one", addresses=()), "no address"),
        (record("one", "laptop:7"), "write the number"),
        (record("one", "10.0.0.1"), "write the number"),
        (record("one", "224.0.0.1:7"), "leads nowhere from another device"),
        (record("one", "[fd00::1%eth0]:7"), "leads nowhere from another device"),
        (record("one", name="x" * 251), "shorten it"),
        (record("one", name="bell\a"), "printable"),
        (record("one", properties={"a=b": "c"}), "without"),
        (record(""), "needs an id"),
    ],
)
def test_what_cannot_be_announced_is_refused(bad: PeerRecord, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        services_of(bad, (), None)


GOOD: dict[bytes, bytes | None] = {
    b"id": b"one",
    b"cluster": b"default",
    b"protocol": str(PROTOCOL_VERSION).encode(),
    b"at.0": b"10.0.0.1:1",
}


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {**GOOD, b"id": b""},
        {**GOOD, b"id": None},
        {**GOOD, b"cluster": None},
        {**GOOD, b"protocol": b""},
        {**GOOD, b"protocol": b"0"},
        {**GOOD, b"protocol": b"-1"},
        {**GOOD, b"protocol": b"65536"},
        {**GOOD, b"protocol": "١".encode()},
        {**GOOD, b"protocol": b"9" * 240},
        {**GOOD, b"name": b"\xff"},
        {**GOOD, b"\xff": b"x"},
        {**GOOD, b"name": b"\x1b[31mred"},
        {**GOOD, b"\x1b[31m": b"red"},
        {**GOOD, b"at.0": None},
        {**GOOD, b"at.0": b"laptop:7"},
        {**GOOD, b"at.0": b"10.0.0.1:0"},
        {**GOOD, b"at.0": b":7"},
        {**GOOD, b"at.0": b"0.0.0.0:7"},
        {**GOOD, b"at.0": b"[::]:7"},
        {**GOOD, b"at.0": b"224.0.0.1:7"},
        {**GOOD, b"at.0": b"[fe80::1%eth0]:7"},
        {**GOOD, b"at.1": b"10.0.0.1"},
        {**GOOD, **{f"at.{n}".encode(): f"10.0.0.{n + 1}:7".encode() for n in range(9)}},
        {name: value for name, value in GOOD.items() if name != b"at.0"},
    ],
)
def test_a_malformed_record_is_not_believed(bad: Mapping[bytes, bytes | None]) -> None:
    assert record_of("s", GOOD, "default", None) == record("one", name="one")
    assert record_of("s", bad, "default", None) is None
    assert record_of("s", GOOD, "another", None) is None


KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def test_with_a_key_nothing_that_is_announced_can_be_changed() -> None:
    """Whoever overhears an announcement can repeat it as it is, and nothing else."""
    announced = record("one", "10.0.0.1:7", "10.0.0.2:7", properties={"memory": "24 GB"})
    [service] = services_of(announced, (), KEY)
    assert believed(service, KEY) == announced
    assert believed(service, OTHER_KEY) is None
    assert believed(service) is None
    assert b"default" not in service.properties.values()
    entries, name = service.properties, service.name
    assert record_of(name.upper(), entries, "default", KEY) == announced
    assert record_of(name, entries, "another", KEY) is None
    assert record_of(f"other-{name}", entries, "default", KEY) is None
    assert {b"id", b"name", b"protocol", b"at.0", b"at.1", b"p.memory"} < entries.keys()
    for changed in entries:
        left = {key: value for key, value in entries.items() if key != changed}
        assert record_of(name, left, "default", KEY) is None
        other = b"10.0.0.9:7" if changed.startswith(b"at.") else b"9"
        assert record_of(name, {**entries, changed: other}, "default", KEY) is None
    for added in (b"at.2", b"at.", b"p.x", b"x"):
        assert record_of(name, {**entries, added: b"10.0.0.9:7"}, "default", KEY) is None
    swapped = {**entries, b"at.0": entries[b"at.1"], b"at.1": entries[b"at.0"]}
    assert record_of(name, swapped, "default", KEY) is None


def test_the_tag_of_an_announcement_is_that_of_the_description() -> None:
    """Other versions make the same, or members do not find each other."""
    [service] = services_of(record("one", "10.0.0.1:7", name="", protocol=32), (), KEY)
    digest = hmac.digest(KEY, b"edge is announced as default\none", hashlib.sha256).hex()
    assert (
        service.name
        == f"edge-{digest[:16]}-7.{SERVICE_TYPE}"
        == f"edge-c3e4cc70b79a7f85-7.{SERVICE_TYPE}"
    )
    covered = (
        f'["{service.name}", "default", '
        '[["at.0", "10.0.0.1:7"], ["id", "one"], ["name", ""], ["protocol", "32"]]]'
    )
    tag = hmac.digest(KEY, b"edge announces " + covered.encode(), hashlib.sha256).hex()[:32]
    assert service.properties[b"cluster"] == tag.encode() == b"cb2dec02f578603bb382894d0cf9550a"


def test_a_name_on_the_network_tells_nobody_the_clusters_name() -> None:
    """Else whoever guesses it sees by the digest that it is the right one."""
    [one], [other], [plain] = (services_of(record(), (), key) for key in (KEY, OTHER_KEY, None))
    assert len({one.name, other.name, plain.name}) == 3


def test_of_many_addresses_as_many_are_told_as_anybody_would_dial() -> None:
    interfaces = tuple(f"10.0.0.{number}" for number in range(100, 130))
    [service] = services_of(record("one", "0.0.0.0:7"), interfaces, KEY)
    believed_record = believed(service, KEY)
    assert believed_record is not None
    assert believed_record.addresses == tuple(f"{each}:7" for each in interfaces[:MAX_ADDRESSES])
    table = PeerTable()
    table.seen("eth0", believed_record)
    [found] = table.seen("wlan0", record("one", "10.0.0.0:7"))
    assert isinstance(found, PeerFound)
    assert len(found.record.addresses) == MAX_ADDRESSES


def test_malformed_announcements_on_the_network_are_passed_over() -> None:
    cluster = f"test-{uuid.uuid4().hex}"
    at = {b"at.0": b"127.0.0.1:7"}

    async def scenario() -> None:
        network = AsyncZeroconf(interfaces=["127.0.0.1"])
        watcher = ZeroconfDiscovery(cluster=cluster, interfaces=["127.0.0.1"])
        try:
            for number, entries in enumerate(
                (
                    {b"id": b"bad", b"cluster": cluster.encode(), b"protocol": b"x", **at},
                    {
                        b"id": b"\xff",
                        b"cluster": cluster.encode(),
                        b"protocol": str(PROTOCOL_VERSION).encode(),
                        **at,
                    },
                    {
                        b"id": b"good",
                        b"cluster": cluster.encode(),
                        b"protocol": str(PROTOCOL_VERSION).encode(),
                        **at,
                    },
                )
            ):
                name = f"{cluster[:20]}-{number}"
                service = AsyncServiceInfo(
                    SERVICE_TYPE,
                    f"{name}.{SERVICE_TYPE}",
                    port=7,
                    properties=entries,
                    server=f"{name}.local.",
                    parsed_addresses=["127.0.0.1"],
                )
                await network.async_register_service(service, cooperating_responders=True)
            events = watcher.watch()
            event = await anext(events)
            assert isinstance(event, PeerFound)
            assert event.record.id == "good"
            await events.aclose()  # type: ignore[attr-defined]
        finally:
            await watcher.aclose()
            await network.async_close()

    asyncio.run(scenario())


def test_no_question_asks_for_an_answer_that_reaches_one_process_alone() -> None:
    cluster = f"test-{uuid.uuid4().hex}"
    asked: asyncio.Queue[bool] = asyncio.Queue()

    def on_packet(network: socket.socket) -> None:
        for question in DNSIncoming(network.recv(9000)).questions:
            if question.name.endswith(SERVICE_TYPE):
                asked.put_nowait(question.unicast)

    async def scenario(network: socket.socket) -> None:
        announcing, searching = (
            ZeroconfDiscovery(cluster=cluster, interfaces=["127.0.0.1"]) for _ in range(2)
        )
        asyncio.get_running_loop().add_reader(network, on_packet, network)
        try:
            await announcing.announce(record(cluster=cluster))
            async with asyncio.timeout(60):
                assert isinstance(await anext(searching.watch()), PeerFound)
                assert not await asked.get()
            assert not any(asked.get_nowait() for _ in range(asked.qsize()))
        finally:
            await searching.aclose()
            await announcing.aclose()

    group = socket.inet_aton("224.0.0.251") + socket.inet_aton("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as network:
        network.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        network.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        network.bind(("224.0.0.251", 5353))
        asyncio.run(scenario(network))


def test_multicast_dns_that_does_not_begin_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def register(*_arguments: object, **_options: object) -> None:
        raise NotRunningException

    async def scenario() -> None:
        discovery = ZeroconfDiscovery(interfaces=["127.0.0.1"])
        try:
            with pytest.raises(AddressError, match=r"too busy to begin in time; start it again"):
                await discovery.announce(record())
        finally:
            await discovery.aclose()

    monkeypatch.setattr(AsyncZeroconf, "async_register_service", register)
    asyncio.run(scenario())


def test_another_address_of_a_device_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it gets one by DHCP, or joins another network."""
    key, cluster = b"k" * 32, f"test-{uuid.uuid4().hex}"
    has = dict.fromkeys(("here", "there"), ("127.0.0.1",))
    monkeypatch.setattr(
        "edge.transport.discovery.zeroconf.interface_addresses", lambda names: has[names[0]]
    )

    async def scenario() -> None:
        here, there = (
            ZeroconfDiscovery(cluster=cluster, key=key, interfaces=[name]) for name in has
        )
        events = here.watch()
        try:
            await there.announce(record("one", "0.0.0.0:7", cluster=cluster))
            await there.announce(record("two", "127.0.0.9:7", cluster=cluster))
            found: dict[str, tuple[str, ...]] = {}
            while len(found) < 2:
                event = await anext(events)
                assert isinstance(event, PeerFound)
                found[event.record.id] = event.record.addresses
            assert found == {"one": ("127.0.0.1:7",), "two": ("127.0.0.9:7",)}
            has["there"] = ("127.0.0.2",)
            let_pass(INTERFACES_EVERY_S)
            event = await anext(events)
            assert isinstance(event, PeerFound)
            assert (event.record.id, event.record.addresses) == ("one", ("127.0.0.2:7",))
        finally:
            await events.aclose()  # type: ignore[attr-defined]
            await asyncio.gather(here.aclose(), there.aclose())

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_interfaces_are_named_or_numbered() -> None:
    loopback = next(name for name in ("lo", "lo0", "Loopback") if _has_interface(name))
    assert "127.0.0.1" in interface_addresses([loopback])
    assert interface_addresses(["127.0.0.1", "127.0.0.1"]) == ("127.0.0.1",)
    assert interface_addresses(None)
    with pytest.raises(AddressError, match=f"no interface 'nonesuch0'.*{loopback}"):
        interface_addresses(["nonesuch0"])


PRESENT = {"lo": ["127.0.0.1"], "wlan0": ["192.168.1.7"], "tun0": ["100.64.0.7"]}


@pytest.mark.parametrize(
    ("named", "present", "chosen"),
    [
        (None, ["lo", "wlan0", "tun0"], ("192.168.1.7",)),
        (["tun0"], ["lo", "wlan0", "tun0"], ("100.64.0.7",)),
        (["100.64.0.7", "wlan0"], ["lo", "wlan0", "tun0"], ("100.64.0.7", "192.168.1.7")),
        (None, ["lo", "tun0"], ("100.64.0.7",)),
        (None, ["lo"], ("127.0.0.1",)),
    ],
)
def test_a_tunnels_address_is_told_to_nobody_who_was_not_meant(
    named: list[str] | None, present: list[str], chosen: tuple[str, ...]
) -> None:
    """It is the same in every network that the device comes to."""
    found = addresses_of(named, {name: PRESENT[name] for name in present}, {"tun0"})
    assert found == chosen


def _has_interface(name: str) -> bool:
    try:
        return bool(interface_addresses([name]))
    except AddressError:
        return False


def test_a_network_that_goes_away_is_a_line_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    QuietLogger.log_exception_once(OSError(101, "Network is unreachable"), "Error: %s", "no way")
    (record,) = caplog.records
    assert caplog.messages == ["Error: no way"]
    assert record.exc_info is None


def test_a_discovery_on_a_missing_interface_says_so() -> None:
    async def scenario() -> None:
        discovery = ZeroconfDiscovery(interfaces=["nonesuch0"])
        assert "on nonesuch0" in discovery.describe()
        with pytest.raises(AddressError, match="no interface 'nonesuch0'"):
            await anext(discovery.watch())
        with pytest.raises(AddressError, match="no interface 'nonesuch0'"):
            await discovery.announce(record())
        await discovery.aclose()

    asyncio.run(scenario())
