"""Daemons that announce themselves by zeroconf on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from zeroconf import Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

import edge
from edge.membership.current import CurrentMembership
from edge.membership.store import CONFIG_VARIABLE, config_root
from edge.protocol.discovery import find_peers
from edge.transport import PROTOCOL_VERSION, PeerRecord, ZeroconfDiscovery, parse_address
from edge.transport.discovery.zeroconf_record import SERVICE_TYPE
from tests.multiprocess.conftest import LONG_CONTEXT
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.processes import PATIENCE_S, Daemon, own_credentials, poll_until, start_together
from tests.support.processes import edge as run_edge

LOOPBACK = "127.0.0.1"


@pytest.fixture
def cluster_name() -> str:
    """No other test, and nobody else on this machine, is in it."""
    return f"test-{uuid.uuid4().hex[:12]}"


def announced(folder: Path, cluster: str, name: str, listen: str = "127.0.0.1:0") -> Daemon:
    options = ("--interface", LOOPBACK, "--cluster", cluster, "--name", name)
    return Daemon(folder / name, *options, listen=listen)


def discover(cluster: str, timeout_s: float = PATIENCE_S, at_least: int = 1) -> edge.Cluster:
    return edge.Cluster.discover(
        cluster, timeout_s=timeout_s, at_least=at_least, interfaces=[LOOPBACK]
    )


def test_found_and_used_and_gone(
    cluster_name: str, tmp_path: Path, tiny_checkpoint: Callable[..., TinyCheckpoint]
) -> None:
    checkpoint = tiny_checkpoint("llama")
    prompt = checkpoint.prompt(4)
    names = ("north", "south")
    plan = make_plan(checkpoint.spec, "tensor_2", model=checkpoint.path.name, devices=names)
    options = ("--interface", LOOPBACK, "--cluster", cluster_name)
    with start_together(
        lambda: announced(tmp_path, cluster_name, "north"),
        lambda: announced(tmp_path, cluster_name, "south"),
        lambda: announced(tmp_path, f"{cluster_name}-other", "elsewhere"),
    ) as (north, south, _elsewhere):
        with discover(cluster_name, at_least=2) as cluster:
            assert [peer.name for peer in cluster.peers] == ["north", "south"]
            with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
                reply = model.generate(prompt, max_new_tokens=4)
                assert list(reply.token_ids) == checkpoint.greedy(prompt, 4)

        def listed() -> list[dict[str, Any]] | None:
            outcome = run_edge("peers", *options, "--json")
            found: list[dict[str, Any]] = json.loads(outcome.out) if outcome.code == 0 else []
            return found if len(found) >= 2 else None  # the command waits for one only

        peers = poll_until(listed)
        assert [peer["name"] for peer in peers] == ["north", "south"]
        assert [peer["address"] for peer in peers] == [north.address, south.address]
        assert south.end() == 0
        with discover(cluster_name) as cluster:
            assert [peer.name for peer in cluster.peers] == ["north"]
        assert north.end() == 0
    with pytest.raises(edge.NetworkError) as raised:
        discover(cluster_name, timeout_s=0.3)
    message = str(raised.value)
    assert f"no peers found within 0.3 s by zeroconf (multicast DNS) on {LOOPBACK}" in message
    assert f"cluster '{cluster_name}'" in message
    assert "--peer HOST:PORT" in message
    assert "edge.Cluster.connect" in message
    assert "On this device alone: edge run MODEL --local 1" in message
    assert raised.value.remedy.startswith("start `edge peer` on each device")


def test_one_that_listens_everywhere_is_one_peer_with_real_addresses(
    cluster_name: str, tmp_path: Path
) -> None:
    with Daemon(
        tmp_path, "--cluster", cluster_name, "--interface", LOOPBACK, listen="0.0.0.0:0"
    ) as daemon:
        assert daemon.addresses == (f"{LOOPBACK}:{daemon.port}",)
        with discover(cluster_name) as cluster:
            (peer,) = cluster.peers
            assert peer.addresses == daemon.addresses


def test_without_an_interface_every_address_is_told_and_loopback_last(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--no-announce", listen="0.0.0.0:0") as daemon:
        hosts = [parse_address(address)[0] for address in daemon.addresses]
        assert hosts[-1] == LOOPBACK
        assert "0.0.0.0" not in hosts
        with edge.Cluster.connect(list(daemon.addresses)) as cluster:
            (peer,) = cluster.peers  # however many ways lead to it
            assert peer.addresses == daemon.addresses
            assert peer.address == daemon.addresses[0]


@contextlib.asynccontextmanager
async def repeated(overheard: Daemon, to: str) -> AsyncIterator[None]:
    """What a stranger does who overhears this daemon: its announcement again, leading elsewhere:
    with another address and port beside its entries, and with others among them."""
    host, port = parse_address(to)
    async with AsyncZeroconf(interfaces=[LOOPBACK]) as network:
        entries = (await announcement(overheard, network)).properties
        for changed in ({}, {b"at.0": to.encode()}):
            name = f"stranger-{uuid.uuid4().hex[:12]}"
            service = AsyncServiceInfo(
                SERVICE_TYPE,
                f"{name}.{SERVICE_TYPE}",
                port=port,
                properties={**entries, **changed},
                server=f"{name}.local.",
                parsed_addresses=[host],
            )
            await network.async_register_service(service, cooperating_responders=True)
        yield


async def announcement(daemon: Daemon, network: AsyncZeroconf) -> AsyncServiceInfo:
    """As everybody on the network hears it."""
    names: asyncio.Queue[str] = asyncio.Queue()

    def heard(zeroconf: Zeroconf, service_type: str, name: str, state_change: object) -> None:
        names.put_nowait(name)

    browser = AsyncServiceBrowser(network.zeroconf, SERVICE_TYPE, handlers=[heard])
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                info = AsyncServiceInfo(SERVICE_TYPE, await names.get())
                if await info.async_request(network.zeroconf, 3000) and info.port == daemon.port:
                    return info
    finally:
        await browser.async_cancel()


def test_a_strangers_copy_of_an_announcement_leads_nobody_anywhere(
    cluster_name: str, tmp_path: Path
) -> None:
    """Neither a daemon that starts nor a coordinator that looks dials what a stranger names: it
    would look around in their network for him."""

    async def scenario(north: Daemon, elsewhere: socket.socket) -> None:
        host, port = elsewhere.getsockname()
        async with repeated(north, f"{host}:{port}"):
            await asyncio.to_thread(look, north)

    def look(north: Daemon) -> None:
        def found() -> list[str]:
            """Of all that is announced within some seconds: nobody knows how many that are."""
            with discover(cluster_name, at_least=9, timeout_s=2.0) as cluster:
                return [peer.address for peer in cluster.peers]

        with announced(tmp_path, cluster_name, "south") as south:
            poll_until(lambda: found() == [north.address, south.address])

    with (
        announced(tmp_path, cluster_name, "north") as north,
        socket.create_server((LOOPBACK, 0)) as elsewhere,
    ):
        asyncio.run(scenario(north, elsewhere))
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_an_announcement_tells_no_name_and_nothing_of_an_earlier_one(
    cluster_name: str, tmp_path: Path
) -> None:
    async def heard(daemon: Daemon) -> AsyncServiceInfo:
        async with AsyncZeroconf(interfaces=[LOOPBACK]) as network:
            return await announcement(daemon, network)

    told: list[dict[str, str]] = []
    for _ in range(2):
        with announced(tmp_path, cluster_name, "north") as daemon:
            info = asyncio.run(heard(daemon))
            entries = {
                key.decode(): (value or b"").decode() for key, value in info.properties.items()
            }
            assert entries.pop("protocol") == str(PROTOCOL_VERSION)
            assert entries.pop("at.0") == daemon.address
            told.append({**entries, "service": info.name, "server": str(info.server)})
            everything = " ".join((*entries, *told[-1].values()))
            for secret in ("north", cluster_name, CurrentMembership("tests").current().identity.id):
                assert secret.lower() not in everything.lower()
    first, second = told
    assert first.keys() == second.keys() == {"id", "name", "cluster", "service", "server"}
    assert first.pop("name") == second.pop("name") == ""
    assert not set(first.values()) & set(second.values())


def test_announced_but_not_reachable(cluster_name: str) -> None:
    """A firewall, or a peer that died without a word: the address and the reason are told."""

    async def look_for(record: PeerRecord) -> None:
        announcer = ZeroconfDiscovery(
            cluster=cluster_name, key=own_credentials().tag_key, interfaces=[LOOPBACK]
        )
        try:
            await announcer.announce(record)
            await find_peers(
                cluster_name, own_credentials(), timeout_s=PATIENCE_S, interfaces=[LOOPBACK]
            )
        finally:
            await announcer.aclose()

    with socket.create_server((LOOPBACK, 0)) as listening:
        address = f"{LOOPBACK}:{listening.getsockname()[1]}"
    record = PeerRecord(id="ghost", name="ghost", cluster=cluster_name, addresses=(address,))
    with pytest.raises(edge.NetworkError) as raised:
        asyncio.run(look_for(record))
    message = str(raised.value)
    assert f"(announced, but not reachable: cannot connect to {address}" in message
    assert "Connection refused" in message


def test_one_that_cannot_be_used_is_left_out_and_told_of(
    cluster_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside one that can: its record, and nobody who listens there."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        address = f"{LOOPBACK}:{listening.getsockname()[1]}"
    record = PeerRecord(id="ghost", name="", cluster=cluster_name, addresses=(address,))

    async def find() -> edge.AsyncCluster:
        announcer = ZeroconfDiscovery(
            cluster=cluster_name, key=own_credentials().tag_key, interfaces=[LOOPBACK]
        )
        try:
            await announcer.announce(record)
            return await edge.AsyncCluster.discover(
                cluster_name, timeout_s=PATIENCE_S, at_least=2, interfaces=[LOOPBACK]
            )
        finally:
            await announcer.aclose()

    with announced(tmp_path, cluster_name, "north"):
        cluster = asyncio.run(find())
    assert [peer.name for peer in cluster.peers] == ["north"]
    (failure,) = cluster.left_out
    assert f"cannot connect to {address}" in str(failure)
    assert f"a peer is announced, but left out: {failure}" in caplog.messages


def test_an_interface_that_is_not_there() -> None:
    sentence = run_edge("peers", "--interface", "no-such-0").sentence()
    assert "cannot look for peers: this device has no interface 'no-such-0'" in sentence
    assert "it has" in sentence


def test_a_daemon_with_copied_keys_is_told_of_and_used_only_once_the_first_is_gone(
    cluster_name: str,
    tmp_path: Path,
    endless_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The folder of keys of one device on another one."""
    prompt = endless_checkpoint.prompt(4)

    def with_copied_keys(name: str) -> Daemon:
        folder = tmp_path / f"keys of {name}"
        shutil.copytree(config_root(), folder, ignore=shutil.ignore_patterns("*.lock"))
        with monkeypatch.context() as patch:
            patch.setenv(CONFIG_VARIABLE, str(folder))
            return announced(tmp_path, cluster_name, name)

    own_credentials()  # there are keys then
    with (
        with_copied_keys("first") as first,
        discover(cluster_name) as cluster,
        cluster.load(
            endless_checkpoint.path,
            dtype="float32",
            context_tokens=LONG_CONTEXT,
            wait_for_peers_s=PATIENCE_S,
        ) as model,
        with_copied_keys("second") as second,
    ):
        poll_until(lambda: "it has the keys" in caplog.text)
        told = caplog.records[-1].getMessage()
        assert f"at {second.address} it has the keys of the device at {first.address}" in told
        assert [peer.address for peer in cluster.peers] == [first.address]
        sentence = run_edge(
            *("peers", "--peer", first.address, "--peer", second.address, "--json")
        ).sentence()
        assert "it has the keys of the device at" in sentence
        assert first.address in sentence
        assert second.address in sentence
        stream = model.stream(prompt, max_new_tokens=LONG_CONTEXT - 10)
        tokens = [next(stream).token_id]
        first.kill()
        while not model.recoveries:
            tokens.append(next(stream).token_id)
        tokens += [next(stream).token_id for _ in range(20)]
        stream.close()
        assert [peer.name for peer in model.peers.values()] == ["second"]
        again = model.generate(prompt, max_new_tokens=len(tokens))
        assert list(again.token_ids) == tokens
    assert caplog.text.count("it has the keys") == 1
