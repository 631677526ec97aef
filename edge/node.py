"""The peer daemon: listens, announces itself, keeps shards on disk and runs them.

The one file where the control plane (Channels, asyncio) meets the data plane (Links, the compute
thread of each session).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offload
import transport
from edge import __version__
from edge.backends.base import Backend, ShardWeights, open_backend
from edge.client import map_transport_error
from edge.errors import CapacityError, EdgeError, NetworkError, PlanError, ProtocolError
from edge.facts import model_facts
from edge.memory import format_size
from edge.session import Seat, ShardSession
from edge.wire import Assignment, error_to_header, integer, step_from_header, text
from kernels.sampling.reference import SamplingParameters
from offload import CachedShard, Manifest, ShardCache, ShardWriter
from partition import Workload, memory_use
from transport import Channel, Frame, Link

CONNECT_TIMEOUT_S = 20.0
"""How long the shards of a plan may take to link up with each other."""

LINK_TIMEOUT_S = 120.0
"""Silence on a link inside a step. A dead device is noticed within seconds by the connection
itself; this is for one that hangs, and long because a slow neighbour may take a minute a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How one daemon runs."""

    name: str
    listen: str
    threads: int
    memory_bytes: int
    cluster: str
    announce: bool
    interfaces: tuple[str, ...] | None
    cache_root: Path
    cache_limit_bytes: int
    backend: str = "ort"


class PeerNode:
    """One daemon. `start`, then `aclose`; everything it made is gone after that."""

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings
        self.id = uuid.uuid4().hex
        self.sessions: dict[str, _HostedSession] = {}
        self.cache = ShardCache(settings.cache_root, settings.cache_limit_bytes)
        self._backend: Backend | None = None
        self._listener: transport.Listener | None = None
        self._discovery: transport.Discovery | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        assert self._listener is not None
        return self._listener.addresses

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            self._backend = open_backend(self.settings.backend, threads=self.settings.threads)
        return self._backend

    @property
    def reserved_bytes(self) -> int:
        return sum(hosted.reserved_bytes for hosted in self.sessions.values())

    async def start(self) -> None:
        """Listen, then announce. Raises NetworkError when the address cannot be used."""
        try:
            self._listener = await transport.listen(
                self.settings.listen,
                hello={"name": self.settings.name, "id": self.id, "software": __version__},
                on_channel=self._serve,
                on_link=self._take_link,
                link_timeout_s=LINK_TIMEOUT_S,
            )
            if self.settings.announce:
                self._discovery = transport.ZeroconfDiscovery(
                    cluster=self.settings.cluster, interfaces=self.settings.interfaces
                )
                await self._discovery.announce(
                    transport.PeerRecord(
                        id=self.id,
                        name=self.settings.name,
                        cluster=self.settings.cluster,
                        addresses=self.addresses,
                        protocol=transport.PROTOCOL_VERSION,
                        properties={},
                    )
                )
        except transport.TransportError as error:
            raise map_transport_error(error, self.settings.name) from error
        except OSError as error:
            raise NetworkError(f"cannot announce this peer: {error}") from error

    async def aclose(self) -> None:
        if self._discovery is not None:
            await self._discovery.aclose()
        if self._listener is not None:
            await self._listener.aclose()

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.settings.name,
            "software": __version__,
            "addresses": list(self.addresses),
            "device": {
                "backend": self.settings.backend,
                "threads": self.settings.threads,
                "memory_bytes": self.settings.memory_bytes,
                "free_bytes": max(0, self.settings.memory_bytes - self.reserved_bytes),
            },
            "models": [
                {
                    "name": hosted.assignment.plan.model,
                    "dtype": hosted.assignment.weight_format.name,
                    "stage": hosted.assignment.stage,
                    "rank": hosted.assignment.rank,
                    "bytes": hosted.reserved_bytes,
                }
                for hosted in self.sessions.values()
            ],
        }

    async def _serve(self, channel: Channel) -> None:
        async with _Conversation(self, channel) as conversation:
            await conversation.run()

    async def _take_link(self, link: Link, hello: Mapping[str, Any]) -> None:
        """A neighbour's link for one of our sessions; anything else is closed."""
        try:
            hosted = self.sessions.get(text(hello, "session"))
            seat = (integer(hello, "stage"), integer(hello, "rank"))
        except ProtocolError:
            hosted = None
        if hosted is None or not hosted.offer(seat, link):
            link.close()


