"""The context of one measurement of a cluster: model, cache, connections, listeners."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from edge.errors import NetworkError, PeerLostError, ProtocolError
from edge.models.spec import ModelSpec
from edge.planning.profile_cache import FactsCache
from edge.progress import OnProgress
from edge.protocol.client import PeerClient
from edge.protocol.peer_info import PeerInfo
from edge.weights.formats import WeightFormat

OnNote = Callable[[str], None]
"""Gets a sentence for the user."""


def ignore_note(_: str) -> None:
    """An `OnNote` that drops the note."""


class PeerClients:
    """A connection to each peer that is asked, made when it is first needed."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._clients: dict[str, PeerClient] = {}

    async def of(self, peer: PeerInfo) -> PeerClient:
        """Raises PeerLostError when it does not answer any more."""
        if peer.id not in self._clients:
            try:
                client = await peer.connect()
            except ProtocolError:
                raise
            except NetworkError as error:
                raise PeerLostError(peer.name, str(error)) from error
            self._stack.push_async_callback(client.aclose)
            self._clients[peer.id] = client
        return self._clients[peer.id]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """One measurement of a model on a cluster's peers."""

    spec: ModelSpec
    weight_format: WeightFormat
    cache: FactsCache
    clients: PeerClients
    on_progress: OnProgress
    on_note: OnNote
    refresh: bool
    """Measure known facts again."""
    only_known: bool
    """Measure no fact that was not measured before."""
    only_remembered: bool
    """Measure nothing; use known facts as they are."""
    only: Collection[str] | None = None
    """Ids of the peers to measure. Known facts of other peers are used as they are, and peers are
    not tried together. None: all peers."""

    on_rough: Callable[[], None] | None = None
    """Missing facts are taken from a short look, or assumed; then this is called. None: they are
    measured."""

    at_rest: Collection[str] = ()
    """Models that are loaded on the peers and compute nothing while these are measured."""

    def takes_as_known(self, *peers: PeerInfo) -> bool:
        """Whether known facts of these peers are used without a look."""
        if self.only_remembered:
            return True
        return self.only is not None and not any(peer.id in self.only for peer in peers)

    def may_measure(self, *peers: PeerInfo) -> bool:
        """Whether missing facts of these peers are measured."""
        return not self.only_known and not self.takes_as_known(*peers)
