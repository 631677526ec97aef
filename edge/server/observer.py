"""The state of a model: counters of its steps, and which of its peers answer.

Peers are asked only when a client looks. Looks in quick succession get the last state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from edge.api.async_model import AsyncModel
from edge.errors import EdgeError
from edge.protocol.peer_info import PeerInfo, describe_all
from edge.protocol.silent_peers import SilentPeers, silent_addresses
from edge.protocol.step_times import StepTimes
from edge.protocol.topology import Seat

_TIMES_EVERY_S = 0.8
_PEERS_EVERY_S = 5.0
"""Seconds between two questions to a peer, each of which takes a new connection."""
_PEER_ANSWERS_WITHIN_S = 2.0
_MOST_RETURNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """A peer that answers again after a silence."""

    name: str
    away_s: float
    recoveries: int
    """Number of recoveries of the model before the return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSeen:
    """The last observed state."""

    loads: int = 0
    """Number of reloads of the model; counters begin again with each."""
    decode: Mapping[Seat, StepTimes] = field(default_factory=dict)
    """Times of the steps since the last reload."""
    peers: Mapping[str, PeerInfo | None] = field(default_factory=dict)
    """All known peers by id; None for one that is gone or never answered."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of the same peers, by id."""
    returns: tuple[Return, ...] = ()
    """The latest returns, the oldest first."""


class Observer:
    """Observes one model."""

    def __init__(self, model: AsyncModel, candidates: Callable[[], Sequence[PeerInfo]]) -> None:
        """candidates: peers that were ever seen, whether the model may use them now or not."""
        self._model = model
        self._candidates = candidates
        self._away_s: dict[str, float] = {}
        """When addresses stopped answering, without those that are merely slow."""
        self._seen = LastSeen()
        self._heard = SilentPeers()
        self._one_at_a_time = asyncio.Lock()
        self._times_s = self._peers_s = float("-inf")
        """When the times and the peers were asked last."""

    async def look(self) -> LastSeen:
        """The current state. Never raises; values that cannot be read stay as they were."""
        async with self._one_at_a_time:
            now_s = time.monotonic()
            if now_s - self._peers_s >= _PEERS_EVERY_S:
                self._peers_s = now_s
                await self._ask_peers()
            if now_s - self._times_s >= _TIMES_EVERY_S and not self._model.is_recovering:
                self._times_s = now_s
                await self._ask_times()
        return self._seen

    async def _ask_times(self) -> None:
        loads = len(self._model.recoveries)
        before = self._seen.decode if loads == self._seen.loads else {}
        try:
            times = await self._model.measure()
        except EdgeError:  # it has just lost a device, or has ended
            return
        decode = {}
        for each in times:
            seat = (each.stage, each.rank)
            decode[seat] = _sum(before.get(seat, StepTimes()), each.decode)
        self._seen = replace(self._seen, loads=loads, decode=decode)

    async def _ask_peers(self) -> None:
        asked = {peer.id: peer for peer in self._candidates()} | dict(self._model.peers)
        infos, failures = await describe_all(
            {peer.address: peer.credentials for peer in asked.values()},
            timeouts_s={peer.address: _PEER_ANSWERS_WITHIN_S for peer in asked.values()},
        )
        now_s = time.monotonic()
        silent = self._heard.note(infos, silent_addresses(failures), now_s=now_s)
        answered = {peer.id: peer for peer in (*infos, *silent)}
        addresses = {peer.address: peer.id for peer in answered.values()}
        # A peer that restarts without keys has another id at the same address.
        known = {
            addresses.get(peer.address, peer.id): peer
            for peer in sorted(asked.values(), key=lambda each: each.id in self._model.peers)
        }
        returns = self._returned(infos, {peer.address: peer.name for peer in known.values()}, now_s)
        for id, peer in known.items():
            if (seen := answered.get(id)) is None or seen.is_lost:
                self._away_s.setdefault(peer.address, now_s)
        self._seen = replace(
            self._seen,
            peers={id: answered.get(id) for id in (*asked, *known)},
            names={id: peer.name for id, peer in known.items()},
            returns=(*self._seen.returns, *returns)[-_MOST_RETURNS:],
        )

    def _returned(
        self, infos: Sequence[PeerInfo], names: Mapping[str, str], now_s: float
    ) -> list[Return]:
        recoveries = len(self._model.recoveries)
        return [
            Return(
                name=names.get(peer.address, peer.name),
                away_s=now_s - self._away_s.pop(peer.address),
                recoveries=recoveries,
            )
            for peer in infos
            if peer.address in self._away_s
        ]


def _sum(one: StepTimes, other: StepTimes) -> StepTimes:
    return StepTimes(
        **{each.name: getattr(one, each.name) + getattr(other, each.name) for each in fields(one)}
    )