class _HostedSession:
    """A session on this peer, and the links to it that are still being made."""

    def __init__(
        self, assignment: Assignment, reserved_bytes: int, report: Callable[[Frame], None]
    ) -> None:
        self.assignment = assignment
        self.reserved_bytes = reserved_bytes
        self.shard = ShardSession(assignment, report)
        self._arrived: dict[Seat, Link] = {}
        self._changed = asyncio.Event()
        self._connected = False

    def offer(self, seat: Seat, link: Link) -> bool:
        """A link from `seat`; False if it is not awaited."""
        if seat not in self.shard.neighbours or seat in self._arrived or self._connected:
            return False
        self._arrived[seat] = link
        self._changed.set()
        return True

    async def connect(self, addresses: Mapping[Seat, str], name: str) -> None:
        """Dial the neighbours that come after us, await those before. Raises NetworkError."""
        stage, rank = self.shard.seat
        hello = {
            "name": name,
            "session": self.assignment.session,
            "stage": stage,
            "rank": rank,
        }
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                for seat in sorted(self.shard.neighbours):
                    if seat > self.shard.seat:
                        if seat not in addresses:
                            raise PlanError(f"no address for stage and rank {seat}")
                        link = await transport.connect_link(
                            addresses[seat], hello=hello, link_timeout_s=LINK_TIMEOUT_S
                        )
                        self._arrived[seat] = link
                while self.shard.neighbours - set(self._arrived):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = sorted(self.shard.neighbours - set(self._arrived))
            raise NetworkError(
                f"no link from stage and rank {missing} within {CONNECT_TIMEOUT_S:.0f} s; "
                "the devices must reach each other, not only the coordinator: check firewalls"
            ) from None
        except transport.TransportError as error:
            raise map_transport_error(error, "neighbour") from error
        self._connected = True
        self.shard.connect(self._arrived)

    async def aclose(self) -> None:
        for link in self._arrived.values():
            link.close()
        await asyncio.to_thread(self.shard.close)


