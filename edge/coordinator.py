"""The process that plans, ships, schedules and hands tokens to the caller; it computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import uuid
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import partition
from edge.checkpoint import Checkpoint
from edge.client import PeerClient
from edge.errors import CapacityError, EdgeError, PeerError, PlanError, ProtocolError
from edge.facts import model_facts
from edge.formats import WeightFormat
from edge.generation import GenerationRequest
from edge.layout import shard_layout
from edge.progress import OnProgress, Progress
from edge.scheduler import Scheduler
from edge.session import Seat
from edge.shipping import describe_shard, ship
from edge.wire import Assignment, error_from_header, step_to_header
from partition import ClusterSpec, DeviceSpec, ModelFacts, Plan, Workload
from transport import Frame, parse_address

CHUNK_TOKENS = 256
"""Prompt tokens per step: large enough to fill the matrix kernels, small enough to pipeline."""

LOGIT_CHUNK_TOKENS = 32
"""Tokens per step when every row's logits travel: 32 rows of 150,000 tokens are 19 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """A peer as it described itself."""

    id: str
    name: str
    address: str
    """Where we reached it."""
    addresses: tuple[str, ...]
    """Every address it listens on."""
    backend: str
    threads: int
    memory_bytes: int
    free_bytes: int
    models: tuple[dict[str, Any], ...]

    def device(self) -> DeviceSpec:
        return DeviceSpec(
            id=self.id, name=self.name, memory_bytes=self.free_bytes, threads=self.threads
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is to be loaded."""

    weight_format: WeightFormat
    plan: partition.Parallel | Plan
    workload: Workload
    context_tokens: int
    cache_root: Path


class Sink(Protocol):
    """Where a request's results go; called from the event loop's thread."""

    def token(self, token_id: int) -> bool:
        """A sampled token. True if the reply ends with it."""
        ...

    def logits(self, rows: NDArray[np.float32]) -> None: ...

    def failed(self, error: EdgeError) -> None: ...


async def describe_peer(address: str, *, timeout_s: float = 5.0) -> PeerInfo:
    """Ask the peer at `address` who it is. Raises NetworkError or ProtocolError."""
    client = await PeerClient.connect(address, timeout_s=timeout_s)
    try:
        answer = await client.call("describe")
    finally:
        await client.aclose()
    header = answer.header
    try:
        device = header["device"]
        return PeerInfo(
            id=str(header["id"]),
            name=str(header["name"]),
            address=address,
            addresses=tuple(str(each) for each in header["addresses"]),
            backend=str(device["backend"]),
            threads=int(device["threads"]),
            memory_bytes=int(device["memory_bytes"]),
            free_bytes=int(device["free_bytes"]),
            models=tuple(dict(model) for model in header["models"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{address} describes itself in a form Edge does not know") from error


def make_plan(checkpoint: Checkpoint, peers: Sequence[PeerInfo], options: LoadOptions) -> Plan:
    """The plan asked for, checked against the model and the peers.

    Raises PlanError with every violation, or CapacityError with what is missing on whom.
    """
    facts, cluster = _facts(checkpoint, peers, options)
    try:
        if isinstance(options.plan, Plan):
            plan = by_id(options.plan, peers)
            partition.check_fit(plan, facts, cluster, options.workload)
            return plan
        if options.plan not in ("auto", "pipeline", "tensor"):
            raise PlanError(
                f"plan must be 'auto', 'pipeline', 'tensor' or a Plan, not {options.plan!r}"
            )
        return partition.solve(facts, cluster, options.workload, parallel=options.plan)
    except partition.PlanError as error:
        raise PlanError(str(error), error.problems) from error
    except partition.CapacityError as error:
        raise CapacityError(str(error)) from error


def plan_rows(
    checkpoint: Checkpoint, peers: Sequence[PeerInfo], options: LoadOptions, plan: Plan
) -> list[partition.PlanRow]:
    """What the plan gives each device and costs it."""
    facts, cluster = _facts(checkpoint, peers, options)
    return partition.describe(plan, facts, cluster, options.workload)


def _facts(
    checkpoint: Checkpoint, peers: Sequence[PeerInfo], options: LoadOptions
) -> tuple[ModelFacts, ClusterSpec]:
    facts = model_facts(
        checkpoint.spec,
        options.weight_format,
        name=checkpoint.name,
        embedding_itemsize=checkpoint.embedding_itemsize,
    )
    return facts, ClusterSpec(devices=tuple(peer.device() for peer in peers))


def by_id(plan: Plan, peers: Sequence[PeerInfo]) -> Plan:
    """A plan written with peers' names, with their ids instead."""
    ids = {peer.id for peer in peers}
    names: dict[str, str] = {}
    for peer in peers:
        if peer.name in names:
            names.pop(peer.name)
        else:
            names[peer.name] = peer.id
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(
                    shard
                    if shard.device in ids
                    else replace(shard, device=names.get(shard.device, shard.device))
                    for shard in stage.shards
                ),
            )
            for stage in plan.stages
        ),
    )


