"""A running model: fails over when a device is lost, moves to better plans, continues answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.answers.answer import Answer, OnEnd, fail_all
from edge.errors import (
    CheckpointError,
    EdgeError,
    NetworkError,
    PeerError,
    PeerLostError,
    RequestError,
)
from edge.partition import Plan
from edge.protocol.step_times import PeerTimes, TokenSteps
from edge.protocol.topology import Seat
from edge.runs.run import PlanRun
from edge.scheduling.orders import Work

MOST_LOSSES_WITHOUT_A_TOKEN = 8
"""Losses in a row, while answers are under way, after which the model gives up."""

MOST_FAILURES_WITHOUT_A_TOKEN = 2
"""The same for errors without a lost peer: the same plan would end in the same way."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The recovery of a model after one of its plans ended."""

    reason: str
    """Why the plan ended: the lost device, or those that joined or became busy."""
    plan: Plan
    """The next plan; its devices are peers' ids."""
    pause_s: float
    """Seconds from the end of the plan until the next one was loaded."""
    requests: int
    """Answers that were under way."""


Reload = Callable[[Collection[str], OnEnd], Awaitable[PlanRun]]
"""Loads the model again without these devices, unless they show that they live. A device is given
by id, or by name if it was lost during a load."""


Load = Callable[[OnEnd], Awaitable[PlanRun]]
"""Loads the model by a plan that was chosen before."""


TakeOver = Callable[[Sequence[Answer], EdgeError], Sequence[Answer]]
"""Takes over unfinished answers of a plan that has ended, and returns those that it leaves."""


def nobody_takes_over(answers: Sequence[Answer], _error: EdgeError) -> Sequence[Answer]:
    """The TakeOver of a model without copies."""
    return answers


class _MovesError(EdgeError):
    """Ends a plan that works, for a better one."""


