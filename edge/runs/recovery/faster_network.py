"""A faster network that appears: the links of a running plan move to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from edge.concurrency.blocking import run_blocking
from edge.protocol.fastest_address import by_fastest_address, shared_networks
from edge.protocol.peer_info import PeerInfo
from edge.runs.model import RunningModel
from edge.runs.recovery.candidates import LOOK_EVERY_S, Candidates
from edge.runs.recovery.quiet import Quiet
from edge.runs.recovery.reloading import Reloading

_log = logging.getLogger(__name__)


class FasterNetwork:
    """Looks for a faster network to the peers of one model. For one event loop."""

    def __init__(
        self,
        candidates: Candidates,
        reloading: Reloading,
        model: RunningModel,
        quiet: Quiet,
        in_use: Callable[[], Sequence[PeerInfo]],
    ) -> None:
        self._candidates, self._reloading, self._model = candidates, reloading, model
        self._quiet, self._in_use = quiet, in_use
        self._networks: frozenset[tuple[str, str]] | None = None
        """The networks to the plan's peers at the last look."""

    async def take(self, there: Sequence[PeerInfo]) -> bool:
        """Move the links of the plan where a network has appeared that is measured to be faster, in
        a moment without an answer under way. The plan stays. Returns whether they move.

        there: has a peer of the plan if its announcement has changed.
        """
        now = {peer.id: peer for peer in there}
        used = [
            replace(now.get(peer.id, peer), address=peer.address, reached_at=peer.reached_at)
            for peer in self._in_use()
        ]
        if not (used and self._candidates.are_announced):
            return False
        networks = await run_blocking(partial(shared_networks, used))
        if self._networks is None or networks <= self._networks:
            self._networks = networks
            return False
        if not await self._quiet.within(LOOK_EVERY_S):
            return False
        self._networks = networks
        found = await by_fastest_address(used)
        names = [
            peer.name
            for peer, before in zip(found, used, strict=True)
            if peer.reached_at != before.reached_at
        ]
        proposal = self._reloading.forecast.proposal
        if not names or self._model.is_recovering or self._model.answers:
            return False
        self._candidates.are_at(found)
        reason = f"a faster network leads to {', '.join(names)}"
        _log.warning(
            "%s: the model goes on there by the same plan. Load it again for a plan that is made "
            "for this network",
            reason,
        )
        self._model.move(reason, lambda on_end: self._reloading.by(proposal, on_end))
        return True
