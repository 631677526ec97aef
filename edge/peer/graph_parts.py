"""Parts of graphs of one coordinator on this peer: opened, timed and closed."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.errors import PeerError, ProtocolError
from edge.memory.ledger import Use
from edge.peer.hosted_part import GRAPH_DTYPE, HostedPart, use_name
from edge.peer.quota import QuotaShare
from edge.peer.resources import PeerResources
from edge.peer.weight_uploads import WeightUploads
from edge.protocol import graph_frames as frames
from edge.protocol.frame_codec import Call
from edge.transport import Member


class CoordinatorParts:
    """The parts of one coordinator. Close with `aclose`."""

    def __init__(
        self, resources: PeerResources, user: Member | None, owner: object, weights: WeightUploads
    ) -> None:
        """Resources are counted for `user` and `owner`. weights: uploads that parts load."""
        self._peer, self._user, self._weights = resources, user, weights
        self._owner = owner
        self._shards = QuotaShare(resources.shards, owner)
        self._parts: dict[str, HostedPart] = {}
        self._opening: set[str] = set()

    @property
    def calls(self) -> dict[type[Call[Any]], Callable[[Any], Awaitable[object]]]:
        return {
            frames.OpenPart: self._open,
            frames.ProfilePart: self._profile,
            frames.ClosePart: self._close,
        }

    def end_waits(self, session: object) -> None:
        """End the runs of a part that is about to close. Unknown names are ignored."""
        part = self._parts.get(session) if isinstance(session, str) else None
        if part is not None:
            part.end_waits()

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:  # run all of these, even if one fails
            for session in tuple(self._parts):
                stack.push_async_callback(self._end, session)

    async def _open(self, call: frames.OpenPart) -> frames.PartOpened:
        if self._peer.leaving.is_set():
            raise PeerError(self._peer.settings.name, "its user has stopped it")
        if call.session in self._parts or call.session in self._opening:
            raise ProtocolError("this session is open already")
        shard = self._weights.sealed(call.manifest_digest)
        await run_blocking(lambda: shard.note(call.model))
        use = part_use(shard.manifest.total_bytes, call)
        name = use_name(call.session)
        self._opening.add(call.session)
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._shards.take()
                stack.callback(self._shards.give_back)
                await self._peer.reserve(name, use, self._user)
                stack.callback(self._peer.release, name)
                # ONNX Runtime maps the file, too: addresses, and no memory that is reserved.
                own = (1 + frames.PACKED) * shard.manifest.total_bytes + call.buffer_bytes
                part = HostedPart(
                    call,
                    shard,
                    self._user,
                    threads=self._peer.settings.threads,
                    memory_bytes=own,
                )
                stack.push_async_callback(part.aclose)
                await part.load()  # its memory is reserved, so nobody needs to wait for it
                stack.pop_all()
        finally:
            self._opening.discard(call.session)
        self._parts[call.session] = self._peer.parts[name] = part
        self._peer.audit.loaded(
            self._user,
            name,
            call.model,
            session=call.session,
            dtype=GRAPH_DTYPE,
            stage=call.stage,
            rank=0,
            bytes=use.total,
        )
        return frames.PartOpened(threads=self._peer.settings.threads)

    async def _profile(self, call: frames.ProfilePart) -> frames.PartProfile:
        return frames.PartProfile(content=await self._get(call.session).profile())

    async def _close(self, call: frames.ClosePart) -> frames.PartDone:
        await uninterrupted(self._end(call.session))
        return frames.PartDone()

    def _get(self, session: str) -> HostedPart:
        part = self._parts.get(session)
        if part is None:
            raise ProtocolError("the part is not open")
        return part

    async def _end(self, session: str) -> None:
        part = self._parts.pop(session, None)
        if part is None:
            return
        del self._peer.parts[use_name(session)]
        self._peer.audit.ended(use_name(session))
        try:
            await part.aclose()
        finally:
            self._peer.release(use_name(session))
            self._shards.give_back()


def part_use(weight_bytes: int, call: frames.OpenPart) -> Use:
    """The memory of a part: its weights, packed, a process with tensors, and what waits here."""
    return Use(
        weight_bytes=frames.PACKED * weight_bytes,
        buffer_bytes=frames.PROCESS_BYTES
        + call.buffer_bytes
        + call.held_bytes
        + call.profile * frames.PROFILE_BYTES,
    )
