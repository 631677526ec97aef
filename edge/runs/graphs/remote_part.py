"""One part of a graph on one peer: sent, opened, run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from edge.host.free_memory import format_size
from edge.offload import parse_json
from edge.progress import OnProgress
from edge.protocol.client import PeerClient, map_transport_error
from edge.protocol.fields import one_line
from edge.protocol.graph_frames import ClosePart, OpenPart, ProfilePart
from edge.protocol.heartbeat import LINK_TIMEOUT_S
from edge.protocol.part_runs import (
    HELLO,
    RUNS_AT_ONCE,
    STILL_HERE,
    PartAnswer,
    ask,
    receive_answer,
)
from edge.protocol.peer_info import PeerInfo
from edge.runs.shipping import ShardShipment, ship
from edge.transport import EAGER_BYTES, Link, TransportError

_FREED_WITHIN_S = 5.0
_LONGEST_CAUSE = 2000

_ASIDE_BYTES = 1 << 20
"""Tensors of so many bytes are copied in a thread, off the event loop."""
_STILL_HERE_EVERY_S = 600.0
"""Well below the limit of silence on a link."""

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
    stage: int = 0
    buffer_bytes: int
    held_bytes: int
    run_limit_s: float
    profile: bool = False
    plain: bool = False


class RemotePart:
    """A part that is open on a peer. Close with `aclose`."""

    def __init__(
        self,
        part: GraphPart,
        peer: PeerInfo,
        client: PeerClient,
        link: Link,
        session: str,
        held_bytes: int,
    ) -> None:
        """held_bytes: see `OpenPart`."""
        self.part = part
        self.peer = peer
        self._held_bytes = held_bytes
        self.computed_s: list[float] = []
        """Seconds of the newest runs by the peer's clock."""
        self._client, self._link, self._session = client, link, session
        self._is_closing = False
        self._numbers = itertools.count()
        self._turns = asyncio.Semaphore(RUNS_AT_ONCE)
        self._asked_runs: dict[int, tuple[asyncio.Future[PartAnswer], int]] = {}
        """The runs under way, and the size of their inputs."""
        self._sender = ThreadPoolExecutor(1, "edge-graph-sends")
        self._unsent = 0
        """Inputs that the thread that sends has not sent."""
        self._loss: EdgeError | None = None
        self._dropped: list[str] = []
        self._loop = asyncio.get_running_loop()
        client.watch(self._lose)
        self._staying = asyncio.create_task(self._stay())
        self._thread = threading.Thread(target=self._receive, name="edge-graph-part", daemon=True)
        self._thread.start()

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
                    stage=terms.stage,
                    buffer_bytes=terms.buffer_bytes,
                    held_bytes=terms.held_bytes,
                    run_limit_s=terms.run_limit_s,
                    profile=terms.profile,
                    plain=terms.plain,
                )
            )
            try:
                hello = {"name": "coordinator", HELLO: session}
                silent_s = LINK_TIMEOUT_S + terms.run_limit_s
                link = await peer.connect_link(hello, silent_s=silent_s)
            except TransportError as error:
                raise map_transport_error(error, peer.name) from error
        except BaseException as error:
            if client is not None:
                await client.aclose()
            if isinstance(error, EdgeError) and _is_loss(error):
                raise DeviceGoneError(peer.id, error) from error
            if isinstance(error, RequestError):
                raise RequestError(named(part, str(error))) from error
            raise
        return cls(part, peer, client, link, session, terms.held_bytes)

    async def run(
        self, arrays: Arrays, kept: Kept | None = None, fed: asyncio.Event | None = None
    ) -> dict[str, NDArray[Any]]:
        """The part's outputs for these tensors.

        kept: what stays on the peer. fed: set once the run's place among others is sure. Inputs
        wait for their turn. Raises RequestError, which names the node, if the part cannot compute
        them, DeviceGoneError if the peer is lost, and PeerError if it has lost what it kept. A
        cancelled run that was sent ends by itself.
        """
        await self._turns.acquire()  # given back once nothing more comes of the run
        sent = [n for n in self.part.inputs if kept is None or n not in kept.take]
        dropped, self._dropped = self._dropped, [] if kept is not None else self._dropped
        try:
            blob = await self._packed(
                {name: arrays[name] for name in sent},
                None if kept is None else replace(kept, drop=tuple(dropped)),
            )
        except BaseException:
            self._turns.release()
            if kept is not None:
                self._dropped += dropped
            raise
        number, answer = next(self._numbers), self._loop.create_future()
        self._asked_runs[number] = answer, len(blob)
        self._send(number, blob)
        if fed is not None:
            fed.set()
        return self._results(await answer, self.part.outputs if kept is None else kept.give)

    def forget(self, slot: str) -> None:
        """Have the peer drop what it keeps in a slot, with the next run of another one."""
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
        self._staying.cancel()
        with contextlib.suppress(EdgeError):  # else it frees the part when the connection ends
            await self._client.call(ClosePart(session=self._session), limit_s=_FREED_WITHIN_S)
        await self._client.aclose()
        self._lose(PeerLostError(self.peer.name, "the part was closed"))
        await run_blocking(self._ended)
        await asyncio.gather(self._staying, return_exceptions=True)

    def _ended(self) -> None:
        self._thread.join()
        self._sender.shutdown()

    async def _asked(self, call: Any) -> Any:
        try:
            return await self._client.call(call)
        except EdgeError as error:
            if _is_loss(error) or self._is_closing:
                raise DeviceGoneError(self.peer.id, error) from error
            if isinstance(error, RequestError):
                raise RequestError(named(self.part, str(error))) from error
            raise

    async def _packed(self, arrays: Arrays, kept: Kept | None) -> bytes:
        """The inputs of a run as a blob. Raises RequestError if they are too large."""
        others = {} if kept is None else {"kept": kept.to_json()}
        large = sum(array.nbytes for array in arrays.values()) >= _ASIDE_BYTES
        blob = (
            await run_blocking(lambda: pack(arrays, **others)) if large else pack(arrays, **others)
        )
        if len(blob) > self._held_bytes:
            raise RequestError(
                f"inputs of {format_size(len(blob))} are more than the "
                f"{format_size(self._held_bytes)} reserved for what waits",
                remedy="load the graph with a larger sample",
            )
        return blob

    def _send(self, number: int, blob: bytes) -> None:
        """Send inputs behind those of earlier runs: now, if the system's buffers have room for all
        that is under way, so that the loop never waits; else in the thread that sends."""
        if self._loss is not None:
            self._lose(self._loss)
            return
        if not self._unsent and sum(size for _, size in self._asked_runs.values()) <= EAGER_BYTES:
            try:
                ask(self._link, number, blob)
            except TransportError as error:
                self._lose(map_transport_error(error, self.peer.name))
            return
        self._unsent += 1
        sending = self._loop.run_in_executor(self._sender, ask, self._link, number, blob)
        sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Future[None]) -> None:
        self._unsent -= 1
        error = None if sending.cancelled() else sending.exception()
        if isinstance(error, TransportError):
            self._lose(map_transport_error(error, self.peer.name))

    def _receive(self) -> None:
        """Give what comes to the event loop, until the link ends. In a thread of its own."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    answer = receive_answer(self._link, self._held_bytes)
                    self._loop.call_soon_threadsafe(self._take, answer)
            except TransportError as error:
                failure = map_transport_error(error, self.peer.name)
                self._loop.call_soon_threadsafe(self._lose, failure)
            except Exception as error:  # no memory for an answer
                lost = PeerLostError(self.peer.name, f"its answer was not read: {error}")
                self._loop.call_soon_threadsafe(self._lose, lost)

    def _take(self, answer: PartAnswer) -> None:
        future, _size = self._asked_runs.pop(answer.number, (None, 0))
        if future is not None:
            self._turns.release()
            if not future.done():
                future.set_result(answer)
        elif answer.number != STILL_HERE:
            self._lose(PeerLostError(self.peer.name, "it answers what was not asked"))

    def _lose(self, error: EdgeError) -> None:
        """End all runs: the peer is lost, or its link."""
        self._loss = self._loss or error
        self._link.close()
        while self._asked_runs:
            _number, (future, _size) = self._asked_runs.popitem()
            self._turns.release()
            if not future.done():
                future.set_exception(DeviceGoneError(self.peer.id, self._loss))
                future.exception()  # seen, also if its run is over

    async def _stay(self) -> None:
        """Keep both ends of the link from falling silent."""
        while self._loss is None:
            await asyncio.sleep(_STILL_HERE_EVERY_S)
            self._send(STILL_HERE, b"")

    def _results(self, answer: PartAnswer, wanted: Collection[str]) -> dict[str, NDArray[Any]]:
        self.computed_s = [*self.computed_s[-99:], answer.computed_s]
        if answer.failed:
            cause = str(answer.content, "utf-8", "replace")
            raise RequestError(named(self.part, one_line(cause, limit=_LONGEST_CAUSE)))
        try:
            arrays, others = unpack(answer.content)
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