class RunningModel:
    """A model that answers until it is closed, or until no plan can replace a lost one.

    For one event loop.
    """

    def __init__(self, reload: Reload | None, take_over: TakeOver = nobody_takes_over) -> None:
        """reload: None: the model ends with its first plan. take_over: asked when a plan is lost
        and when the model ends. Call `begin` next."""
        self.failure: EdgeError | None = None
        self.recoveries: list[Recovery] = []
        self._reload = reload
        self._take_over = take_over
        self._run: PlanRun | None = None
        """The current run; None during a reload."""
        self._last: PlanRun
        """The current run, or the last one."""
        self._past = Work()
        """Work of earlier runs."""
        self._waiting: dict[str, Answer] = {}
        """Answers during a reload."""
        self._moves_by: Load | None = None
        """Loads the next plan of a move."""
        self._recovering: asyncio.Task[None] | None = None
        self._losses = self._failures = self._tokens = 0
        """Counts since an answer got a token, or a plan ended while no answer was under way."""

    def begin(self, run: PlanRun) -> None:
        """Take over the first run, which was loaded with `on_end=ended`."""
        self._run = self._last = run
        if run.failure is not None:
            self.ended((), run.failure)

    @property
    def run(self) -> PlanRun | None:
        """The current run; None during a reload, and after the end."""
        return self._run

    @property
    def plan(self) -> Plan:
        """The current plan, or the last one."""
        return self._last.plan

    @property
    def sent_bytes(self) -> dict[str, int]:
        return self._last.sent_bytes

    @property
    def token_weight_bytes(self) -> dict[str, int]:
        return self._last.token_weight_bytes

    @property
    def work(self) -> Work:
        """The work of the peers, by all plans of the model."""
        return self._past + self._last.work

    @property
    def is_recovering(self) -> bool:
        """Whether it fails over or moves to another plan."""
        return self._run is None and self.failure is None

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Unfinished answers."""
        running = () if self._run is None else self._run.answers
        return (*running, *self._waiting.values())

    def submit(self, answer: Answer) -> None:
        """Start an answer. Its sink gets every outcome."""
        if self.failure is not None:
            answer.sink.failed(self.failure)
        elif self._run is None:
            self._waiting[answer.id] = answer
        else:
            self._run.submit(answer)

    def cancel(self, id: str) -> None:
        """Forget an answer and free its KV cache on every peer. An unknown id is ignored."""
        self._waiting.pop(id, None)
        if self._run is not None:
            self._run.cancel(id)

    def move(self, reason: str, load: Load) -> None:
        """Go on by another plan. Answers under way go on there, as after a loss.

        If that plan cannot be loaded, the model fails over without the devices that went away
        meanwhile, perhaps back to the plan that it had. Does nothing during a reload, or after the
        end of the model.
        """
        assert self._reload is not None
        if self._run is not None and self._run.failure is None:
            self._moves_by = load
            self._run.fail(_MovesError(reason))

    async def measure(self) -> list[PeerTimes]:
        """Each peer's times since the last call, in plan order."""
        return await (await self._current()).measure()

    async def count_steps(self) -> dict[Seat, TokenSteps]:
        """Each shard's decode steps by the current plan so far."""
        return await (await self._current()).count_steps()

    async def observed(self, seat: Seat, run: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The sums of one of a shard's `observed_runs`: float32 of this shape."""
        return await (await self._current()).observed(seat, run, shape)

    async def aclose(self) -> None:
        """Free everything on the peers and hang up. May be called again."""
        self._end(RequestError("the model is closed; load it again"))
        if self._recovering is not None:
            self._recovering.cancel()
            await asyncio.wait([self._recovering])
        await self._last.aclose()

    def ended(self, answers: Sequence[Answer], error: EdgeError) -> None:
        """The OnEnd of its runs."""
        if self._run is None:
            assert not answers, "nothing runs"
            return  # a load failed, and its caller is told
        self._run = None
        if self.failure is not None:
            fail_all(self._take_over(answers, self.failure), self.failure)
            return
        if not isinstance(error, _MovesError):
            answers = self._take_over(answers, error)
        self._waiting |= {answer.id: answer for answer in answers}
        if not self._waiting:
            self._losses = self._failures = 0
        load, self._moves_by = self._moves_by, None
        if not isinstance(error, _MovesError):
            load = None  # a device was lost before the move
            if self._reload is None or not self._may_go_on(error, ran=True):
                self._end(error)
                return
        assert self._reload is not None
        self._recovering = asyncio.create_task(self._recover(self._reload, error, load))

    async def _recover(self, reload: Reload, error: EdgeError, load: Load | None) -> None:
        """load: for a move, the load that is tried first, once."""
        started_s = time.monotonic()
        reason = error
        lost = set(self._last.blamed)
        try:
            # Survivors free their shards first, because they may have no room for two.
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
                    _log.info("loading on the remaining peers failed: %s", again)
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
            self._end(_both_errors(reason, final))
            return
        except Exception as defect:
            _log.exception("loading the model on the remaining peers failed")
            self._end(
                EdgeError(
                    f"the model could not be loaded anew ({defect!r})", remedy="load it again"
                )
            )
            return
        self._run = loaded
        waiting, self._waiting = self._waiting, {}
        self.recoveries.append(
            Recovery(
                reason=str(reason),
                plan=loaded.plan,
                pause_s=time.monotonic() - started_s,
                requests=len(waiting),
            )
        )
        for answer in waiting.values():
            self.submit(answer)

    def _may_go_on(self, error: EdgeError, *, ran: bool = False) -> bool:
        """Whether another plan may work after this error. ran: the error ended a run; else it ended
        a load. A peer that found its weights damaged during a run gets a new copy from the next
        load; a checkpoint that cannot be loaded here stays as it is.
        """
        tokens = sum(len(answer.tokens) for answer in self._waiting.values())
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
        fail_all(self._take_over(tuple(waiting.values()), self.failure), self.failure)

    async def _current(self) -> PlanRun:
        """The current run, once there is one."""
        while self._run is None:
            if self.failure is not None:
                raise self.failure
            assert self._recovering is not None
            await asyncio.wait([self._recovering])
        return self._run


def _both_errors(lost: EdgeError, final: EdgeError) -> EdgeError:
    """The error of a model whose plan ended by `lost`, and whose failover ended by `final`."""
    if final is lost or str(final) == str(lost):
        return lost
    text = f"{lost}; and it could not go on without: {final}"
    if isinstance(lost, PeerError):
        return type(lost)(lost.peer, text.removeprefix(f"peer {lost.peer}: "))
    return type(lost)(text)
