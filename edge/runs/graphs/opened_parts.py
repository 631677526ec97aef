"""The parts of one plan while they are open, and the flow of tensors through them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from edge.partition import GraphEstimate, GraphPlan
from edge.protocol.peer_info import gather_all
from edge.runs.graphs.graph_options import EarlyExit
from edge.runs.graphs.remote_part import Arrays, RemotePart

RunPart = Callable[[int, RemotePart, Arrays], Awaitable[Arrays]]
"""Runs the part of a number for the tensors that are known, and gives its outputs."""


_NEWEST = 0.2
"""The weight of the newest time between two results of a copy."""
_MOST_SLOWER = 4
"""Longer times between results count as so many usual ones: a device had a pause."""


@dataclass(slots=True, eq=False)
class OpenedParts:
    """The parts of one plan on their peers, of its first copy and then of the others."""

    plan: GraphPlan
    estimate: GraphEstimate
    parts: list[RemotePart] = field(default_factory=list)
    copies: list[OpenedParts] = field(default_factory=list)
    """Further copies."""
    _under_way: int = 0
    _interval_s: float = 0.0
    """Between two results, as predicted and then as seen."""
    _ended_s: float = 0.0

    def __post_init__(self) -> None:
        self._interval_s = self.estimate.interval_s

    @property
    def each_copy(self) -> tuple[OpenedParts, ...]:
        return (self, *self.copies)

    @property
    def between(self) -> frozenset[str]:
        """Inputs of parts, among them all tensors that one part gives another."""
        return frozenset(name for each in self.parts for name in each.part.inputs)

    async def compute(
        self, arrays: Arrays, results: Sequence[str], exit_when: EarlyExit | None
    ) -> dict[str, NDArray[Any]]:
        """The results of the copy that is predicted to give them first, each stage as soon as its
        tensors are there. If the input ends early, those that are there by then."""
        copy = min(self.each_copy, key=OpenedParts._next_s)
        return await copy.compute_here(arrays, results, exit_when)

    def _next_s(self) -> float:
        """Predicted seconds until this copy would give the results of another input."""
        if not self._under_way:  # it may be as fast again as predicted
            return self.estimate.latency_s
        latency_s = max(self.estimate.latency_s, self._interval_s)
        return latency_s + self._under_way * self._interval_s

    async def compute_here(
        self, arrays: Arrays, results: Sequence[str], exit_when: EarlyExit | None
    ) -> dict[str, NDArray[Any]]:
        """As `compute`, of this copy."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        self._under_way += 1
        try:
            known = await self.flow(arrays, lambda _n, remote, now: remote.run(now), exit_when)
        finally:
            self._under_way -= 1
        before_s, self._ended_s = self._ended_s, loop.time()
        if begun_s < before_s:  # it had no pause
            took_s = min(self._ended_s - before_s, _MOST_SLOWER * self._interval_s)
            self._interval_s += _NEWEST * (took_s - self._interval_s)
        return {name: known[name] for name in results if name in known}

    async def flow(
        self, arrays: Arrays, run: RunPart, exit_when: EarlyExit | None = None
    ) -> dict[str, NDArray[Any]]:
        """All tensors that are known in the end: of the inputs, and of each part's run, which
        begins as soon as its tensors are there. exit_when: parts behind that one wait for it, and
        do not run if it is met."""
        known: dict[str, NDArray[Any]] = dict(arrays)
        if len(self.parts) == 1:  # a task of its own would take as long as a small graph
            return {**known, **await run(0, self.parts[0], known)}
        makers = {name: n for n, each in enumerate(self.parts) for name in each.part.outputs}
        ended = [asyncio.Event() for _ in self.parts]

        last = len(self.parts) if exit_when is None else makers[exit_when.output]

        async def one(number: int, remote: RemotePart) -> None:
            if exit_when is not None and number > last:
                await ended[last].wait()
                if exit_when.is_met(known[exit_when.output]):
                    return
            for name in remote.part.inputs:
                if name in makers:
                    await ended[makers[name]].wait()
            known.update(await run(number, remote, known))
            ended[number].set()

        await gather_all(one(*each) for each in enumerate(self.parts))
        return known

    async def aclose(self) -> None:
        """Free them on the peers."""
        await gather_all(part.aclose() for copy in self.each_copy for part in copy.parts)
