"""Peers that compute nothing are planned, shipped to and asked as all others are."""

from __future__ import annotations

import asyncio

import pytest

import edge
from edge.backends.null.made_up import replies
from edge.demos.bundled import MODEL
from edge.protocol.peer_info import describe_peer
from edge.weights.checkpoint import Checkpoint
from tests.support import passing_time

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("plan", ["pipeline", "tensor"])
def test_their_replies_are_known_beforehand(plan: edge.Parallel) -> None:
    with Checkpoint.open(MODEL) as checkpoint:
        expected = replies(checkpoint.spec, PROMPT, 12)
    with (
        edge.Cluster.local(peers=2, threads=1, backend="null") as cluster,
        cluster.load(MODEL, dtype="int4", plan=plan) as model,
    ):
        assert {peer.backend for peer in cluster.peers} == {"null"}
        assert list(model.generate(PROMPT, max_new_tokens=12).token_ids) == expected


def test_runs_beside_each_other_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has keys of its own, which this device's are not either: over channels, and over a link
    between a peer of one and a peer of the other."""
    monkeypatch.setenv(passing_time.VARIABLE, passing_time.SHORT_DIAL)
    with (
        edge.Cluster.local(peers=1, threads=1, backend="null") as one,
        edge.Cluster.local(peers=1, threads=1, backend="null") as other,
    ):
        peers = (*one.peers, *other.peers)
        for peer, shown in zip(peers, (each.credentials for each in reversed(peers)), strict=True):
            with pytest.raises(edge.NetworkError, match="does not know this device: pair them"):
                asyncio.run(describe_peer(peer.address, shown))
            with pytest.raises(edge.NetworkError, match="does not know this device: pair them"):
                edge.Cluster.connect([peer.address])
            assert asyncio.run(describe_peer(peer.address, peer.credentials)).id == peer.id
        with (
            edge.Cluster.connect(list(peers)) as both,
            pytest.raises(edge.EdgeError, match="local-1 and local-1-2 cannot reach each other"),
        ):
            both.load(MODEL, dtype="int4", plan="tensor")
        for cluster in (one, other):
            with cluster.load(MODEL, dtype="int4") as model:
                assert model.generate(PROMPT, max_new_tokens=1).token_ids
