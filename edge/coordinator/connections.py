"""The connections to the peers of one loaded plan, by the seats of their shards."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from edge.errors import EdgeError, PeerError, ProtocolError
from edge.protocol.client import PeerClient
from edge.protocol.messages import Place, places_to_payload
from edge.protocol.peer_info import gather_all
from edge.protocol.step_times import PeerTimes
from edge.protocol.topology import Seat, sampler_seat
from partition import Plan

RELEASE_TIMEOUT_S = 10.0
"""How long a peer may take to free a model, the rest of its current step included."""


class Connections:
    """Frames to the shards of a plan, each of which is a session of its peer."""

    def __init__(self, plan: Plan) -> None:
        self.session = uuid.uuid4().hex
        self._last_stage = len(plan.stages) - 1
        self._sampler_seat = sampler_seat(tuple(len(stage.shards) for stage in plan.stages))
        self._clients: dict[Seat, PeerClient] = {}

    def adopt(self, seat: Seat, client: PeerClient) -> None:
        """Take over the connection to the peer that runs the shard of this seat."""
        self._clients[seat] = client

    @property
    def peers(self) -> tuple[PeerClient, ...]:
        return tuple(self._clients.values())

    def check_sampler(self, client: PeerClient) -> None:
        """Raises ProtocolError for any other peer: it knows nothing of the tokens of a step."""
        if client is not self._clients.get(self._sampler_seat):
            raise ProtocolError("only the peer that samples answers steps")

    async def link(self, places: Mapping[Seat, Place]) -> None:
        """Link the shards to each other; all of them at once, since each waits for the others."""
        payload = places_to_payload(places)
        await gather_all(
            client.call("connect", {"session": self.session}, payload) for client in self.peers
        )

    async def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since this was last called, in plan order."""
        times: list[PeerTimes] = []
        for (stage, rank), client in sorted(self._clients.items()):
            answer = await client.call("measure", {"session": self.session})
            try:
                times.append(
                    PeerTimes.from_header(answer.header, name=client.name, stage=stage, rank=rank)
                )
            except (KeyError, TypeError, ValueError) as error:
                raise PeerError(client.name, f"sent malformed times: {error}") from error
        return times

    async def post(self, kind: str, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """To every shard, in the same order for all."""
        for client in self.peers:
            await client.post(kind, {**header, "session": self.session}, payload)

    async def post_sampler(self, kind: str) -> None:
        await self._clients[self._sampler_seat].post(kind, {"session": self.session})

    async def post_last_stage(self, kind: str, header: Mapping[str, Any]) -> None:
        """To those that choose tokens together."""
        for (stage, _rank), client in self._clients.items():
            if stage == self._last_stage:
                await client.post(kind, {**header, "session": self.session})

    async def release(self) -> None:
        """Wait until each peer has freed its shard, as far as it still answers; then hang up."""
        await gather_all(self._release(client) for client in self.peers)

    async def hang_up(self) -> None:
        """At once; the peers free everything in their own time."""
        for client in self.peers:
            await client.aclose()

    async def _release(self, client: PeerClient) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await client.call("close", {"session": self.session})
        except (EdgeError, TimeoutError):
            pass  # it frees the shard when the connection ends
        finally:
            await client.aclose()
