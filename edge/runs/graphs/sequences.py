"""Sequences of inputs between which a graph has state: in order, and repeated after a loss.

The state stays in the processes of the parts. The coordinator has a copy of it from every few
inputs, and the inputs since. After a loss, or an input that fails in one part, it sends the copy
and computes those inputs again. Their results are given once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge.concurrency.blocking import uninterrupted
from edge.errors import CapacityError, PeerError, RequestError
from edge.graphs.kept import Kept
from edge.graphs.state import zeros
from edge.protocol.peer_info import gather_all
from edge.runs.graphs.cut_graph import CutGraph
from edge.runs.graphs.graph_options import MOST_SEQUENCES
from edge.runs.graphs.inputs import checked
from edge.runs.graphs.opened_parts import OpenedParts
from edge.runs.graphs.remote_part import Arrays, DeviceGoneError, RemotePart

COPY_EVERY = 16
"""Inputs between two copies of the state."""
COPY_BYTES = 32 << 20
"""Bytes of inputs after which a copy is made earlier."""
_MOST_TRIES = 3
"""Times that peers may lose the state before an input fails."""

_CLOSED = "the sequence has ended"


class _BrokenError(Exception):
    """Another input has failed, and this one is computed again."""


@dataclass(slots=True, eq=False)
class _Turn:
    """An input, and its place among the others."""

    inputs: Arrays
    future: asyncio.Future[dict[str, Any]]
    tries: int = 0


@dataclass(slots=True, eq=False)
class _Step:
    """A turn in one attempt."""

    turn: _Turn
    before: _Step | None
    is_copied: bool
    fed: list[asyncio.Event]
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Attempt:
    """Turns that follow each other on one set of opened parts."""

    opened: OpenedParts
    slot: str
    """Where the state stays. Of its own: what drops that of an earlier attempt may come late."""
    is_broken: bool = False
    steps: list[_Step] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    inputs: int = 0
    nbytes: int = 0

    def end(self) -> None:
        """No turn goes on: the first one that could not is settled."""
        self.is_broken = True
        for step in self.steps:
            for event in (*step.fed, step.finished):
                event.set()


class Sequence:
    """One sequence. Made by `Sequences`. Close with `aclose`."""

    def __init__(self, graph: CutGraph, slot: str, initial: Mapping[str, Any] | None) -> None:
        self._graph, self._slot = graph, slot
        self._state = graph.options.state
        values = {each.name: each for each in graph.file.inputs}
        named = [values[name] for name in self._state.values()]
        for name in initial or {}:
            if name not in self._state.values():
                raise RequestError(
                    f"{name!r:.80} is no state of the graph",
                    remedy=f"give {', '.join(map(repr, self._state.values()))}",
                )
        self._given = checked(
            [each for each in named if each.name in (initial or {})], initial or {}
        )
        self._free = [each for each in named if each.name not in self._given]
        self._copy: Arrays | None = None
        """The state before the first of `_since`; None: there was no input."""
        self._since: list[_Turn] = []
        self._attempt: _Attempt | None = None
        self._attempts = itertools.count()
        self._renewing: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def run(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs for the next input. Its place is that of the call. See `CutGraph.run`."""
        if self._failure is not None:
            raise self._failure
        values = self._graph.inputs
        # What is computed again must be what was given, also if the caller changes the array.
        inputs = {name: np.array(each) for name, each in checked(values, arrays).items()}
        if self._copy is None:
            shapes = {name: kind.shape for name, kind in self._graph.measured.kinds.items()}
            self._copy = {**zeros(self._free, values, inputs, shapes), **self._given}
        turn = _Turn(inputs, asyncio.get_running_loop().create_future())
        self._since.append(turn)
        if self._attempt is not None and not self._attempt.is_broken:
            self._start(self._attempt, turn)
        else:
            self._renew()
        return await turn.future

    async def aclose(self) -> None:
        """Forget the state. Inputs under way end with an error."""
        self._fail(RequestError(_CLOSED, remedy="begin another one"))
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()
            for task in attempt.tasks:
                task.cancel()
            await asyncio.gather(*attempt.tasks, return_exceptions=True)
            for part in attempt.opened.parts:
                part.forget(attempt.slot)

    def _renew(self) -> None:
        if self._failure is None and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renewed())

    async def _renewed(self) -> None:
        """Settle what failed, and go on from the copy on the parts that are open now."""
        broken, self._attempt = self._attempt, None
        try:
            if broken is not None:
                await asyncio.gather(*broken.tasks)
                await self._settle(broken)
            opened = await self._graph.current()
        except Exception as error:
            self._fail(error)
            return
        if self._failure is None:
            self._attempt = _Attempt(opened, f"{self._slot}.{next(self._attempts)}")
            for turn in self._since:
                self._start(self._attempt, turn)

    async def _settle(self, broken: _Attempt) -> None:
        failed = [step for step in broken.steps if step.error is not None]
        for step in failed:
            if isinstance(step.error, DeviceGoneError):
                await uninterrupted(self._graph.lost(broken.opened, step.error))
                return
        for part in broken.opened.parts:
            part.forget(broken.slot)
        step = failed[0]
        assert step.error is not None
        step.turn.tries += 1
        if isinstance(step.error, PeerError) and step.turn.tries < _MOST_TRIES:
            return
        if step.turn.future.done() and not step.turn.future.cancelled():
            raise step.error  # its result was given, and the state behind it is lost
        self._since.remove(step.turn)
        if not step.turn.future.done():
            step.turn.future.set_exception(step.error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        for turn in self._since:
            if not turn.future.done():
                turn.future.set_exception(error)
                turn.future.exception()  # its caller may be gone
        self._since.clear()

    def _start(self, attempt: _Attempt, turn: _Turn) -> None:
        attempt.inputs += 1
        attempt.nbytes += sum(array.nbytes for array in turn.inputs.values())
        is_copied = attempt.inputs >= COPY_EVERY or attempt.nbytes >= COPY_BYTES
        if is_copied:
            attempt.inputs = attempt.nbytes = 0
        before = attempt.steps[-1] if attempt.steps else None
        step = _Step(turn, before, is_copied, [asyncio.Event() for _ in attempt.opened.parts])
        attempt.steps = [*(each for each in attempt.steps if not each.finished.is_set()), step]
        attempt.tasks = [*(each for each in attempt.tasks if not each.done())]
        attempt.tasks.append(asyncio.create_task(self._take(attempt, step)))

    async def _take(self, attempt: _Attempt, step: _Step) -> None:
        """Compute one turn, and end it once all before it have ended."""
        error: Exception | None = None
        results: dict[str, Any] = {}
        with contextlib.suppress(_BrokenError):
            try:
                results = await self._computed(attempt, step)
            except _BrokenError:
                raise
            except Exception as failed:
                error = failed
            if step.before is not None:
                await step.before.finished.wait()
                step.before = None
            if attempt.is_broken:
                return
            if error is not None:
                step.error = error
                attempt.end()
                self._renew()
                return
            if step.is_copied:
                self._copy = {name: results[output] for output, name in self._state.items()}
                del self._since[: self._since.index(step.turn) + 1]
            if not step.turn.future.done():
                names = self._graph.results
                step.turn.future.set_result({name: results[name] for name in names})
            step.finished.set()

    async def _computed(self, attempt: _Attempt, step: _Step) -> dict[str, Any]:
        before = step.before
        first = {} if before is not None else self._copy or {}

        async def one(number: int, remote: RemotePart, arrays: Arrays) -> dict[str, Any]:
            if before is not None:
                await before.fed[number].wait()
            if attempt.is_broken:
                raise _BrokenError
            kept = self._kept(attempt, remote, is_first=before is None, is_copied=step.is_copied)
            return await remote.run(arrays, kept, step.fed[number])

        return await attempt.opened.flow({**step.turn.inputs, **first}, one)

    def _kept(
        self, attempt: _Attempt, remote: RemotePart, *, is_first: bool, is_copied: bool
    ) -> Kept:
        inputs, outputs = remote.part.inputs, remote.part.outputs
        held = {o: n for o, n in self._state.items() if o in outputs}
        wanted = attempt.opened.between | set(self._graph.results)
        return Kept(
            slot=attempt.slot,
            take=() if is_first else tuple(n for n in inputs if n in held.values()),
            keep={output: name for output, name in held.items() if name in inputs},
            give=tuple(n for n in outputs if n in wanted or (is_copied and n in held)),
        )


class Sequences:
    """The sequences of one graph: one for `run`, and one for each stream."""

    def __init__(self, graph: CutGraph) -> None:
        self._graph = graph
        self._numbers = itertools.count()
        self._live: set[Sequence] = set()
        self._own: Sequence | None = None

    def begin(self, initial: Mapping[str, Any] | None = None) -> Sequence:
        """A sequence from a first state by the names of inputs; None: zeros. Close with `end`.

        Raises RequestError for a state of another form, CapacityError if there are too many.
        """
        if len(self._live) >= MOST_SEQUENCES:
            raise CapacityError(
                f"a graph with state computes {MOST_SEQUENCES} sequences at once",
                remedy="end a stream first, or load the graph once more",
            )
        sequence = Sequence(self._graph, str(next(self._numbers)), initial)
        self._live.add(sequence)
        return sequence

    async def end(self, sequence: Sequence) -> None:
        """Forget a sequence and its state."""
        try:
            await uninterrupted(sequence.aclose())
        finally:
            self._live.discard(sequence)

    async def reset(self, initial: Mapping[str, Any] | None) -> None:
        """Begin the sequence of `run` anew."""
        own, self._own = self._own, None
        if own is not None:
            await self.end(own)
        self._own = self.begin(initial)

    async def run(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The next input of the sequence that `reset` begins."""
        if self._own is None:
            self._own = self.begin()
        return await self._own.run(arrays)

    async def aclose(self) -> None:
        """End all sequences."""
        await gather_all([self.end(each) for each in tuple(self._live)])
