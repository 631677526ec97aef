"""Scheduling without peers: a test is the peers, and says what happened, verb by verb."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edge.protocol.step import FinishReason, Guesses
from edge.scheduling.decide import decide
from edge.scheduling.events import (
    Answered,
    Cancelled,
    DiskReserved,
    Event,
    PrefixFound,
    Submitted,
    SwapOutDone,
)
from edge.scheduling.orders import Orders, Work
from edge.scheduling.prefixes import PrefixCacheIndex
from edge.scheduling.residency import Residency
from edge.scheduling.saved_states import SavedStates
from edge.scheduling.state import SchedulingLimits, SchedulingState, StepUnderWay


class Steps:
    """A state, and the events that the next decision is told of."""

    def __init__(
        self,
        residency: Residency,
        *,
        prefixes: PrefixCacheIndex | None = None,
        saved: SavedStates | None = None,
        **limits: Any,
    ) -> None:
        """limits: fields of SchedulingLimits."""
        self.state = SchedulingState.new(SchedulingLimits(**limits), residency, prefixes, saved)
        self._events: list[Event] = []

    @property
    def under_way(self) -> Sequence[StepUnderWay]:
        return self.state.under_way

    @property
    def work(self) -> Work:
        return self.state.work

    def tell(self, event: Event) -> None:
        self._events.append(event)

    def add(
        self, request: str, prompt: Sequence[int], *, answer: Sequence[int] = (), **terms: Any
    ) -> None:
        self.tell(Submitted(request=request, prompt=tuple(prompt), answer=tuple(answer), **terms))

    def cancel(self, request: str) -> None:
        self.tell(Cancelled(request))

    def answer(
        self,
        tokens: Sequence[int],
        *,
        last: bool = True,
        ends: Sequence[FinishReason | None] | None = None,
        at_s: float | None = None,
        drafted: int = 0,
        together: bool = False,
        guesses: Sequence[Guesses] = (),
    ) -> None:
        """together: also where nothing was drafted. guesses: for each entry."""
        found = [None] * len(tokens) if ends is None else ends
        self.tell(
            Answered(
                tokens=tuple(tokens),
                ends=tuple(found),
                last=last,
                at_s=at_s,
                drafted=drafted,
                together=together or drafted > 0,
                pairs=together or drafted > 0,
                guesses=tuple(guesses),
            )
        )

    def matched(self, request: str, tokens: int) -> None:
        self.tell(PrefixFound(request=request, tokens=tokens))

    def reserved(self, request: str, *, why_not: str | None) -> None:
        self.tell(DiskReserved(request=request, why_not=why_not))

    def swapped_out(self, request: str, *, why_not: str | None) -> None:
        self.tell(SwapOutDone(request=request, why_not=why_not))

    def decide(self) -> Orders:
        """What is to be done, but for how many tokens its step gives."""
        events, self._events = self._events, []
        return replace(decide(self.state, events), step_tokens=0)
