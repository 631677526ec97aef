"""What a session reports to a coordinator that may read slowly, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from edge.protocol.frame_codec import Event
from edge.protocol.messages import Logits, States, Tokens
from edge.protocol.token_logprobs import MOST_BYTES_OF_A_TOKEN

MOST_UNSENT_BYTES = 256 << 10
"""Most bytes of one session that wait. The network's own buffers come before these, and hold as
much again."""

_EVENT_BYTES, _TOKEN_BYTES = 500, 64


class SendWindow:
    """Bytes of reports that wait to be sent: who makes more waits, too. For all threads."""

    def __init__(self, most_bytes: int = MOST_UNSENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._is_over = False
        self._changed = threading.Condition()

    def take(self, event: Event) -> Callable[[], None]:
        """Wait until there is room, which what is returned gives back. One report always has room
        if none is unsent: how large one may be, the session's limits say."""
        num_bytes = event_bytes(event)
        with self._changed:
            self._changed.wait_for(lambda: self._fits(num_bytes))
            self._held_bytes += num_bytes
        return partial(self._give_back, num_bytes)

    def end(self) -> None:
        """Nobody waits from now on."""
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
    """About what it takes until it is sent; copies of keys and values have room of their own."""
    if isinstance(event, Logits | States):
        return _EVENT_BYTES + len(event.rows)
    if isinstance(event, Tokens):
        of_tokens = _TOKEN_BYTES * len(event.tokens)
        return _EVENT_BYTES + of_tokens + MOST_BYTES_OF_A_TOKEN * len(event.logprobs)
    return _EVENT_BYTES
