"""A session as hosted by a peer: its shard engine, its memory, and its links while they are
made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial

from edge.backends.interface import StageProgram
from edge.concurrency.blocking import run_blocking
from edge.engine.kv_copies import KvCopyQuotaShare
from edge.engine.shard_engine import ShardEngine
from edge.errors import NetworkError, ProtocolError
from edge.memory.kv_budget import KvRoom
from edge.memory.step_memory import cache_token_bytes
from edge.offload import Manifest
from edge.peer.backlog import Backlog
from edge.peer.dialling import dial
from edge.protocol.assignment import Assignment
from edge.protocol.draft_frames import DraftSource
from edge.protocol.frame_codec import Event
from edge.protocol.step import MAX_REQUESTS
from edge.protocol.step_times import ExpectedStep
from edge.protocol.topology import Place, Seat
from edge.transport import Credentials, Link, Member

CONNECT_TIMEOUT_S = 20.0
"""Time limit for the shards of a plan to link up, in seconds."""

MAX_REQUESTS_UNDER_WAY = 4 * MAX_REQUESTS
"""Most requests of one session under way, swapped out ones included."""


class HostedShard:
    """One hosted session. Close it with `aclose` in any case."""

    def __init__(
        self,
        assignment: Assignment,
        manifest: Manifest,
        report: Callable[[Event], None],
        kv_room: KvRoom,
        *,
        host_bytes: int = 0,
        kv_host_bytes: int | None = None,
        copy_quota: KvCopyQuotaShare | None = None,
        expected: ExpectedStep | None = None,
        end_reports: Callable[[], None] = lambda: None,
    ) -> None:
        """host_bytes: host memory for its weights, on a device with memory of its own.
        kv_host_bytes: most free host memory for its keys and values; None: the device computes in
        host memory. expected: predicted step times. end_reports: called by `end_waits`, since the
        compute thread may block in `report`.

        Raises CapacityError if `kv_room` has less than the assignment promises.
        """
        self.assignment = assignment
        stage = assignment.plan.stages[assignment.stage]
        self.streamed = stage.slices[assignment.rank].streamed_layers
        """Number of layers read from disk at each step; rebalancing changes it."""
        self.host_bytes = host_bytes
        self.manifest = manifest
        self.kv = kv_room.share(assignment, assignment.layout, host_bytes=kv_host_bytes)
        self._kv_room = kv_room
        self._end_reports = end_reports
        self.backlog = Backlog()
        try:
            self.shard = ShardEngine(assignment, report, copy_quota=copy_quota, expected=expected)
        except BaseException:
            kv_room.give_back(self.kv)
            raise
        # A prompt is matched up to three times: before and after devices exchange what they have
        # of it, and to restore states.
        self._most_prompt_tokens = 6 * (assignment.limits.cached_tokens + self._disk_tokens)
        self._prompt_tokens: dict[str, int] = {}
        """Prompt tokens of each request under way, as far as the engine keeps them."""
        self._arrived: dict[Seat, Link] = {}
        self._from: dict[Seat, str | None] = {}
        """The device at the other end of each accepted link."""
        self._places: Mapping[Seat, Place] | None = None
        self._asks: tuple[str | None] | None = None
        """The device whose sampler may ask for drafts."""
        self._changed = asyncio.Event()
        self._is_connecting = False
        self._connecting: asyncio.Timeout | None = None
        """The time limit of `connect`, while it runs."""
        self._is_connected = False
        self._is_closed = False
        self._kv_is_free = False

    @property
    def _disk_tokens(self) -> int:
        """Tokens whose keys and values fit on its part of the disk, at most those promised."""
        assignment = self.assignment
        token_bytes = cache_token_bytes(assignment.layout, assignment.kv_dtype)
        if not token_bytes:
            return 0
        return min(assignment.limits.disk_tokens, self.kv.disk_bytes // token_bytes)

    def offer(self, seat: Seat, link: Link, member: Member | None) -> bool:
        """Accept a link from `seat`. False if none is expected or the device is not the one in that
        seat.

        The same device may offer again: it gave up on its first link and dialled another address.
        """
        device = None if member is None else member.id
        if seat == self.shard.links.seat:
            return self._offer_questions(link, device)
        is_again = seat in self._arrived and self._from.get(seat, ()) == device
        is_awaited = seat in self.shard.links.neighbours and seat not in self._arrived
        if not (is_awaited or is_again) or self._is_connected or self._is_closed:
            return False
        if self._places is not None and device != self._places[seat].device:
            return False
        if is_again:
            self._arrived[seat].close()
        self._from[seat] = device
        self._arrived[seat] = link
        self._changed.set()
        return True

    def serve_drafts(self, device: str | None) -> None:
        """Accept a link with the questions of this device's sampler. Raises ProtocolError for a
        shard that is no whole model."""
        stages = self.assignment.plan.stages
        if len(stages) > 1 or len(stages[0].shards) > 1:
            raise ProtocolError("a draft model must be on one device")
        self._asks = (device,)

    def _offer_questions(self, link: Link, device: str | None) -> bool:
        if self._asks != (device,) or self._is_closed:
            return False
        self._asks = None
        self.shard.serve_drafts(link)
        return True

    async def ask_drafts(
        self,
        source: DraftSource | None,
        name: str,
        credentials: Credentials | None,
        reached: MutableMapping[str, str],
    ) -> None:
        """Link up with a draft model; None: ask none any more. The others: see `connect`.

        Raises NetworkError if it cannot be reached, and ProtocolError for a shard that does not
        sample.
        """
        if not self.shard.links.is_sampler:
            raise ProtocolError("only the shard that samples asks for drafts")
        if source is None:
            self.shard.draft_model.close()
            return
        to: dict[str, object] = {"stage": 0, "rank": 0, "to_stage": 0, "to_rank": 0}
        hello = {"name": name, "session": source.session, **to}
        link = await dial(source.place, hello, credentials, reached)
        if self._is_closed:
            link.close()
            return
        self.shard.draft_model.connect(
            link,
            context_tokens=source.context_tokens,
            vocab_size=source.vocab_size,
            ahead=source.ahead,
        )

    @property
    def is_as_planned(self) -> bool:
        """Whether it streams as many layers as assigned: rebalancing has not changed it."""
        stage = self.assignment.plan.stages[self.assignment.stage]
        return self.streamed == stage.slices[self.assignment.rank].streamed_layers

    @property
    def neighbour_devices(self) -> frozenset[str | None]:
        """Devices of its neighbours, once `connect` was called."""
        return frozenset(place.device for place in (self._places or {}).values())

    def announce(self, request: str, *, prompt_tokens: int = 0) -> None:
        """Count a request and its prompt until `forget`.

        Raises ProtocolError if a coordinator has too many under way.
        """
        known = self._prompt_tokens
        if request not in known and len(known) >= MAX_REQUESTS_UNDER_WAY:
            raise ProtocolError(f"more than {MAX_REQUESTS_UNDER_WAY} requests are under way")
        most_tokens = self._most_prompt_tokens
        if prompt_tokens and sum(known.values()) + prompt_tokens > most_tokens:
            raise ProtocolError(f"prompts of more than {most_tokens} tokens are under way")
        known[request] = known.get(request, 0) + prompt_tokens

    def save_state(self, request: str, tokens: int, place: int) -> None:
        """See `KvStorage.save_state`. Raises ProtocolError if `place` is out of range."""
        places = self.assignment.limits.saved_states
        if place >= places:
            raise ProtocolError(f"there is no place {place} for a saved state, only {places}")
        self.shard.save_state(request, tokens, place)

    def forget(self, request: str) -> None:
        """Stop counting a request. Unknown ones are ignored."""
        self._prompt_tokens.pop(request, None)

    async def connect(
        self,
        places: Mapping[Seat, Place],
        name: str,
        credentials: Credentials | None,
        reached: MutableMapping[str, str],
    ) -> None:
        """Dial the neighbours in later seats and wait for links from earlier ones. `reached`: see
        `dial`.

        Raises NetworkError naming unreachable devices, and ProtocolError for a second call or a
        neighbour without an address.
        """
        if self._is_connecting:
            raise ProtocolError("this session was already told to connect")
        self._is_connecting = True
        homeless = self.shard.links.neighbours - set(places)
        if homeless:
            raise ProtocolError(f"no address for the neighbours in seats {sorted(homeless)}")
        self._places = places
        for seat, device in self._from.items():
            if device != places[seat].device:
                self._arrived.pop(seat).close()
        stage, rank = self.shard.links.seat
        hello = {"name": name, "session": self.assignment.session, "stage": stage, "rank": rank}
        try:
            async with asyncio.timeout(0 if self._is_closed else CONNECT_TIMEOUT_S) as running:
                self._connecting = running
                for seat in sorted(self.shard.links.neighbours):
                    if seat > self.shard.links.seat:
                        to = {"to_stage": seat[0], "to_rank": seat[1]}
                        self._arrived[seat] = await dial(
                            places[seat], hello | to, credentials, reached
                        )
                while self.shard.links.neighbours - set(self._arrived):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            if self._is_closed:
                raise NetworkError("the session was closed while its shards linked up") from None
            missing = sorted(self.shard.links.neighbours - set(self._arrived))
            names = ", ".join(places[seat].name for seat in missing)
            raise NetworkError(
                f"no link to {names} within {CONNECT_TIMEOUT_S:.0f} s",
                remedy="the devices must reach each other, not only the coordinator: check their "
                "firewalls",
            ) from None
        finally:
            self._connecting = None
        self._is_connected = True
        self.shard.connect(self._arrived, {seat: place.name for seat, place in places.items()})

    def end_waits(self) -> None:
        """End every wait for a neighbour, in a step or while linking up."""
        self._is_closed = True
        self._end_reports()
        if self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(asyncio.get_running_loop().time())
        for link in self._arrived.values():
            link.close()

    async def aclose(self, *, parks: bool = False) -> StageProgram | None:
        """Close the links, end the compute thread and free the memory. With `parks`, returns the
        program open if another session may adopt it."""
        self.end_waits()
        parks = parks and self.is_as_planned
        program = await run_blocking(partial(self.shard.close, parks=parks))
        if not self._kv_is_free:
            self._kv_is_free = True
            self._kv_room.give_back(self.kv)
        return program
