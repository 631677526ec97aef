"""Which peers are asked for a proof, and what becomes of those that send none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from edge.errors import (
    EdgeError,
    NetworkError,
    PeerError,
    PeerLostError,
    ProtocolError,
    RequestError,
)
from edge.partition import ClusterSpec, DeviceSpec, LinkSpec
from edge.planning import repairing
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.profile_cache import FactsCache
from edge.planning.proposal import propose
from edge.planning.proving import wrong_peers
from edge.protocol.measurements import Proof, Prove
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint
from tests.support.formats import uniform_format
from tests.support.known_rates import PROFILE
from tests.support.peer_infos import peer_info

FORMAT = uniform_format("int4", 32, "fast")


def found_wrong(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, connecting: Any = None, answer: Any = None
) -> dict[str, str]:
    """What `wrong_peers` says of peer a, for which connecting or the call has this outcome."""

    class Client:
        async def call(self, call: Prove, *, limit_s: float | None = None) -> Proof:
            if isinstance(answer, Exception):
                raise answer
            return Proof(numbers=answer)

        async def aclose(self) -> None:
            pass

    async def connect(_self: PeerInfo) -> Client:
        if connecting is not None:
            raise connecting
        return Client()

    monkeypatch.setattr(PeerInfo, "connect", connect)
    return asyncio.run(wrong_peers([peer_info("a")], FORMAT, cache_root=folder))


@pytest.mark.parametrize(
    "error",
    [NetworkError("away"), ProtocolError("other version"), PeerLostError("a", "it was silent")],
)
def test_a_peer_that_is_not_reached_is_left_to_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: EdgeError
) -> None:
    assert found_wrong(monkeypatch, tmp_path, connecting=error) == {}


@pytest.mark.parametrize(
    "error", [PeerLostError("a", "it was silent"), RequestError("not allowed")]
)
def test_a_peer_that_goes_or_refuses_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: EdgeError
) -> None:
    assert found_wrong(monkeypatch, tmp_path, answer=error) == {}
    assert not FactsCache(tmp_path / "measured").is_proven(peer_info("a"), FORMAT)


@pytest.mark.parametrize(
    "error",
    [PeerError("a", "it did not answer 'prove' within 120 s"), ProtocolError("a malformed proof")],
)
def test_a_peer_without_a_proof_is_left_out_and_not_called_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: EdgeError
) -> None:
    said = found_wrong(monkeypatch, tmp_path, answer=error)
    assert said == {"a": f"its back end ort did not prove its arithmetic: {error}"}


def test_wrong_numbers_of_any_size_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = found_wrong(monkeypatch, tmp_path, answer=bytes(3))
    assert said["a"] == "its back end ort computes wrongly: its proof for int4-pure has 3 bytes"


def test_a_repair_asks_for_a_moment_and_no_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def note(peers: Any, *_: Any, **more: Any) -> dict[str, str]:
        asked.extend(peer.id for peer in peers)
        assert more["limit_s"] == repairing.PROVES_WITHIN_S
        return {}

    monkeypatch.setattr(repairing, "wrong_peers", note)
    options = LoadOptions(plan="pipeline", dtype="int4")
    devices = [
        DeviceSpec(id=id, name=id, memory_bytes=1 << 30, threads=1, rates=PROFILE.rates)
        for id in "abc"
    ]
    links = [
        LinkSpec(source=one.id, target=other.id, latency_s=1e-3, bytes_per_s=1e6)
        for one in devices
        for other in devices
        if one is not other
    ]
    with Checkpoint.open(Path("demos/model")) as checkpoint:
        before = propose(
            checkpoint,
            ClusterSpec(devices=tuple(devices), links=tuple(links)),
            options,
            LoadSizes.of(options, checkpoint.spec),
        )
        repair = repairing.repaired_proposal(
            checkpoint, [peer_info(id) for id in "acd"], options, before=before, lost={"b"}
        )
        asyncio.run(repair)
    assert asked == ["a", "c", "d"]
