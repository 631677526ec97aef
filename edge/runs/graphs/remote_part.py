"""One part of a graph on one peer: sent, opened, run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.concurrency.blocking import run_blocking
from edge.errors import (
    EdgeError,
    NetworkError,
    PeerError,
    PeerLostError,
    ProtocolError,
    RequestError,
)
from edge.graphs.kept import Kept
from edge.graphs.parts import GraphPart
from edge.graphs.tensors import pack, unpack
from edge.offload import parse_json
from edge.progress import OnProgress
from edge.protocol.client import PeerClient
from edge.protocol.graph_frames import (
    BLOB_PIECE_BYTES,
    MOST_BLOB_BYTES,
    ClosePart,
    FeedPart,
    OpenPart,
    PartPiece,
    ProfilePart,
    TakeResult,
)
from edge.protocol.peer_info import PeerInfo
from edge.runs.shipping import ShardShipment, ship

RUNS_AT_ONCE = 3
"""Inputs of one part under way: one is computed while others come and go. A peer keeps one more."""

_FREED_WITHIN_S = 5.0

_ASIDE_BYTES = 1 << 20
"""Tensors of so many bytes are copied in a thread, off the event loop."""

_PART_NODE = re.compile(r"edge(\d+)node")

Arrays = Mapping[str, NDArray[Any]]


class DeviceGoneError(EdgeError):
    """The peer of a part was lost. Caught where graphs are planned again."""

    def __init__(self, device: str, error: EdgeError) -> None:
        super().__init__(str(error))
        self.device = device
        """The peer's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTerms:
    """How a part is opened; see `OpenPart`."""

    model: str
    buffer_bytes: int
    held_bytes: int
    run_limit_s: float
    profile: bool = False
    plain: bool = False


