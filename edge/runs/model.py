"""A model that outlives the plan it runs by: what is lost is replaced, what is better is moved to,
and replies go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.answers.answer import OnEnd, Request, fail_all
from edge.errors import (
    CheckpointError,
    EdgeError,
    NetworkError,
    PeerError,
    PeerLostError,
    RequestError,
)
from edge.partition import Plan
from edge.protocol.step_times import PeerTimes
from edge.protocol.topology import Seat
from edge.runs.run import PlanRun
from edge.scheduling.work import Work

MOST_LOSSES_WITHOUT_A_TOKEN = 8
"""One after the other, while requests are under way: then what remains does not work, either."""

MOST_FAILURES_WITHOUT_A_TOKEN = 2
"""The same of errors of which no peer went away: the same plan would end in the same way."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a model went on after a plan of it had ended."""

    reason: str
    """Why the plan ended: what was lost, or who joined."""
    plan: Plan
    """That it goes on by; devices are peers' ids."""
    pause_s: float
    """From the end of the one to the other's first step."""
    requests: int
    """That were under way."""


Reload = Callable[[Collection[str], OnEnd], Awaitable[PlanRun]]
"""Loads the model anew, on what is left without these devices unless they show that they live. By
id, or by name where they were lost while it was loaded."""


Load = Callable[[OnEnd], Awaitable[PlanRun]]
"""Loads the model by a plan that was chosen for it."""


class _MovesError(EdgeError):
    """Ends a plan that does what it should, for a better one."""


