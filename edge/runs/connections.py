"""The connections to the peers of one loaded plan, by the seats of their shards."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.errors import EdgeError, PeerError, ProtocolError, RequestError
from edge.partition import Plan
from edge.protocol.client import PeerClient
from edge.protocol.frame_codec import Call, Done, Post
from edge.protocol.kv_frames import PutKv
from edge.protocol.peer_info import gather_all
from edge.protocol.session_frames import Close, Connect, CountSteps, Measure, Observed
from edge.protocol.step_frames import PictureRows
from edge.protocol.step_times import PeerTimes, TokenSteps
from edge.protocol.topology import Place, Seat, sampler_seat

Answer = TypeVar("Answer")

_KV_CALLS_AT_ONCE = 4
"""Calls under way to one peer, so that it receives one while it stores another."""


class Connections:
    """Connections to the shards of a plan; each shard is a session of its peer."""

    def __init__(self, plan: Plan) -> None:
        self.session = uuid.uuid4().hex
        self._plan = plan
        self._sampler_seat = sampler_seat(tuple(len(stage.shards) for stage in plan.stages))
        self._clients: dict[Seat, PeerClient] = {}
        self.picture_seats: list[Seat] = []
        """The shards that look up embeddings of pictures."""

    def adopt(self, seat: Seat, client: PeerClient) -> None:
        """Take over the connection to the peer that runs the shard of this seat."""
        self._clients[seat] = client

    @property
    def peers(self) -> tuple[PeerClient, ...]:
        return tuple(self._clients.values())

    def devices_named(self, name: str) -> frozenset[str]:
        """Ids of the devices whose peers have this name."""
        return frozenset(
            self._plan.stages[stage].shards[rank].device
            for (stage, rank), client in self._clients.items()
            if client.name == name
        )

    def check_sampler(self, client: PeerClient) -> None:
        """Raises ProtocolError for any other peer: only the sampler reports tokens."""
        if client is not self._clients.get(self._sampler_seat):
            raise ProtocolError("only the peer that samples may answer steps")

    def seat_of(self, client: PeerClient) -> Seat:
        """The seat of the peer at this connection."""
        return next(seat for seat, each in self._clients.items() if each is client)

    async def link(self, places: Mapping[Seat, Place]) -> dict[Seat, str | None]:
        """Link the shards to each other. All link at once, because each waits for others.

        Returns the digests of their KV caches.
        """
        connect = Connect(session=self.session, places=places)
        digests: dict[Seat, str | None] = {}

        async def one(seat: Seat, client: PeerClient) -> None:
            digests[seat] = (await client.call(connect)).kv_digest

        await gather_all(one(*each) for each in self._clients.items())
        return digests

    async def measure(self) -> list[PeerTimes]:
        """Each peer's times since the last call, in plan order."""
        times: list[PeerTimes] = []
        for (stage, rank), client in sorted(self._clients.items()):
            told = await client.call(Measure(session=self.session))
            counted = {each.name: getattr(told, each.name) for each in fields(told)}
            times.append(PeerTimes(name=client.name, stage=stage, rank=rank, **counted))
        return times

    async def count_steps(self) -> dict[Seat, TokenSteps]:
        """Each shard's decode steps so far."""
        call = CountSteps(session=self.session)
        found = await gather_all(client.call(call) for client in self._clients.values())
        return dict(zip(self._clients, found, strict=True))

    async def observed(self, seat: Seat, run: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The sums of one of a shard's `observed_runs`: float32 of this shape.

        Raises PeerError for an answer of another shape.
        """
        client = self._clients[seat]
        answer = await client.call(Observed(session=self.session, run=run))
        expected = math.prod(shape) * np.dtype(np.float32).itemsize
        if len(answer.content) != expected:
            raise PeerError(client.name, f"sent {len(answer.content)} bytes for sums of {expected}")
        found = np.frombuffer(answer.content, np.float32).reshape(shape)
        if not np.isfinite(found).all():
            raise PeerError(client.name, "sent sums of inputs with NaN or infinity; restart it")
        return found

    async def post(self, post: Post, *, last_stage: Post | None = None) -> None:
        """Send to every shard in the same order. Shards of the last stage may get another post."""
        for (stage, _rank), client in self._clients.items():
            is_last = stage == self._sampler_seat[0]
            await client.post(post if last_stage is None or not is_last else last_stage)

    async def post_pictures(self, post: PictureRows) -> None:
        """Send rows of pictures to the shards that look them up."""
        for seat in self.picture_seats:
            await self._clients[seat].post(post)

    async def put_kv(self, seat: Seat, calls: Iterable[PutKv]) -> None:
        """Send keys and values to a shard, with few calls under way.

        Raises PeerError if the shard refuses them.
        """
        client = self._clients[seat]
        room = asyncio.Semaphore(_KV_CALLS_AT_ONCE)

        async def put(call: PutKv) -> None:
            async with room:
                await client.call(call)

        try:
            await gather_all(map(put, calls))
        except RequestError as error:
            raise PeerError(client.name, f"refuses its keys and values: {error}") from error

    def name_of(self, seat: Seat) -> str:
        """Name of the peer in a seat. Raises ProtocolError for a seat outside the plan."""
        if seat not in self._clients:
            raise ProtocolError(f"seat {seat} is not in the plan")
        return self._clients[seat].name

    async def ask(self, seat: Seat, post: Post) -> None:
        """Send to one shard. A lost peer is noticed elsewhere."""
        with contextlib.suppress(EdgeError):
            await self._clients[seat].post(post)

    async def post_sampler(self, post: Post) -> None:
        await self._clients[self._sampler_seat].post(post)

    async def call(self, seat: Seat, call: Call[Answer]) -> Answer:
        """Ask the shard in this seat."""
        return await self._clients[seat].call(call)

    async def call_sampler(self, call: Call[Done]) -> None:
        await self.call(self._sampler_seat, call)

    async def release(self, gone: Collection[str] = (), *, parks: bool = False) -> None:
        """Wait until each peer has freed its shard, except lost ones, then disconnect.

        gone: ids of lost devices; an undetected loss is waited for. parks: see `Close`.
        """
        await gather_all(
            client.aclose()
            if self._plan.stages[stage].shards[rank].device in gone
            else self._release(client, parks=parks)
            for (stage, rank), client in self._clients.items()
        )

    async def hang_up(self) -> None:
        """Disconnect at once. The peers then free everything."""
        for client in self.peers:
            await client.aclose()

    async def _release(self, client: PeerClient, *, parks: bool) -> None:
        try:
            await client.call(Close(session=self.session, parks=parks))
        except EdgeError:
            pass  # the peer frees the shard when the connection ends
        finally:
            await client.aclose()
