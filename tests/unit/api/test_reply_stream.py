"""What a stream does while no token comes."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from edge.api.reply import Mailbox, ReplyFeed, ReplyStream
from edge.concurrency.loop_thread import LoopThread
from tests.support.processes import ctrl_c_once_asleep


class _Silent:
    """A reply that says nothing."""

    def __init__(self) -> None:
        self.ended = False
        self.cancelled = threading.Event()

    def start(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True

    def cancel(self) -> None:
        self.cancelled.set()


def test_ctrl_c_that_does_not_wake_who_waits_for_a_token() -> None:
    silent = _Silent()

    def begin(_mailbox: Mailbox) -> ReplyFeed:
        return cast(ReplyFeed, silent)

    loop = LoopThread("test-loop")
    try:
        stream = ReplyStream(begin, loop)
        with ctrl_c_once_asleep("_next_event"), pytest.raises(KeyboardInterrupt):
            next(stream)
        assert silent.cancelled.wait(60)
    finally:
        loop.close()
