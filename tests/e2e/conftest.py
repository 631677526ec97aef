"""What comparisons of whole models share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import edge
from edge.protocol.peer_info import PeerInfo
from tests.conftest import shared_by_a_folder
from tests.support.known_rates import know_rates


@pytest.fixture(scope="package")
def five_peers() -> Iterator[edge.Cluster]:
    """Five daemons on this machine, named as in `tests.support.plans.DEVICES`."""
    with shared_by_a_folder(lambda: edge.Cluster.local(peers=5, threads=1)) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def own_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load computes its prompts: it does not find what another plan has left on the peers."""
    monkeypatch.setattr(PeerInfo, "prefix_secret", lambda _peer, is_shared: os.urandom(32))


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known beforehand; a module that has peers measured has a fixture `rates` of its own."""
    know_rates(monkeypatch.setattr)
