"""Batching of a session's reports: tokens that follow fast are sent together, the rest at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from edge.engine.send_window import SendWindow, event_bytes
from edge.protocol.frame_codec import Event
from edge.protocol.step_frames import Tokens

TOGETHER_S = 0.04
"""Seconds that a token may wait for others, except a run's first; users do not notice. Sending one
alone takes 0.8 ms from the two cores that compute the next (AMD EPYC, weights of 195 MB), because
its code has left their caches."""

_MOST_BYTES = 4096
"""Size limit of a report that may wait: larger ones would soon fill the send window."""

Sent = Callable[[], None]
Told = tuple[Event, Sent]
"""An event, and what to call once it is sent."""


class ReportBatcher:
    """Reports of one session. `report` is for any thread but the loop's, the rest for the loop."""

    def __init__(self, tell: Callable[[Event, Sent], None]) -> None:
        """tell: called on the running loop."""
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._unsent = SendWindow()
        self._lock = threading.Lock()
        self._held: list[Told] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_timed = False
        """Whether a timer will send what is held: a token of this run was sent."""

    def report(self, event: Event) -> None:
        """Send `event` after all earlier ones. Blocks while the send window is full."""
        sent = self._unsent.take(event)
        with self._lock:
            self._held.append((event, sent))
            if self._is_timed and _may_wait(event):
                return
        with contextlib.suppress(RuntimeError):  # the loop may end during a step
            self._loop.call_soon_threadsafe(self._tell_all)

    def end(self) -> None:
        """End every wait, now and later."""
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
    """Whether the event may wait: another one follows, and nothing else depends on it."""
    is_of_run = isinstance(event, Tokens) and not event.last
    return is_of_run and event_bytes(event) <= _MOST_BYTES


def _ends_run(event: Event) -> bool:
    """Whether the next token begins a run, and is sent at once."""
    return isinstance(event, Tokens) and event.last
