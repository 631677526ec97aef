"""Frames that are too much: refused before they cost, and a peer holds nothing of them after."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge import transport
from edge.errors import CapacityError, RequestError
from edge.host.free_memory import format_size
from edge.offload import Manifest, ManifestBuilder
from edge.peer.resources import MAX_SHARDS
from edge.protocol.client import PeerClient
from edge.protocol.heartbeat import ALIVE
from edge.protocol.peer_frames import SetMemory
from edge.protocol.weight_frames import Offer
from edge.transport import Frame
from tests.support.hostile_talks import PROMISED_BYTES, bother, measures, peak_bytes, talk
from tests.support.processes import Daemon, own_credentials, poll_until

MIB = 1 << 20
PROMISED = PROMISED_BYTES["null"]
CHANGED = 300


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ("--no-announce", "--backend", "null", "--memory", format_size(PROMISED))
    with Daemon(tmp_path_factory.mktemp("daemon"), *options) as daemon:
        yield daemon
        daemon.await_free()
        assert peak_bytes(daemon.process.pid) < PROMISED
        assert daemon.messages == "", "what is refused is not our failure"


def resident_bytes(daemon: Daemon) -> int:
    return int(psutil.Process(daemon.process.pid).memory_info().rss)


@pytest.mark.parametrize(
    ("kind", "payload_bytes"),
    [("offer", 17 * MIB), ("piece", 4 * MIB), ("match_prefix", MIB), ("describe", MIB), ("?", MIB)],
)
def test_a_payload_that_nobody_waits_for_is_not_read(
    daemon: Daemon, kind: str, payload_bytes: int
) -> None:
    """It is hung up on, while others are served."""

    async def main() -> None:
        channel = await transport.connect(
            daemon.address, credentials=own_credentials(), hello={"name": "test"}
        )
        before = resident_bytes(daemon)

        async def flood() -> None:
            while True:
                await channel.send(Frame(kind, {"call": 1}, bytes(payload_bytes)))

        try:
            with pytest.raises(transport.TransportError):
                await flood()
        finally:
            await channel.aclose()
        assert resident_bytes(daemon) < before + 4 * MIB

    asyncio.run(main())
    daemon.describe()


def test_changed_frames_of_a_member_are_refused_one_by_one(daemon: Daemon) -> None:
    """The fixture sees that the peer has kept its promise of memory, and holds nothing."""
    frames, seldom = talk(daemon.address), measures(daemon.address, daemon.describe().id)
    chance, shown = random.Random(5), own_credentials()
    found = asyncio.run(bother(daemon.address, frames, seldom, CHANGED, chance, shown))
    assert found["failed"] > CHANGED / 10


def test_a_payload_of_nothing_but_lists_costs_next_to_nothing(daemon: Daemon) -> None:
    async def main() -> None:
        channel = await transport.connect(
            daemon.address, credentials=own_credentials(), hello={"name": "test"}
        )
        payload = b"[" + b"[]," * (5 * MIB) + b"[]]"
        try:
            await channel.send(Frame("offer", {"call": 1}, payload))
            refused = await channel.receive()
            while refused.kind == ALIVE.kind:
                refused = await channel.receive()
        finally:
            await channel.aclose()
        assert refused.kind == "failed"
        assert "values" in refused.header["message"]

    asyncio.run(main())
    peak = Path(f"/proc/{daemon.process.pid}/status").read_text(encoding="utf-8")
    (line,) = (line for line in peak.splitlines() if line.startswith("VmHWM:"))
    assert (int(line.split()[1]) << 10) < resident_bytes(daemon) + 64 * MIB


def test_one_coordinator_may_offer_some_shards_at_once(daemon: Daemon) -> None:
    async def main() -> None:
        client = await PeerClient.connect(daemon.address, own_credentials())
        try:
            for number in range(MAX_SHARDS):
                await client.call(Offer(manifest=manifest(number)))
            with pytest.raises(CapacityError, match=f"may have {MAX_SHARDS} shards on offer"):
                await client.call(Offer(manifest=manifest(MAX_SHARDS)))
            await client.call(Offer(manifest=manifest(0)))  # known already
        finally:
            await client.aclose()

    def manifest(number: int) -> Manifest:
        builder = ManifestBuilder()
        builder.add("t", np.full(3, number, np.int32))
        return builder.build()

    process = psutil.Process(daemon.process.pid)
    files = process.num_fds()
    asyncio.run(main())
    assert poll_until(lambda: process.num_fds() <= files)
    asyncio.run(main())  # nothing of the first is left


def test_a_budget_is_no_more_than_there_is(daemon: Daemon, tmp_path: Path) -> None:
    async def ask(address: str, num_bytes: int) -> int:
        client = await PeerClient.connect(address, own_credentials())
        try:
            return (await client.call(SetMemory(bytes=num_bytes))).memory_bytes
        finally:
            await client.aclose()

    with pytest.raises(RequestError, match=r"more than the 256.0 MiB that it was started with"):
        asyncio.run(ask(daemon.address, PROMISED + MIB))
    for allowed in (PROMISED - 50 * MIB, PROMISED):
        assert asyncio.run(ask(daemon.address, allowed)) == allowed
    with Daemon(tmp_path, "--no-announce", "--backend", "null") as unbounded:
        with pytest.raises(RequestError, match="that this machine has"):
            asyncio.run(ask(unbounded.address, 1 << 52))
        assert unbounded.messages == ""
