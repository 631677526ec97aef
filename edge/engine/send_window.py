"""The send window of a session's reports: at its limit the compute thread waits (backpressure)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from edge.protocol.frame_codec import Event
from edge.protocol.step_frames import Logits, States, Tokens
from edge.protocol.token_logprobs import MOST_BYTES_OF_A_TOKEN

MOST_UNSENT_BYTES = 256 << 10
"""Unsent bytes of one session. Socket buffers come before these and hold as much again."""

_EVENT_BYTES, _TOKEN_BYTES = 500, 64


class SendWindow:
    """Counts unsent bytes of reports; `take` blocks at the limit. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_UNSENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._is_over = False
        self._changed = threading.Condition()

    def take(self, event: Event) -> Callable[[], None]:
        """Wait until the event fits. Returns the function that gives its bytes back. An event
        always fits if none is unsent; the session's limits bound its size."""
        num_bytes = event_bytes(event)
        with self._changed:
            self._changed.wait_for(lambda: self._fits(num_bytes))
            self._held_bytes += num_bytes
        return partial(self._give_back, num_bytes)

    def end(self) -> None:
        """End every wait, now and later."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        held_bytes = self._held_bytes
        return self._is_over or not held_bytes or held_bytes + num_bytes <= self._most_bytes

    def _give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._held_bytes -= num_bytes
            self._changed.notify_all()


def event_bytes(event: Event) -> int:
    """Approximate memory of an unsent event. KV copies are counted elsewhere."""
    if isinstance(event, Logits | States):
        return _EVENT_BYTES + len(event.rows)
    if isinstance(event, Tokens):
        of_tokens = _TOKEN_BYTES * len(event.tokens)
        return _EVENT_BYTES + of_tokens + MOST_BYTES_OF_A_TOKEN * len(event.logprobs)
    return _EVENT_BYTES
