"""Copies of a model behind one front: each answer goes to the copy that is predicted to have it
first, and on to another one when its own is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge.answers.answer import Answer, fail_all
from edge.errors import EdgeError, RequestError
from edge.partition import Plan
from edge.planning.forecast import Forecast
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step_times import PeerTimes, TokenSteps
from edge.protocol.topology import Seat
from edge.runs.model import MOST_LOSSES_WITHOUT_A_TOKEN, Recovery, RunningModel
from edge.scheduling.orders import Work
from edge.scheduling.routing import CopyState, route

_log = logging.getLogger(__name__)

_USUAL_PROMPT_TOKENS = 512
_MANY = 8
"""Requests at once for which a copy's steps are predicted; between 1 and this number the time of a
step is taken to grow evenly."""


@dataclass(slots=True, kw_only=True, eq=False)
class ModelCopy:
    """One copy: a plan over some of the devices."""

    running: RunningModel
    forecast: Forecast
    """Has the plan that runs, and its predictions."""
    peers: Mapping[str, PeerInfo]
    """By id, those of its plan and perhaps others."""
    answered: int = 0
    """Answers that it was given so far."""
    _speed: tuple[Proposal, CopyState | None] | None = None

    @property
    def in_words(self) -> str:
        """The names of its devices."""
        return " and ".join(self.devices)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices of its plan."""
        ids = self.running.plan.devices
        return tuple(self.peers[id].name if id in self.peers else id for id in ids)

    @property
    def speed(self) -> CopyState | None:
        """The predicted speed of its plan; None: it is not known."""
        proposal = self.forecast.proposal
        if self._speed is None or self._speed[0] is not proposal:
            self._speed = proposal, copy_speed(proposal)
        return self._speed[1]

    def found_by(self, answer: Answer, speed: CopyState) -> CopyState:
        """The copy as a new answer finds it, with this speed."""
        run, limits, terms = self.running.run, self.forecast.proposal.limits, answer.terms
        if run is None:
            return replace(speed, requests=len(self.running.answers))
        tokens = len(terms.prompt) + terms.max_new_tokens
        places = max(1, min(limits.requests, limits.cached_tokens // max(1, tokens)))
        return replace(run.as_found_by(terms, speed), places=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCopy:
    """A copy of a model and its answers, at one moment."""

    proposal: Proposal
    """Its plan, with its predicted speed."""
    devices: tuple[str, ...]
    """The names of its devices."""
    answers: int
    """Answers that it has under way or waiting."""
    answered: int
    """Answers that it was given since it was loaded, those under way included."""


class CopiedModel:
    """Copies that answer like one `RunningModel`; they may come and go. For one event loop.

    Figures of one plan (`plan`, `measure`) are those of the first copy that runs.
    """

    def __init__(self, forecast: Forecast) -> None:
        """forecast: follows the plan of the first copy. Call `add` next."""
        self.failure: EdgeError | None = None
        self.recoveries: list[Recovery] = []
        self.copies: tuple[ModelCopy, ...] = ()
        """Those that have not ended, in the order of their loading."""
        self.notes: tuple[str, ...] = ()
        """Sentences on what was predicted of copies and of one plan."""
        self._forecast = forecast
        self._past = Work()
        """Work of copies that have ended."""
        self._first: ModelCopy
        """The first copy that runs, or the last that ran."""
        self._held: list[Answer] | None = None
        """Answers that wait while the copies are exchanged; None: they are not."""
        self._moved: dict[str, tuple[int, int]] = {}
        """Answers that were taken over: their tokens then, and how often in a row with as many."""

    def add(self, copy: ModelCopy) -> None:
        """A copy that runs has joined. Its `RunningModel` was made with `takes_over_from`."""
        self.copies = (*self.copies, copy)
        self._choose_first()

    async def remove(self, copy: ModelCopy) -> None:
        """Free a copy. Its answers go on on others."""
        self._forget(copy)
        await copy.running.aclose()

    def hold(self) -> None:
        """Have new answers wait until `release`, while copies are exchanged."""
        self._held = self._held or []

    def release(self) -> None:
        """Give the answers that wait to the copies; without one the model has ended."""
        if self.failure is None and not self.copies:
            self.failure = EdgeError("no copy of the model could be loaded", remedy="load it again")
        held, self._held = self._held or [], None
        for answer in held:
            self.submit(answer)

    @property
    def plan(self) -> Plan:
        """The plan of the first copy."""
        return self._first.running.plan

    @property
    def sent_bytes(self) -> dict[str, int]:
        return _together(copy.running.sent_bytes for copy in self.copies)

    @property
    def token_weight_bytes(self) -> dict[str, int]:
        return _together(copy.running.token_weight_bytes for copy in self.copies)

    @property
    def work(self) -> Work:
        """The work of all copies so far."""
        return sum((copy.running.work for copy in self.copies), self._past)

    @property
    def is_recovering(self) -> bool:
        """Whether no copy runs, and one is being loaded again."""
        return self.failure is None and not self._alive()

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Unfinished answers."""
        running = tuple(answer for copy in self.copies for answer in copy.running.answers)
        return (*running, *(self._held or ()))

    @property
    def answers_on_copies(self) -> int:
        """The number of unfinished answers that copies have."""
        return sum(len(copy.running.answers) for copy in self.copies)

    @property
    def figures(self) -> tuple[RunningCopy, ...]:
        """The copies that run."""
        return tuple(
            RunningCopy(
                proposal=copy.forecast.proposal,
                devices=copy.devices,
                answers=len(copy.running.answers),
                answered=copy.answered,
            )
            for copy in self._alive()
        )

    def submit(self, answer: Answer) -> None:
        """Start an answer on the copy that is predicted to have it first. Its sink gets every
        outcome."""
        if self.failure is not None:
            answer.sink.failed(self.failure)
        elif any(answer.id == other.id for other in self.answers):
            error = RequestError("a request with this id is under way", remedy="use another id")
            answer.sink.failed(error)
        elif self._held is not None:
            self._held.append(answer)
        else:
            self._give(answer, self._alive() or self.copies)

    def cancel(self, id: str) -> None:
        """Forget an answer and free its KV cache on every peer. An unknown id is ignored."""
        self._moved.pop(id, None)
        if self._held is not None:
            self._held = [answer for answer in self._held if answer.id != id]
        for copy in self.copies:
            copy.running.cancel(id)

    async def measure(self) -> list[PeerTimes]:
        """The times of the first copy's peers since the last call, in plan order."""
        return await self._first.running.measure()

    async def count_steps(self) -> dict[Seat, TokenSteps]:
        """The decode steps of the first copy's shards so far."""
        return await self._first.running.count_steps()

    async def observed(self, seat: Seat, run: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """See `RunningModel.observed`; of the first copy."""
        return await self._first.running.observed(seat, run, shape)

    async def aclose(self) -> None:
        """Free everything on the peers and hang up. May be called again."""
        if self.failure is None:
            self.failure = RequestError("the model is closed", remedy="load it again")
        self.release()
        await asyncio.gather(*(copy.running.aclose() for copy in self.copies))

    def takes_over_from(
        self, running: RunningModel, answers: Sequence[Answer], error: EdgeError
    ) -> Sequence[Answer]:
        """Give the answers of a copy whose plan has ended to others. Returns those that stay: all,
        if no other copy runs or the front is closed. See `TakeOver`."""
        own = next((copy for copy in self.copies if copy.running is running), None)
        if own is not None and running.failure is not None:
            self._forget(own)
        others = self._alive()
        is_exchanged = self._held is not None  # `release` says whether there are others
        if own is not None and self.failure is None and not self.copies and not is_exchanged:
            self.failure = error
        if self.failure is not None or not others:
            return answers
        self._choose_first()
        living = {answer.id for answer in (*answers, *self.answers)}
        self._moved = {id: each for id, each in self._moved.items() if id in living}
        stay = [answer for answer in answers if not self._may_move(answer)]
        taken = {self._give(answer, others).in_words for answer in answers if answer not in stay}
        if own is not None and (answers or running.failure is None):
            where = f"; its answers go on on {', '.join(sorted(taken))}" if taken else ""
            recovery = Recovery(
                reason=f"the copy on {own.in_words} is lost ({error}){where}",
                plan=self.plan,
                pause_s=0.0,
                requests=len(answers) - len(stay),
            )
            self.recoveries.append(recovery)
            _log.info("%s", recovery.reason)
        fail_all(stay, error)
        return ()

    def _may_move(self, answer: Answer) -> bool:
        """Whether it has got a token in the last few copies that took it: else it may be what ends
        them."""
        tokens, times = self._moved.get(answer.id, (-1, 0))
        times = times + 1 if tokens == len(answer.tokens) else 1
        self._moved[answer.id] = (len(answer.tokens), times)
        return times <= MOST_LOSSES_WITHOUT_A_TOKEN

    def _give(self, answer: Answer, copies: Sequence[ModelCopy]) -> ModelCopy:
        speeds = [copy.speed for copy in copies]
        usual = CopyState()  # if the speed of one is not known, that of none counts
        is_known = None not in speeds
        found = [
            copy.found_by(answer, speed if is_known and speed is not None else usual)
            for copy, speed in zip(copies, speeds, strict=True)
        ]
        new_tokens = 0 if answer.terms.rows else answer.terms.max_new_tokens
        chosen = copies[route(len(answer.terms.prompt), new_tokens, found)]
        chosen.answered += 1
        chosen.running.submit(answer)
        return chosen

    def _alive(self) -> tuple[ModelCopy, ...]:
        return tuple(copy for copy in self.copies if copy.running.run is not None)

    def _forget(self, copy: ModelCopy) -> None:
        self.copies = tuple(other for other in self.copies if other is not copy)
        self._past = self._past + copy.running.work
        self._choose_first()

    def _choose_first(self) -> None:
        for copy in self._alive()[:1]:
            if getattr(self, "_first", None) is not copy:
                self._first = copy
                self._forecast.replace(copy.forecast.proposal)


def copy_speed(proposal: Proposal) -> CopyState | None:
    """The predicted speed of a plan, as a copy without requests; None: it is not known."""
    one, many = (
        proposal.predict(prompt_tokens=_USUAL_PROMPT_TOKENS, output_tokens=1, concurrency=count)
        for count in (1, _MANY)
    )
    if one is None or many is None:
        return None
    return CopyState(
        prompt_token_s=one.first_token_s / _USUAL_PROMPT_TOKENS,
        token_s=one.token_s,
        further_s=max(0.0, many.token_s - one.token_s) / (_MANY - 1),
    )


def _together(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for part in parts:
        found.update(part)
    return dict(found)
