"""Who has answered before and says nothing now: silent for so long, which is not gone."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from edge.errors import EdgeError
from edge.protocol.peer_info import PeerInfo

_NO_WAY_THERE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


def silent_addresses(failures: Mapping[str, EdgeError]) -> frozenset[str]:
    """Those where nobody said anything. A connection that is refused, or ends, is an answer."""
    return frozenset(address for address, error in failures.items() if is_silence(error))


def is_silence(error: BaseException) -> bool:
    """Whether it was waited for in vain, or no packet finds the way."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) or getattr(cause, "errno", None) in _NO_WAY_THERE:
            return True
        cause = cause.__cause__
    return False


class SilentPeers:
    """What each said when it answered last. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[PeerInfo, float]] = {}

    def note(
        self, peers: Iterable[PeerInfo], silent: Collection[str], *, now_s: float
    ) -> tuple[PeerInfo, ...]:
        """peers: who answers now. silent: addresses where nobody did.

        Those of earlier notes who are silent now, with for how long. Whoever is neither has gone,
        and is forgotten.
        """
        now = {peer.id: (peer, now_s) for peer in peers}
        quiet = {
            id: (peer, last_s)
            for id, (peer, last_s) in self._heard.items()
            if id not in now and peer.address in silent
        }
        self._heard = now | quiet
        return tuple(replace(peer, silent_s=now_s - last_s) for peer, last_s in quiet.values())