@dataclass(slots=True)
class _Active:
    """A request under way."""

    sink: Sink
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    rows_left: int = 0


class LoadedModel:
    """A model on its peers. Made by `load_model`; used from one event loop."""

    def __init__(self, plan: Plan, session: str) -> None:
        self.plan = plan
        self.sent_bytes: dict[str, int] = {}
        self.session = session
        self._clients: list[PeerClient] = []
        self._scheduler = Scheduler(
            chunk_tokens=CHUNK_TOKENS, logit_chunk_tokens=LOGIT_CHUNK_TOKENS
        )
        self._active: dict[str, _Active] = {}
        self._finished: list[str] = []
        self._failure: EdgeError | None = None
        self._wake = asyncio.Event()
        self._pump_task: asyncio.Task[None] | None = None
        self._closing = False

    async def generate(self, request: GenerationRequest, sink: Sink) -> str:
        """Start a reply; its tokens go to the sink. The request's id, for `cancel`."""
        name = self._new_request(sink)
        header = self._header(name) | {"sampling": request.sampling.to_json()}
        await self._post_all("begin", header)
        self._scheduler.add(name, list(request.prompt_ids))
        self._wake.set()
        return name

    async def logits(self, tokens: Sequence[int], sink: Sink) -> str:
        """Start an evaluation; all rows [tokens, vocab] go to the sink at once."""
        name = self._new_request(sink)
        self._active[name].rows_left = len(tokens)
        self._scheduler.add(name, list(tokens), all_logits=True)
        self._wake.set()
        return name

    async def cancel(self, request: str) -> None:
        """Forget a request and free its KV cache on every peer; safe to call at any time."""
        self._scheduler.cancel(request)
        if self._active.pop(request, None) is not None and self._failure is None:
            await self._post_all("finish", self._header(request))

    async def aclose(self) -> None:
        """Free everything on the peers and hang up."""
        self._closing = True
        if self._pump_task is not None:
            self._pump_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump_task
        for client in self._clients:
            await client.aclose()
        self._clients.clear()

    def fail(self, error: EdgeError) -> None:
        """The first failure ends the model: shards may be out of step with each other."""
        if self._failure is None and not self._closing:
            self._failure = error
            for active in self._active.values():
                active.sink.failed(error)
            self._active.clear()

    def on_lost(self, _client: PeerClient, error: EdgeError) -> None:
        self.fail(error)

    def on_event(self, client: PeerClient, frame: Frame) -> None:
        """A token, logits or a failure from a peer."""
        if frame.kind == "failed":
            self.fail(error_from_header(client.name, frame.header))
            return
        name = str(frame.header.get("request"))
        active = self._active.get(name)
        if active is None:
            return  # cancelled while the step was under way
        try:
            if frame.kind == "token":
                self._on_token(name, active, int(frame.header["token"]))
            elif frame.kind == "logits":
                self._on_logits(name, active, frame)
        except (KeyError, TypeError, ValueError) as error:
            self.fail(PeerError(client.name, f"sent a malformed {frame.kind}: {error}"))

    async def start(self, clients: list[PeerClient], addresses: dict[Seat, str]) -> None:
        """Link the shards to each other; all of them at once, since each waits for the others."""
        self._clients = clients
        payload = json.dumps(
            [{"stage": s, "rank": r, "address": a} for (s, r), a in addresses.items()]
        ).encode()
        await gather_all(
            client.call("connect", {"session": self.session}, payload) for client in clients
        )
        self._pump_task = asyncio.create_task(self._pump())

    def _on_token(self, name: str, active: _Active, token: int) -> None:
        if active.sink.token(token):
            self._finish(name)
        else:
            self._scheduler.commit(name, token)
            self._wake.set()

    def _on_logits(self, name: str, active: _Active, frame: Frame) -> None:
        shape = (int(frame.header["rows"]), int(frame.header["columns"]))
        rows = np.frombuffer(frame.payload, np.float32).reshape(shape)
        active.logits.append(rows)
        active.rows_left -= shape[0]
        if active.rows_left <= 0:
            active.sink.logits(np.concatenate(active.logits))
            self._finish(name)

    def _finish(self, name: str) -> None:
        self._finished.append(name)
        self._active.pop(name, None)
        self._scheduler.cancel(name)
        self._wake.set()

    def _new_request(self, sink: Sink) -> str:
        if self._failure is not None:
            raise self._failure
        name = uuid.uuid4().hex
        self._active[name] = _Active(sink)
        return name

    def _header(self, request: str) -> dict[str, Any]:
        return {"session": self.session, "request": request}

    async def _pump(self) -> None:
        """The only sender of steps, so that every peer sees them in the same order."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._finished:
                    await self._post_all("finish", self._header(self._finished.pop()))
                while (step := self._scheduler.next_step()) is not None:
                    header = step_to_header(step) | {"session": self.session}
                    await self._post_all("step", header)
        except EdgeError as error:
            self.fail(error)

    async def _post_all(self, kind: str, header: dict[str, Any]) -> None:
        for client in self._clients:
            await client.post(kind, header)


async def load_model(
    checkpoint: Checkpoint,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    *,
    on_progress: OnProgress,
) -> LoadedModel:
    """Plan, ship what the peers lack, load, link. On any failure nothing stays behind."""
    plan = make_plan(checkpoint, peers, options)
    by_peer = {peer.id: peer for peer in peers}
    source = await asyncio.to_thread(
        checkpoint.source,
        options.weight_format,
        cache_root=options.cache_root / "quantized",
        on_progress=on_progress,
    )
    model = LoadedModel(plan, uuid.uuid4().hex)
    seats = [(stage, rank) for stage, s in enumerate(plan.stages) for rank in range(len(s.shards))]
    clients: dict[Seat, PeerClient] = {}

    async def place(seat: Seat) -> None:
        stage, rank = seat
        peer = by_peer[plan.stages[stage].shards[rank].device]
        layout = shard_layout(checkpoint.spec, plan, stage=stage, rank=rank)
        shipment = await asyncio.to_thread(
            describe_shard,
            layout,
            source,
            options.weight_format,
            fingerprint=checkpoint.store.fingerprint,
            cache_root=options.cache_root / "manifests",
            on_progress=lambda done, total: on_progress(
                Progress(phase="hash", peer=peer.name, done=done, total=total)
            ),
        )

        def connect() -> Awaitable[PeerClient]:
            return PeerClient.connect(peer.address, on_event=model.on_event, on_lost=model.on_lost)

        client, model.sent_bytes[peer.name] = await ship(shipment, connect, on_progress=on_progress)
        clients[seat] = client
        assignment = Assignment(
            session=model.session,
            model=checkpoint.spec,
            plan=plan,
            stage=stage,
            rank=rank,
            weight_format=options.weight_format,
            manifest_digest=shipment.manifest.digest,
            context_tokens=options.context_tokens,
            chunk_tokens=min(CHUNK_TOKENS, options.context_tokens),
        )
        on_progress(Progress(phase="load", peer=peer.name, done=0, total=1))
        await client.call("open", payload=assignment.to_payload())
        on_progress(Progress(phase="load", peer=peer.name, done=1, total=1))

    try:
        await gather_all(place(seat) for seat in seats)
        devices = {seat: by_peer[plan.stages[seat[0]].shards[seat[1]].device] for seat in seats}
        addresses = link_addresses(devices)
        await model.start([clients[seat] for seat in seats], addresses)
    except BaseException:
        for client in clients.values():
            await client.aclose()
        await model.aclose()
        raise
    finally:
        source.close()
    return model


def link_addresses(devices: Mapping[Seat, PeerInfo]) -> dict[Seat, str]:
    """Where each shard's neighbours reach it.

    That is where the coordinator reached it; but a peer beside the coordinator, reached by
    loopback, must be named to others by an address of its own.
    """
    if all(_is_loopback(peer.address) for peer in devices.values()):
        return {seat: peer.address for seat, peer in devices.items()}
    return {
        seat: next(
            (a for a in (peer.address, *peer.addresses) if not _is_loopback(a)), peer.address
        )
        for seat, peer in devices.items()
    }


def _is_loopback(address: str) -> bool:
    host, _port = parse_address(address)
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


async def gather_all(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all at once; the first error cancels the rest, and is raised once they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
