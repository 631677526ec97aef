"""Peers of a running plan prove their arithmetic again, after a share of its steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from edge.concurrency.blocking import run_blocking
from edge.errors import EdgeError, PeerLostError
from edge.host.cache_paths import cache_root
from edge.planning.cluster_profile import forget_device
from edge.planning.proving import fault_of
from edge.protocol.client import PeerClient
from edge.protocol.measurements import Prove
from edge.protocol.peer_info import PeerInfo
from edge.weights.formats import WeightFormat


class SpotChecks:
    """After a step, with the given probability, one of the peers computes the operators of
    `edge.weights.proof_cases` for inputs that it cannot know before.

    A step itself is not computed again elsewhere: no other device has the same weights, keys and
    values, and bits are equal between equal processors only. One check is under way at a time.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        share: float,
        *,
        peers: Callable[[], Sequence[PeerClient]],
        infos: Mapping[str, PeerInfo],
        fail: Callable[[EdgeError], None],
    ) -> None:
        """share: the probability. infos: descriptions of the peers, by name. fail: gets the loss
        of a peer that computed wrongly."""
        self._weight_format = weight_format
        self._share = share
        self._peers = peers
        self._infos = infos
        self._fail = fail
        self._draw = random.SystemRandom()
        self._task: asyncio.Task[None] | None = None

    def step_ended(self) -> None:
        """Perhaps begin a check."""
        is_free = self._task is None or self._task.done()
        if is_free and self._draw.random() < self._share and (peers := self._peers()):
            self._task = asyncio.create_task(self._check(self._draw.choice(peers)))

    def close(self) -> None:
        """End the check under way. May be called again."""
        if self._task is not None:
            self._task.cancel()

    async def _check(self, client: PeerClient) -> None:
        seed = self._draw.randrange(1 << 32)
        try:
            proof = await client.call(Prove(weight_format=self._weight_format, seed=seed))
        except EdgeError:
            return  # a lost peer is noticed by its channel
        numbers = bytes(proof.numbers)
        if not numbers:
            return  # it is compared with the formulas at loads alone
        fault = await run_blocking(partial(fault_of, numbers, self._weight_format, seed=seed))
        if fault is not None:
            if (info := self._infos.get(client.name)) is not None:
                forget_device(info, cache_root=cache_root())  # it has to prove itself anew
            self._fail(PeerLostError(client.name, f"it computes wrongly: {fault}"))
