"""Quiet times of a model, in which its devices are measured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from edge.host.cache_paths import cache_root
from edge.partition import ClusterSpec
from edge.planning.cluster_profile import measured_cluster
from edge.planning.load_options import LoadOptions
from edge.protocol.peer_info import PeerInfo
from edge.runs.model import RunningModel
from edge.weights.checkpoint import Checkpoint

QUIET_S, MOST_QUIET_S = 2.0, 60.0
"""Seconds without an answer before devices of the plan are measured, so that prompts in quick
succession are not disturbed. Doubled each time that a prompt interrupts a measurement."""

_LOOK_EVERY_S = 0.2
"""Seconds between two checks for answers under way."""

_log = logging.getLogger(__name__)


class Quiet:
    """Waits for a time without answers of one model."""

    def __init__(self, model: RunningModel) -> None:
        self._model = model
        self._quiet_s = QUIET_S

    async def comes(self) -> bool:
        """Whether no answer is under way from now on for a while."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._quiet_s
        while not self._model.answers and loop.time() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)
        return not self._model.answers

    async def within(self, limit_s: float) -> bool:
        """Whether within `limit_s` there is a moment without an answer under way."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while self._model.answers and loop.time() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)
        return not self._model.answers

    async def measured(
        self,
        checkpoint: Checkpoint,
        peers: Sequence[PeerInfo],
        options: LoadOptions,
        model: str,
    ) -> ClusterSpec | None:
        """Facts of the peers, on which the model of this name is loaded, all of them measured. None
        if a request came, which must not wait for a measurement."""
        weight_format = options.weight_format(checkpoint)
        measuring = asyncio.create_task(
            measured_cluster(
                peers,
                weight_format.graded(checkpoint.spec),
                weight_format,
                cache_root=cache_root(),
                on_note=_log.info,
                at_rest=(model,),
            )
        )
        try:
            while not measuring.done():
                await asyncio.wait([measuring], timeout=_LOOK_EVERY_S)
                if self._model.answers and not measuring.done():
                    self._quiet_s = min(MOST_QUIET_S, 2 * self._quiet_s)
                    return None
            return measuring.result()
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
