"""The means of one question about a cluster: whom to ask, what is known, whom to tell."""

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
    """For callers that have nobody to tell."""


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
    """How fast is this model on these peers?"""

    spec: ModelSpec
    weight_format: WeightFormat
    cache: FactsCache
    clients: PeerClients
    on_progress: OnProgress
    on_note: OnNote
    refresh: bool
    """Measure what is known, too."""
    only_known: bool
    """Measure nothing that was not measured before."""
    only_remembered: bool
    """Measure nothing at all, and take what is known as it is."""
    only: Collection[str] | None = None
    """Peers by id: what concerns none of them is taken as it is known, and nothing is tried of
    several peers together. None: all."""

    at_rest: Collection[str] = ()
    """Models that are loaded on the peers and compute nothing while these are measured."""

    def takes_as_known(self, *peers: PeerInfo) -> bool:
        """Whether nothing is asked of these that is known already."""
        if self.only_remembered:
            return True
        return self.only is not None and not any(peer.id in self.only for peer in peers)

    def may_measure(self, *peers: PeerInfo) -> bool:
        """Whether what is not known of these is measured."""
        return not self.only_known and not self.takes_as_known(*peers)