class RunningModel:
    """Like PlanRun, but for its end: it ends when it is closed, or nothing can replace what was
    lost. Used from one event loop.
    """

    def __init__(self, reload: Reload | None) -> None:
        """reload: None, to end with its first plan. Then `begin`."""
        self.failure: EdgeError | None = None
        self.recoveries: list[Recovery] = []
        self._reload = reload
        self._loaded: PlanRun | None = None
        """None while it is loaded anew."""
        self._last: PlanRun
        """The one that runs, or ran last."""
        self._past = Work()
        """Work of the plans before it."""
        self._waiting: dict[str, Request] = {}
        """Requests while nothing runs."""
        self._moves_by: Load | None = None
        """What loads it where its plan ends of its own accord."""
        self._recovering: asyncio.Task[None] | None = None
        self._losses = self._failures = self._tokens = 0
        """Since a request got a token, or a plan ran that ended while none was under way."""

    def begin(self, loaded: PlanRun) -> None:
        """What it runs by at first, which was loaded with `ended`."""
        self._loaded = self._last = loaded
        if loaded.failure is not None:
            self.ended((), loaded.failure)

    @property
    def plan(self) -> Plan:
        """What runs where, or ran last."""
        return self._last.plan

    @property
    def sent_bytes(self) -> dict[str, int]:
        return self._last.sent_bytes

    @property
    def token_weight_bytes(self) -> dict[str, int]:
        return self._last.token_weight_bytes

    @property
    def work(self) -> Work:
        """What its peers were given to compute, by all its plans."""
        return self._past + self._last.work

    @property
    def is_recovering(self) -> bool:
        """Something was lost, and is being replaced; or it moves to another plan."""
        return self._loaded is None and self.failure is None

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those that are under way, or wait."""
        running = () if self._loaded is None else self._loaded.requests
        return (*running, *self._waiting.values())

    def submit(self, request: Request) -> None:
        """Start a request. Whatever becomes of it, its sink is told."""
        if self.failure is not None:
            request.sink.failed(self.failure)
        elif self._loaded is None:
            self._waiting[request.id] = request
        else:
            self._loaded.submit(request)

    def cancel(self, request: str) -> None:
        """Forget a request and free its KV cache on every peer; unknown ones are ignored."""
        self._waiting.pop(request, None)
        if self._loaded is not None:
            self._loaded.cancel(request)

    def move(self, reason: str, load: Load) -> None:
        """Go on by another plan; requests under way are started again there, as after a loss.

        Where it cannot be loaded, it goes on as if the devices of its plan were lost that went
        away meanwhile: perhaps by the plan that it had. Nothing happens while it is loaded anew,
        or once it has ended.
        """
        assert self._reload is not None
        if self._loaded is not None and self._loaded.failure is None:
            self._moves_by = load
            self._loaded.fail(_MovesError(reason))

    async def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since this was last called, in plan order."""
        return await (await self._running()).measure()

    async def observed(self, seat: Seat, run: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """What one shard has summed up of one of its `observed_runs`: float32 of this shape."""
        return await (await self._running()).observed(seat, run, shape)

    async def aclose(self) -> None:
        """Free everything on the peers and hang up. May be called again."""
        self._end(RequestError("the model is closed; load it again"))
        if self._recovering is not None:
            self._recovering.cancel()
            await asyncio.wait([self._recovering])
        await self._last.aclose()

    def ended(self, requests: Sequence[Request], error: EdgeError) -> None:
        """A plan ended with these unfinished; see `OnEnd`."""
        if self._loaded is None:
            assert not requests, "nothing runs"
            return  # loading failed, which whoever loads is told
        self._loaded = None
        if self.failure is not None:
            fail_all(requests, self.failure)
            return
        self._waiting |= {request.id: request for request in requests}
        if not self._waiting:
            self._losses = self._failures = 0
        load, self._moves_by = self._moves_by, None
        if not isinstance(error, _MovesError):
            load = None  # it was lost before it could move
            if self._reload is None or not self._may_go_on(error, ran=True):
                self._end(error)
                return
        assert self._reload is not None
        self._recovering = asyncio.create_task(self._recover(self._reload, error, load))

    async def _recover(self, reload: Reload, error: EdgeError, load: Load | None) -> None:
        """load: where it moves, what is tried first, once."""
        started_s = time.monotonic()
        reason = error
        lost = set(self._last.blamed)
        try:
            # What the survivors hold is freed first: there may be no room for it twice.
            await self._last.aclose()
            while True:
                moves_by, load = load, None
                try:
                    if moves_by is None:
                        loaded = await reload(lost, self.ended)
                    else:
                        loaded = await moves_by(self.ended)
                except EdgeError as again:
                    if moves_by is not None:
                        reason = _MovesError(f"{reason}; but it could not be used ({again})")
                    elif not self._may_go_on(again):
                        raise
                    if isinstance(again, PeerLostError):
                        lost.add(again.peer)
                    _log.info("loading on what is left failed: %s", again)
                    continue
                self._past = self.work
                self._last = loaded
                if loaded.failure is None:
                    break
                error = loaded.failure
                lost |= loaded.blamed
                await loaded.aclose()
                if not self._may_go_on(error, ran=True):
                    raise error
        except EdgeError as final:
            self._end(_told(reason, final))
            return
        except Exception as defect:
            _log.exception("loading the model on what is left failed")
            self._end(
                EdgeError(
                    f"the model could not be loaded anew ({defect!r})", remedy="load it again"
                )
            )
            return
        self._loaded = loaded
        waiting, self._waiting = self._waiting, {}
        self.recoveries.append(
            Recovery(
                reason=str(reason),
                plan=loaded.plan,
                pause_s=time.monotonic() - started_s,
                requests=len(waiting),
            )
        )
        for request in waiting.values():
            self.submit(request)

    def _may_go_on(self, error: EdgeError, *, ran: bool = False) -> bool:
        """Whether another plan may do what this one could not. ran: it ended a plan that ran; else
        it came of loading one. Of weights that a peer found damaged as it ran, loading sends it a
        new copy; a checkpoint that cannot be loaded here is not another one the next time.
        """
        tokens = sum(len(request.answer) for request in self._waiting.values())
        if tokens != self._tokens:
            self._tokens, self._losses, self._failures = tokens, 0, 0
        if isinstance(error, PeerLostError):
            self._losses += 1
            return self._losses <= MOST_LOSSES_WITHOUT_A_TOKEN
        if isinstance(error, PeerError | NetworkError) or (
            ran and isinstance(error, CheckpointError)
        ):
            self._failures += 1
            return self._failures <= MOST_FAILURES_WITHOUT_A_TOKEN
        return False

    def _end(self, error: EdgeError) -> None:
        if self.failure is None:
            self.failure = error
        waiting, self._waiting = self._waiting, {}
        fail_all(tuple(waiting.values()), self.failure)

    async def _running(self) -> PlanRun:
        """What it runs by, once it does."""
        while self._loaded is None:
            if self.failure is not None:
                raise self.failure
            assert self._recovering is not None
            await asyncio.wait([self._recovering])
        return self._loaded


def _told(lost: EdgeError, final: EdgeError) -> EdgeError:
    """The error of a model whose plan ended by `lost`, and which could not go on by `final`."""
    if final is lost or str(final) == str(lost):
        return lost
    told = f"{lost}; and it could not go on without: {final}"
    if isinstance(lost, PeerError):
        return type(lost)(lost.peer, told.removeprefix(f"peer {lost.peer}: "))
    return type(lost)(told)