class _Conversation:
    """One coordinator's channel. What it opened is closed when it goes away."""

    def __init__(self, node: PeerNode, channel: Channel) -> None:
        self._node = node
        self._channel = channel
        self._writers: dict[str, ShardWriter] = {}
        self._sealed: dict[str, CachedShard] = {}
        self._mine: dict[str, _HostedSession] = {}
        self._outbox: asyncio.Queue[Frame] = asyncio.Queue()
        self._resources = ExitStack()
        self._calls: dict[str, Callable[[Frame], Awaitable[tuple[dict[str, Any], bytes]]]] = {
            "describe": self._describe,
            "offer": self._offer,
            "piece": self._piece,
            "seal": self._seal,
            "open": self._open,
            "connect": self._connect,
            "close": self._close,
        }
        self._posts: dict[str, Callable[[Frame], None]] = {
            "begin": self._begin,
            "step": self._step,
            "finish": self._finish,
        }

    async def __aenter__(self) -> _Conversation:
        self._sender = asyncio.create_task(self._send_reports())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sender.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sender
        for session in list(self._mine):
            await self._end_session(session)
        for writer in self._writers.values():
            await asyncio.to_thread(writer.close)
        await asyncio.to_thread(self._resources.close)

    async def run(self) -> None:
        """Answer frames until the coordinator goes away or talks nonsense."""
        with contextlib.suppress(transport.TransportError):
            while True:
                await self._handle(await self._channel.receive())

    async def _handle(self, frame: Frame) -> None:
        post = self._posts.get(frame.kind)
        if post is not None:
            try:
                post(frame)
            except (EdgeError, ValueError) as error:
                request = frame.header.get("request")
                header = {"request": request, **error_to_header(error)}
                await self._channel.send(Frame(kind="failed", header=header))
            return
        call_id = frame.header.get("call")
        try:
            call = self._calls.get(frame.kind)
            if call is None:
                raise ProtocolError(f"{frame.kind!r} is not something a peer does")
            header, payload = await call(frame)
            answer = Frame(kind="ok", header={**header, "call": call_id}, payload=payload)
        except (EdgeError, offload.StoreError, ValueError, OSError, RuntimeError) as error:
            answer = Frame(
                kind="failed", header={**error_to_header(_mapped(error)), "call": call_id}
            )
        await self._channel.send(answer)

    async def _describe(self, _frame: Frame) -> tuple[dict[str, Any], bytes]:
        return self._node.describe(), b""

    async def _offer(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        manifest = Manifest.from_json(bytes(frame.payload))
        digest = manifest.digest
        missing: tuple[str, ...] = ()
        if digest not in self._sealed:
            if digest not in self._writers:
                begun = await asyncio.to_thread(self._node.cache.begin, manifest)
                if isinstance(begun, CachedShard):
                    self._keep(digest, begun)
                else:
                    self._writers[digest] = begun
            if digest in self._writers:
                missing = self._writers[digest].missing
        return {"manifest": digest}, json.dumps(missing).encode()

    async def _piece(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        writer = self._writer(frame)
        await asyncio.to_thread(writer.put, text(frame.header, "digest"), frame.payload)
        return {}, b""

    async def _seal(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        digest = text(frame.header, "manifest")
        if digest not in self._sealed:
            writer = self._writer(frame)
            self._keep(digest, await asyncio.to_thread(writer.finish))
            del self._writers[digest]
        return {}, b""

    def _writer(self, frame: Frame) -> ShardWriter:
        writer = self._writers.get(text(frame.header, "manifest"))
        if writer is None:
            raise ProtocolError("a piece of a shard that was not offered")
        return writer

    def _keep(self, digest: str, cached: CachedShard) -> None:
        """Hold the shard in the cache for as long as this coordinator may load it."""
        self._sealed[digest] = self._resources.enter_context(cached)

    async def _open(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        assignment = Assignment.from_payload(frame.payload)
        if assignment.session in self._node.sessions:
            raise ProtocolError("this session is open already")
        cached = self._sealed.get(assignment.manifest_digest)
        if cached is None:
            raise ProtocolError("a shard that was not sent")
        reserved = self._reserve(assignment)
        loop = asyncio.get_running_loop()

        def report(event: Frame) -> None:
            with contextlib.suppress(RuntimeError):  # the loop ended while a step was under way
                loop.call_soon_threadsafe(self._outbox.put_nowait, event)

        hosted = _HostedSession(assignment, reserved, report)
        self._node.sessions[assignment.session] = hosted
        self._mine[assignment.session] = hosted
        try:
            weights = ShardWeights(path=cached.path, manifest=cached.manifest)
            loaded = await asyncio.wrap_future(hosted.shard.load(self._node.backend, weights))
        except BaseException:
            await self._end_session(assignment.session)
            raise
        return {"weight_bytes": loaded}, b""

    def _reserve(self, assignment: Assignment) -> int:
        """The bytes this shard needs here. Raises CapacityError when they are not free."""
        spec, weight_format = assignment.model, assignment.weight_format
        facts = model_facts(spec, weight_format, name=assignment.plan.model, embedding_itemsize=4)
        use = memory_use(
            assignment.plan,
            facts,
            Workload(prompt_tokens=assignment.context_tokens, output_tokens=0),
        )
        shard = assignment.plan.stages[assignment.stage].shards[assignment.rank]
        need = use[shard.device].total
        free = self._node.settings.memory_bytes - self._node.reserved_bytes
        if need > free:
            raise CapacityError(
                f"this shard needs {format_size(need)} and {format_size(free)} are free: "
                f"{format_size(need - free)} are missing. Give it --memory, a smaller dtype, "
                "or share the model with more peers"
            )
        return need

    async def _connect(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        hosted = self._session(frame)
        addresses: dict[Seat, str] = {}
        for entry in json.loads(bytes(frame.payload)):
            addresses[(integer(entry, "stage"), integer(entry, "rank"))] = text(entry, "address")
        await hosted.connect(addresses, self._node.settings.name)
        return {}, b""

    async def _close(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        await self._end_session(text(frame.header, "session"))
        return {}, b""

    def _begin(self, frame: Frame) -> None:
        sampling = SamplingParameters.from_json(frame.header.get("sampling"))
        self._session(frame).shard.begin(text(frame.header, "request"), sampling)

    def _step(self, frame: Frame) -> None:
        self._session(frame).shard.step(step_from_header(frame.header))

    def _finish(self, frame: Frame) -> None:
        self._session(frame).shard.finish(text(frame.header, "request"))

    def _session(self, frame: Frame) -> _HostedSession:
        hosted = self._mine.get(text(frame.header, "session"))
        if hosted is None:
            raise ProtocolError("a session that is not open")
        return hosted

    async def _end_session(self, session: str) -> None:
        hosted = self._mine.pop(session, None)
        if hosted is not None:
            await hosted.aclose()
            self._node.sessions.pop(session, None)

    async def _send_reports(self) -> None:
        with contextlib.suppress(transport.TransportError):
            while True:
                await self._channel.send(await self._outbox.get())


def _mapped(error: Exception) -> Exception:
    """Errors of lower packages as ours, so that the coordinator can raise them by kind."""
    if isinstance(error, offload.StoreFullError):
        return CapacityError(str(error))
    if isinstance(error, CancelledError):
        return PlanError("the session was closed while it was loading")
    if isinstance(error, json.JSONDecodeError | RecursionError):
        return ProtocolError(f"malformed JSON: {error}")
    return error
