"""Peers that answered before and are silent now. A silent peer may come back; a peer that has gone
is forgotten."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from edge.errors import EdgeError
from edge.protocol.peer_info import PeerInfo

_NO_WAY_THERE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


def silent_addresses(failures: Mapping[str, EdgeError]) -> frozenset[str]:
    """The addresses without any answer. A refused or closed connection is an answer."""
    return frozenset(address for address, error in failures.items() if is_silence(error))


def is_silence(error: BaseException) -> bool:
    """Whether the error is a timeout, or no route to the address."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) or getattr(cause, "errno", None) in _NO_WAY_THERE:
            return True
        cause = cause.__cause__
    return False


class SilentPeers:
    """The last description of each peer. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[PeerInfo, float]] = {}

    def note(
        self, peers: Iterable[PeerInfo], silent: Collection[str], *, now_s: float
    ) -> tuple[PeerInfo, ...]:
        """The silent ones of the peers noted before, each with `silent_s`.

        peers: those that answer now. silent: addresses without an answer. Other peers noted before
        have gone, and are forgotten.
        """
        now = {peer.id: (peer, now_s) for peer in peers}
        quiet = {
            id: (peer, last_s)
            for id, (peer, last_s) in self._heard.items()
            if id not in now and peer.address in silent
        }
        self._heard = now | quiet
        return tuple(replace(peer, silent_s=now_s - last_s) for peer, last_s in quiet.values())
