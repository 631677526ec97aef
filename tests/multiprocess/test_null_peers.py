"""Peers that compute nothing are planned, shipped to and asked as all others are."""

from __future__ import annotations

import pytest

import edge
from edge.backends.null.made_up import replies
from edge.demos.bundled import MODEL
from edge.weights.checkpoint import Checkpoint

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
