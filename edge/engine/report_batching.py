"""What a session reports: at once, but for tokens that come fast, which are told together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from edge.engine.send_window import SendWindow, event_bytes
from edge.protocol.frame_codec import Event
from edge.protocol.messages import Tokens

TOGETHER_S = 0.04
"""How long a token that is not the first of its run waits for others: nobody sees that. To tell one
alone takes 0.8 ms from the two cores that compute the next (AMD EPYC, weights of 195 MB): they run
code that is not in their caches any more."""

_MOST_BYTES = 4096
"""Size limit of a report that waits: larger ones would soon take the room of all that is unsent."""

Sent = Callable[[], None]
Told = tuple[Event, Sent]
"""And what is to be called once it is sent."""


class ReportBatcher:
    """Reports of one session. `report` is for any thread but the loop's, the rest for the loop."""

    def __init__(self, tell: Callable[[Event, Sent], None]) -> None:
        """For the running loop, which calls `tell`."""
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._unsent = SendWindow()
        self._lock = threading.Lock()
        self._held: list[Told] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_timed = False
        """What is held will be told without being asked for: a token of this run was."""

    def report(self, event: Event) -> None:
        """Behind all before; waits where much is unsent."""
        sent = self._unsent.take(event)
        with self._lock:
            self._held.append((event, sent))
            if self._is_timed and _may_wait(event):
                return
        with contextlib.suppress(RuntimeError):  # the loop ended while a step was under way
            self._loop.call_soon_threadsafe(self._tell_all)

    def end(self) -> None:
        """Nobody waits from now on."""
        self._unsent.end()

    def _tell_all(self) -> None:
        with self._lock:
            held, self._held = self._held, []
            goes_on = self._is_timed or any(_may_wait(event) for event, _sent in held)
            self._is_timed = goes_on and not any(_ends_run(event) for event, _sent in held)
            is_timed = self._is_timed
        if is_timed and self._timer is None:
            self._timer = self._loop.call_later(TOGETHER_S, self._time_is_over)
        elif not is_timed and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for event, sent in held:
            self._tell(event, sent)

    def _time_is_over(self) -> None:
        with self._lock:
            self._is_timed, self._timer = False, None
        self._tell_all()


def _may_wait(event: Event) -> bool:
    """Nothing depends on it but what people see, and another one comes."""
    is_of_run = isinstance(event, Tokens) and not event.last
    return is_of_run and event_bytes(event) <= _MOST_BYTES


def _ends_run(event: Event) -> bool:
    """The first token of the next is told at once."""
    return isinstance(event, Tokens) and event.last