class RemotePart:
    """A part that is open on a peer. Close with `aclose`."""

    def __init__(
        self, part: GraphPart, peer: PeerInfo, client: PeerClient, session: str, held_bytes: int
    ) -> None:
        """held_bytes: see `OpenPart`."""
        self.part = part
        self.peer = peer
        self._held_bytes = held_bytes
        self.computed_s: list[float] = []
        """Seconds of the newest runs by the peer's clock."""
        self._client, self._session = client, session
        self._is_closing = False
        self._numbers = itertools.count()
        self._turns = asyncio.Semaphore(RUNS_AT_ONCE)
        self._tasks: set[asyncio.Task[dict[str, NDArray[Any]]]] = set()
        self._dropped: list[str] = []

    @classmethod
    async def open(
        cls,
        part: GraphPart,
        peer: PeerInfo,
        *,
        terms: PartTerms,
        on_progress: OnProgress,
    ) -> RemotePart:
        """Send the peer what it lacks of the part, and have it load the part.

        Raises DeviceGoneError if it is lost, CapacityError if it has no room, RequestError or
        PeerError if it cannot load the part, with the cause.
        """
        shipment = ShardShipment(part.manifest, part.groups, Path())
        client: PeerClient | None = None
        session = uuid.uuid4().hex
        try:
            client, _sent = await ship(
                shipment, peer.connect, peer=peer.name, on_progress=on_progress
            )
            await client.call(
                OpenPart(
                    session=session,
                    manifest_digest=part.manifest.digest,
                    model=terms.model[:200] or "graph",
                    buffer_bytes=terms.buffer_bytes,
                    held_bytes=terms.held_bytes,
                    run_limit_s=terms.run_limit_s,
                    profile=terms.profile,
                    plain=terms.plain,
                )
            )
        except BaseException as error:
            if client is not None:
                await client.aclose()
            if isinstance(error, EdgeError) and _is_loss(error):
                raise DeviceGoneError(peer.id, error) from error
            if isinstance(error, RequestError):
                raise RequestError(named(part, str(error))) from error
            raise
        return cls(part, peer, client, session, terms.held_bytes)

    async def run(
        self, arrays: Arrays, kept: Kept | None = None, fed: asyncio.Event | None = None
    ) -> dict[str, NDArray[Any]]:
        """The part's outputs for these tensors.

        kept: what stays on the peer. fed: set once the run's place among others is sure. Inputs
        wait for their turn. Raises RequestError, which names the node, if the part cannot compute
        them, DeviceGoneError if the peer is lost, and PeerError if it has lost what it kept. A
        cancelled run ends by itself.
        """
        sent = [n for n in self.part.inputs if kept is None or n not in kept.take]
        task = asyncio.create_task(self._run({name: arrays[name] for name in sent}, kept, fed))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def forget(self, slot: str) -> None:
        """Have the peer drop what it keeps in a slot, with the next run of another one. Waits for
        the runs under way, which may still keep something."""
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._dropped.append(slot)

    async def profile(self) -> tuple[list[Any], dict[str, Any]]:
        """The name, microseconds and kinds of outputs of each node's runs, and types of tensors;
        see `OpenPart`."""
        answer = await self._asked(ProfilePart(session=self._session))
        try:
            found = parse_json(bytes(answer.content))
        except ValueError as error:
            raise PeerError(self.peer.name, "sent times of nodes that are no JSON") from error
        nodes, types = (
            found.get(n) if isinstance(found, dict) else None for n in ("nodes", "types")
        )
        if not isinstance(nodes, list) or not isinstance(types, dict):
            raise PeerError(self.peer.name, "sent no times of nodes")
        return nodes, types

    async def aclose(self) -> None:
        """Wait until the peer has freed the part. Runs under way end with DeviceGoneError."""
        self._is_closing = True
        with contextlib.suppress(EdgeError):  # else it frees the part when the connection ends
            await self._client.call(ClosePart(session=self._session), limit_s=_FREED_WITHIN_S)
        await self._client.aclose()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marked as seen, also where nobody waits for it any more

    async def _asked(self, call: Any) -> Any:
        try:
            return await self._client.call(call)
        except EdgeError as error:
            if _is_loss(error) or self._is_closing:
                raise DeviceGoneError(self.peer.id, error) from error
            if isinstance(error, RequestError):
                raise RequestError(named(self.part, str(error))) from error
            raise

    async def _run(
        self, arrays: Arrays, kept: Kept | None, fed: asyncio.Event | None
    ) -> dict[str, NDArray[Any]]:
        async with self._turns:
            others, dropped = {}, tuple[str, ...]()
            if kept is not None:
                dropped, self._dropped = tuple(self._dropped), []
                others["kept"] = replace(kept, drop=dropped).to_json()
            large = sum(array.nbytes for array in arrays.values()) >= _ASIDE_BYTES
            blob = (
                await run_blocking(lambda: pack(arrays, **others))
                if large
                else pack(arrays, **others)
            )
            number = next(self._numbers)
            view, total = memoryview(blob), len(blob)
            if total > MOST_BLOB_BYTES:
                self._dropped += dropped
                raise RequestError(f"{total:,} bytes are too much for one input")
            for offset in range(0, total, BLOB_PIECE_BYTES):
                feed = FeedPart(
                    session=self._session,
                    run=number,
                    total_bytes=total,
                    offset=offset,
                    content=view[offset : offset + BLOB_PIECE_BYTES],
                )
                if offset + BLOB_PIECE_BYTES < total:
                    try:
                        await self._asked(feed)
                    except RequestError:
                        self._dropped += dropped
                        raise
            # The question for the result follows at once, so that it costs no further round trip.
            feeding = asyncio.create_task(self._asked(feed))
            taking = asyncio.create_task(self._take(number, 0))
            if fed is not None:
                feeding.add_done_callback(lambda _task: fed.set())
            await asyncio.wait((feeding, taking))
            if (refused := feeding.exception()) is not None:
                taking.exception()  # follows from the refusal
                self._dropped += dropped
                raise refused
            piece = taking.result()
            self.computed_s = [*self.computed_s[-99:], piece.computed_s]
            wanted = self.part.outputs if kept is None else kept.give
            return await self._results(number, piece, wanted)

    async def _take(self, number: int, offset: int) -> PartPiece:
        piece: PartPiece = await self._asked(
            TakeResult(session=self._session, run=number, offset=offset)
        )
        return piece

    async def _results(
        self, number: int, piece: PartPiece, wanted: Collection[str]
    ) -> dict[str, NDArray[Any]]:
        if piece.total_bytes > self._held_bytes:
            raise PeerError(self.peer.name, "sent results that are larger than what it may keep")
        blob = bytes(piece.content)
        if len(blob) < piece.total_bytes:
            parts = [blob]
            place = len(blob)
            while place < piece.total_bytes:
                following = await self._take(number, place)
                if not following.content:
                    raise PeerError(self.peer.name, "sent an empty piece of results")
                parts.append(bytes(following.content))
                place += len(following.content)
            blob = b"".join(parts)
        try:
            arrays, others = unpack(blob)
        except ValueError as error:
            raise PeerError(self.peer.name, f"sent results that cannot be read: {error}") from error
        if others.get("forgotten") is True:
            raise PeerError(self.peer.name, "has lost the state of a graph")
        if set(arrays) != set(wanted):
            raise PeerError(self.peer.name, "sent other tensors than the part gives")
        return arrays


def named(part: GraphPart, message: str) -> str:
    """A message of ONNX Runtime with the names of nodes that the file has."""
    return _PART_NODE.sub(lambda found: part.node_names.get(found[0], found[0]), message)


def _is_loss(error: EdgeError) -> bool:
    return isinstance(error, PeerLostError | NetworkError) and not isinstance(error, ProtocolError)


def same(found: Arrays, expected: Arrays) -> bool:
    """Whether two results are equal to the last bit."""
    return found.keys() == expected.keys() and all(
        array.dtype == found[name].dtype
        and array.shape == found[name].shape
        and (
            array.tobytes() == found[name].tobytes()
            if array.dtype != object
            else bool(np.all(array == found[name]))
        )
        for name, array in expected.items()
    )
