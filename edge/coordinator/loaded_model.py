"""A model on its peers, as its coordinator runs it: steps go out, tokens come back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edge.coordinator.acks import Acks
from edge.coordinator.connections import Connections
from edge.coordinator.requests import OnEnd, Request
from edge.coordinator.scheduler import Orders, Scheduler
from edge.errors import CapacityError, EdgeError, PeerError, ProtocolError, RequestError
from edge.protocol.client import PeerClient
from edge.protocol.messages import (
    Place,
    SamplingTerms,
    error_from_header,
    integer,
    printable,
    prompt_to_payload,
    step_to_header,
    text,
)
from edge.protocol.step_times import PeerTimes
from edge.protocol.topology import Seat
from partition import Plan
from transport import Frame


class LoadedModel:
    """Made by `coordinator.load_model`; used from one event loop.

    Any failure of a peer ends the model: its shards may be out of step with each other. The other
    peers are freed, and the requests under way go back to the model's owner.
    """

    def __init__(self, plan: Plan, scheduler: Scheduler, *, vocab_size: int, on_end: OnEnd) -> None:
        self.plan = plan
        self.sent_bytes: dict[str, int] = {}
        self.token_weight_bytes: dict[str, int] = {}
        self.failed = asyncio.Event()
        self.failure: EdgeError | None = None
        self._vocab_size = vocab_size
        self._scheduler = scheduler
        self._on_end = on_end
        self._connections = Connections(plan)
        self._requests: dict[str, Request] = {}
        """Those that are under way."""
        self._unannounced: dict[str, SamplingTerms] = {}
        """How to choose the tokens of those that no peer has heard of yet."""
        self._rows: dict[str, list[NDArray[np.float32]]] = {}
        """Logits so far."""
        self._swap_outs: Acks[PeerClient, str | None] = Acks()
        self._reservations: Acks[PeerClient, str | None] = Acks()
        """Why a peer could not do what it was asked to, or None."""
        self._prefix_matches: Acks[PeerClient, int] = Acks()
        """Tokens of a prompt that a peer has."""
        self._wake = asyncio.Event()
        self._pump_task: asyncio.Task[None] | None = None
        self._release_task: asyncio.Task[None] | None = None

    @property
    def session(self) -> str:
        return self._connections.session

    def adopt(self, seat: Seat, client: PeerClient) -> None:
        """Take over the connection to the peer that runs the shard of this seat."""
        self._connections.adopt(seat, client)
        client.watch(self.fail)

    async def start(self, places: Mapping[Seat, Place]) -> None:
        """Link the shards to each other."""
        await self._connections.link(places)
        self._pump_task = asyncio.create_task(self._pump())

    def submit(self, request: Request) -> None:
        """Start a request, or go on with one that another plan did not finish.

        Whatever becomes of it, its sink is told, or its owner if this model ends.
        """
        if self.failure is not None:
            self._on_end((request,), self.failure)
            return
        terms = request.terms_left
        try:
            self._scheduler.add(
                request.id, request.tokens, new_tokens=terms.max_new_tokens if terms else 0
            )
        except ValueError as error:
            request.sink.failed(RequestError(str(error)))
            return
        self._requests[request.id] = request
        if terms is not None:
            self._unannounced[request.id] = terms
        self._wake.set()

    def cancel(self, request: str) -> None:
        """Forget a request and free its KV cache on every peer; unknown ones are ignored."""
        if self._forget(request) is not None:
            self._scheduler.cancel(request)
            self._wake.set()

    async def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since this was last called, in plan order."""
        return await self._connections.measure()

    async def aclose(self) -> None:
        """Free everything on the peers and hang up. May be called again."""
        self.fail(RequestError("the model is closed; load it again"))
        await self._hang_up()

    async def abort(self) -> None:
        """Hang up at once; the peers free everything in their own time."""
        self.fail(RequestError("the model is closed; load it again"))
        await self._connections.hang_up()
        await self._hang_up()

    def fail(self, error: EdgeError) -> None:
        """The end of the model. Only the first reason counts; others follow from it."""
        if self.failure is not None:
            return
        self.failure = error
        self.failed.set()
        unfinished = tuple(self._requests.values())
        self._requests.clear()
        self._release_task = asyncio.create_task(self._release())
        self._on_end(unfinished, error)

    def on_event(self, client: PeerClient, frame: Frame) -> None:
        """A step's outcome from a peer."""
        if self.failure is not None:
            return
        if frame.kind == "failed":
            self.fail(error_from_header(client.name, frame.header))
            return
        try:
            if frame.kind == "tokens":
                self._on_tokens(client, frame)
            elif frame.kind == "logits":
                self._on_logits(client, frame)
            elif frame.kind == "suspended":
                if outcome := _outcome(self._swap_outs, client, frame):
                    self._scheduler.swapped_out(outcome[0], why_not=outcome[1])
            elif frame.kind == "reserved":
                if outcome := _outcome(self._reservations, client, frame):
                    self._scheduler.reserved(outcome[0], why_not=outcome[1])
            elif frame.kind == "recalled":
                request = text(frame.header, "request")
                matches = self._prefix_matches.add(request, client, integer(frame.header, "tokens"))
                if matches is not None:  # what all have need not be computed
                    self._scheduler.prefix_matched(request, min(matches))
            else:
                raise ProtocolError("not an answer to a step")
        except (ProtocolError, ValueError) as error:
            self.fail(PeerError(client.name, f"sent a malformed {frame.kind[:80]!r}: {error}"))
        self._wake.set()

    def _on_tokens(self, client: PeerClient, frame: Frame) -> None:
        """A token for each entry of the oldest step under way, or none for a chunk."""
        self._connections.check_sampler(client)
        tokens, ends = frame.header.get("tokens"), frame.header.get("ends")
        last = frame.header.get("last")
        if not isinstance(tokens, list) or not isinstance(last, bool):
            raise ProtocolError("tokens are a list, and whether they are the last")
        if not isinstance(ends, list) or len(ends) != len(tokens):
            raise ProtocolError("of each token it must be known whether its reply ends")
        if any(end not in (None, "stop", "length") for end in ends):
            raise ProtocolError("a reply ends with 'stop' or 'length'")
        for token in tokens:
            if not 0 <= integer({"token": token}, "token") < self._vocab_size:
                raise ProtocolError(f"token {token} of a vocabulary of {self._vocab_size}")
        step = self._scheduler.answered(tokens, ends, last=last)
        for entry, token, end in zip(step.entries, tokens, ends, strict=False):
            request = self._requests.get(entry.request)
            if request is None:
                continue  # cancelled while the step was under way
            request.answer.append(token)
            if end is not None:
                self._forget(request.id)
            try:
                if request.sink.token(token, end):
                    self.cancel(request.id)
            except EdgeError as error:  # its text cannot be made; other requests can go on
                self.cancel(request.id)
                request.sink.failed(error)

    def _on_logits(self, client: PeerClient, frame: Frame) -> None:
        self._connections.check_sampler(client)
        step = self._scheduler.answered((), (), last=True)
        rows = np.frombuffer(frame.payload, np.float32)
        if rows.size != step.logit_rows * self._vocab_size:
            raise ProtocolError(f"{rows.size} logits for {step.logit_rows} rows")
        (entry,) = step.entries
        request = self._requests.get(entry.request)
        if request is None:
            return  # cancelled while the step was under way
        parts = self._rows.setdefault(request.id, [])
        parts.append(rows.reshape(step.logit_rows, self._vocab_size))
        if entry.end == len(request.prompt):
            self._forget(request.id)
            request.sink.logits(np.concatenate(parts))

    def _forget(self, request: str) -> Request | None:
        self._rows.pop(request, None)
        return self._requests.pop(request, None)

    async def _pump(self) -> None:
        """The only sender of steps and of what follows them: every peer sees the same order."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while True:
                    orders = self._scheduler.decide()
                    await self._send(orders)
                    if orders.step is None:
                        break
        except EdgeError as error:
            self.fail(error)

    async def _send(self, orders: Orders) -> None:
        peers = self._connections
        if orders.yields:
            await peers.post_sampler("yield")
        for name in orders.finish:
            self._unannounced.pop(name, None)
            await peers.post("finish", {"request": name})
        for given_up in orders.give_up:
            if (request := self._forget(given_up.request)) is not None:  # else cancelled meanwhile
                request.sink.failed(CapacityError(given_up.why))
        for name in orders.swap_out:
            self._swap_outs.ask(name, peers.peers)
            await peers.post("suspend", {"request": name})
        for each in orders.reserve:
            self._reservations.ask(each.request, peers.peers)
            await peers.post("reserve", {"request": each.request, "tokens": each.tokens})
        for match in orders.match_prefix:
            await self._announce(match.request)
            self._prefix_matches.ask(match.request, peers.peers)
            payload = prompt_to_payload(match.prompt)
            await peers.post("recall", {"request": match.request}, payload)
        if orders.step is not None:
            for entry in orders.step.entries:
                await self._announce(entry.request)
            await peers.post("step", step_to_header(orders.step))

    async def _announce(self, name: str) -> None:
        """Tell the last stage how to choose the request's tokens; also if cancelled meanwhile."""
        terms = self._unannounced.pop(name, None)
        if terms is not None:
            header = {"request": name, **terms.to_header()}
            await self._connections.post_last_stage("begin", header)

    async def _hang_up(self) -> None:
        assert self._release_task is not None
        await asyncio.shield(self._release_task)
        await self._connections.hang_up()  # also of those adopted since

    async def _release(self) -> None:
        if self._pump_task is not None:
            self._pump_task.cancel()
            await asyncio.wait([self._pump_task])
        await self._connections.release()


def _outcome(
    acks: Acks[PeerClient, str | None], client: PeerClient, frame: Frame
) -> tuple[str, str | None] | None:
    """A request, and why a peer could not do what all were asked to, once all have answered."""
    request, why_not = text(frame.header, "request"), frame.header.get("why_not")
    if why_not is not None:
        why_not = f"peer {client.name}: {printable(why_not, limit=1000)}"
    answers = acks.add(request, client, why_not)
    if answers is None:
        return None
    return request, next((each for each in answers if each is not None), None)
