"""Plans for a changed cluster, of the served models and of others on this disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.api.hub_download import hub_cache
from edge.api.known_models import models_here
from edge.concurrency.blocking import run_blocking
from edge.errors import CapacityError
from edge.planning.proposal import Proposal
from edge.server.cluster_view import plan_view
from edge.server.refusals import Refusal

MOST_CHANGES = 32

Propose = Callable[[str | Path, Sequence[str]], Awaitable[Proposal]]
"""Plans for a model and a changed cluster; nothing is measured and nothing is loaded."""


class Previews:
    """Plans for models by name. A client cannot name a path."""

    def __init__(self, served: Mapping[str, str | Path], propose: Propose) -> None:
        """served: names or folders of the served models, by their names on this server."""
        self._served = served
        self._propose = propose
        self._one_at_a_time = asyncio.Lock()

    async def names(self) -> list[str]:
        """Names of all models that can be planned, the served ones first."""
        return list(await run_blocking(self._places))

    async def view(self, name: str, changes: Sequence[str]) -> dict[str, Any]:
        """A plan as in `plan_view`. Raises Refusal for an unknown model and for one that does not
        fit; RequestError for an invalid change."""
        if len(changes) > MOST_CHANGES:
            raise Refusal(400, f"at most {MOST_CHANGES} changes", param="change")
        places = await run_blocking(self._places)
        if name not in places:
            raise Refusal(404, f"the model {name!r:.200} is not on this device", param="model")
        async with self._one_at_a_time:
            try:
                proposal = await self._propose(places[name], changes)
            except CapacityError as error:
                raise Refusal(422, str(error), code="does_not_fit") from error
        return plan_view(proposal, {each.id: each.name for each in proposal.cluster.devices})

    def _places(self) -> dict[str, str | Path]:
        others = {
            each: path
            for each, path in models_here((), hub_cache=hub_cache())
            if isinstance(path, Path)
        }
        return {**self._served, **{n: p for n, p in others.items() if n not in self._served}}
