"""Frames to a peer of this process, in the middle of a session that is loaded: `coverage_guided`.

Which branches of the peer a frame reaches depends on those before it, too; so some that are kept
show nothing when they are tried alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edge import transport
from edge.protocol import messages
from edge.protocol.frame_codec import to_frame
from edge.transport import Credentials, Frame
from edge.transport import ProtocolError as FrameError
from edge.transport.frame import decode
from tests.support.hostile_talks import LASTS, hostile_member, load, of_run, talk
from tests.support.kept_inputs import Target
from tests.support.mutated_frames import mutated_frame, wire

_LAST_CALL = 1 << 40
"""No frame has this number; who is answered it has been answered all before."""


class Talk:
    """With one peer; who hangs up is called anew, and some time after loading it is loaded anew."""

    def __init__(self, address: str, shown: Credentials) -> None:
        self._address, self._shown = address, shown
        self.frames = talk(address)
        self._channel: transport.Channel | None = None
        self._left, self._run = 0, 0

    async def say(self, frame: Frame) -> str:
        """The kind of what came back first, once all has."""
        if self._left == 0 or self._channel is None:
            await self.aclose()
            self._run += 1
            frames = of_run(self.frames, f"{self._run}")
            self._channel, _ready = await load(self._address, frames, self._shown)
            self._left = LASTS
        self._left -= 1
        told: list[Frame] = []
        try:
            await self._channel.send(frame)
            await self._channel.send(to_frame("describe", messages.Describe(), call=_LAST_CALL))
            while not told or told[-1].header.get("call") != _LAST_CALL:
                told.append(await self._channel.receive())
        except transport.ProtocolError:
            return "cannot be sent"
        except transport.TransportError:
            self._left = 0
            return "hung up on"
        return told[0].kind

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.aclose()


class _Told(logging.Handler):
    """What is refused is not our failure: whatever is logged is an error here."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def changed(data: bytes, chance: random.Random) -> bytes:
    """Another frame of that kind; one that cannot be sent stays as it is."""
    try:
        return wire(mutated_frame(decode(data), chance))
    except (FrameError, RecursionError):
        return data


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """For `coverage_guided`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runner = stack.enter_context(asyncio.Runner())
        peer = contextlib.AsyncExitStack()
        daemon, shown = runner.run(peer.enter_async_context(hostile_member(folder)))
        stack.callback(lambda: runner.run(peer.aclose()))
        with_peer = Talk(daemon.resources.addresses[0], shown)
        stack.callback(lambda: runner.run(with_peer.aclose()))
        told = _Told()
        logging.getLogger().addHandler(told)
        stack.callback(logging.getLogger().removeHandler, told)

        def outcome(kind: str, content: bytes) -> str:
            try:
                frame = decode(content)
            except FrameError:
                return "cannot be sent"
            answer = runner.run(with_peer.say(frame))
            assert not told.lines, told.lines
            return f"{kind}: {answer}"

        yield Target(
            sound=[(frame.kind, wire(frame)) for frame in with_peer.frames],
            lasting=lambda kind: kind != "connect",  # it has the peer's address
            changed=changed,
            outcome=outcome,
        )
