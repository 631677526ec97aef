"""A model on its peers, as its coordinator runs it: steps go out, tokens come back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.coordinator.acks import Answers
from edge.coordinator.generation import GenerationRequest
from edge.coordinator.scheduler import Orders, Scheduler
from edge.errors import CapacityError, EdgeError, PeerError, ProtocolError, RequestError
from edge.protocol.client import PeerClient
from edge.protocol.messages import (
    Place,
    SamplingTerms,
    error_from_header,
    integer,
    places_to_payload,
    printable,
    prompt_to_payload,
    step_to_header,
    text,
)
from edge.protocol.peer_info import gather_all
from edge.protocol.step_times import PeerTimes
from edge.protocol.topology import Seat, sampler_seat
from partition import Plan
from transport import Frame

RELEASE_TIMEOUT_S = 10.0
"""How long a peer may take to free a model, the rest of its current step included."""


class Sink(Protocol):
    """Where a request's results go; called from the event loop's thread."""

    def token(self, token_id: int) -> bool:
        """A sampled token. True if the reply ends with it."""
        ...

    def logits(self, rows: NDArray[np.float32]) -> None: ...

    def failed(self, error: EdgeError) -> None: ...


@dataclass(slots=True)
class _Active:
    """A request under way."""

    sink: Sink
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    rows_left: int = 0


class LoadedModel:
    """Made by `coordinator.load_model`; used from one event loop.

    Any failure of a peer ends the model: its shards may be out of step with each other. All
    requests under way are told, and the other peers are freed.
    """

    def __init__(self, plan: Plan, scheduler: Scheduler, *, vocab_size: int) -> None:
        self.plan = plan
        self.sent_bytes: dict[str, int] = {}
        self.token_weight_bytes: dict[str, int] = {}
        self.session = uuid.uuid4().hex
        self.failed = asyncio.Event()
        self.failure: EdgeError | None = None
        self._vocab_size = vocab_size
        self._sampler_seat = sampler_seat(tuple(len(stage.shards) for stage in plan.stages))
        self._scheduler = scheduler
        self._clients: dict[Seat, PeerClient] = {}
        self._active: dict[str, _Active] = {}
        self._swapping_out: dict[str, Answers[PeerClient, str | None]] = {}
        """Requests whose caches move to disk: of each peer that answered, why it could not."""
        self._reserving: dict[str, Answers[PeerClient, str | None]] = {}
        """The same of those for which there must be room on disk before they are computed."""
        self._matching: dict[str, Answers[PeerClient, int]] = {}
        """Requests whose prompts are looked for, and how much each peer that answered has."""
        self._wake = asyncio.Event()
        self._pump_task: asyncio.Task[None] | None = None
        self._release_task: asyncio.Task[None] | None = None

    def adopt(self, seat: Seat, client: PeerClient) -> None:
        """Take over the connection to the peer that runs the shard of this seat."""
        self._clients[seat] = client
        client.watch(self.fail)

    async def start(self, places: Mapping[Seat, Place]) -> None:
        """Link the shards to each other; all of them at once, since each waits for the others."""
        payload = places_to_payload(places)
        await gather_all(
            client.call("connect", {"session": self.session}, payload)
            for client in self._clients.values()
        )
        self._pump_task = asyncio.create_task(self._pump())

    async def generate(self, request: GenerationRequest, sink: Sink) -> str:
        """Start a reply; its tokens go to the sink. Its id, to cancel."""
        name = self._new_request(sink)
        terms = SamplingTerms(
            sampling=request.sampling,
            end_ids=request.end_ids,
            max_new_tokens=request.max_new_tokens,
        )
        try:
            for client in self._last_stage:
                await client.post("begin", self._header(name) | terms.to_header())
            self._scheduler.add(name, request.prompt_ids, new_tokens=request.max_new_tokens)
        except BaseException:
            self.cancel(name)
            raise
        self._wake.set()
        return name

    async def logits(self, tokens: Sequence[int], sink: Sink) -> str:
        """Start an evaluation; all rows [tokens, vocab] go to the sink at once."""
        name = self._new_request(sink)
        self._active[name].rows_left = len(tokens)
        self._scheduler.add(name, tokens, new_tokens=0)
        self._wake.set()
        return name

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

    def cancel(self, request: str) -> None:
        """Forget a request and free its KV cache on every peer; unknown ones are ignored."""
        if self._active.pop(request, None) is not None:
            self._scheduler.cancel(request)
            self._wake.set()

    async def aclose(self) -> None:
        """Free everything on the peers and hang up. May be called again."""
        self.fail(RequestError("the model is closed; load it again"))
        await self._hang_up()

    async def abort(self) -> None:
        """Hang up at once; the peers free everything in their own time."""
        self.fail(RequestError("the model is closed; load it again"))
        for client in self._clients.values():
            await client.aclose()
        await self._hang_up()

    def fail(self, error: EdgeError) -> None:
        """The end of the model. Only the first reason counts; others follow from it."""
        if self.failure is not None:
            return
        self.failure = error
        self.failed.set()
        for active in self._active.values():
            active.sink.failed(error)
        self._active.clear()
        self._release_task = asyncio.create_task(self._release())

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
                self._on_suspended(client, frame)
            elif frame.kind == "reserved":
                self._on_reserved(client, frame)
            elif frame.kind == "recalled":
                self._on_recalled(client, frame)
            else:
                raise ProtocolError("not an answer to a step")
        except (ProtocolError, ValueError) as error:
            self.fail(PeerError(client.name, f"sent a malformed {frame.kind[:80]!r}: {error}"))
        self._wake.set()

    def _on_tokens(self, client: PeerClient, frame: Frame) -> None:
        """A token for each entry of the oldest step under way, or none for a chunk."""
        self._check_sampler(client)
        tokens, last = frame.header.get("tokens"), frame.header.get("last")
        if not isinstance(tokens, list) or not isinstance(last, bool):
            raise ProtocolError("tokens are a list, and whether they are the last")
        for token in tokens:
            if not 0 <= integer({"token": token}, "token") < self._vocab_size:
                raise ProtocolError(f"token {token} of a vocabulary of {self._vocab_size}")
        step = self._scheduler.answered(tokens, last=last)
        for entry, token in zip(step.entries, tokens, strict=False):
            active = self._active.get(entry.request)
            if active is None:
                continue  # cancelled while the step was under way
            try:
                if active.sink.token(token):
                    self.cancel(entry.request)
            except EdgeError as error:  # its text cannot be made; other requests can go on
                self.cancel(entry.request)
                active.sink.failed(error)

    def _on_logits(self, client: PeerClient, frame: Frame) -> None:
        self._check_sampler(client)
        step = self._scheduler.answered((), last=True)
        rows = np.frombuffer(frame.payload, np.float32)
        if rows.size != step.logit_rows * self._vocab_size:
            raise ProtocolError(f"{rows.size} logits for {step.logit_rows} rows")
        active = self._active.get(step.entries[0].request)
        if active is None:
            return
        active.logits.append(rows.reshape(step.logit_rows, self._vocab_size))
        active.rows_left -= step.logit_rows
        if active.rows_left <= 0:
            active.sink.logits(np.concatenate(active.logits))
            self.cancel(step.entries[0].request)

    def _on_suspended(self, client: PeerClient, frame: Frame) -> None:
        """One peer has moved a request's cache to disk, or says why not."""
        outcome = _outcome(self._swapping_out, client, frame)
        if outcome is not None:
            request, why_not = outcome
            self._scheduler.swapped_out(request, why_not=why_not)

    def _on_reserved(self, client: PeerClient, frame: Frame) -> None:
        """One peer's disk has room for a request that is longer than memory, or why not."""
        outcome = _outcome(self._reserving, client, frame)
        if outcome is not None:
            request, why_not = outcome
            self._scheduler.reserved(request, why_not=why_not)

    def _on_recalled(self, client: PeerClient, frame: Frame) -> None:
        """What one peer has of a prompt; what all have need not be computed."""
        request = text(frame.header, "request")
        if request not in self._matching:
            raise ProtocolError("a request whose prompt was not asked for")
        answers = self._matching[request]
        answers.add(client, integer(frame.header, "tokens"))
        if answers.are_complete:
            del self._matching[request]
            self._scheduler.prefix_matched(request, min(answers.given))

    def _check_sampler(self, client: PeerClient) -> None:
        """Raises ProtocolError for any other peer: it knows nothing of the tokens of a step."""
        if client is not self._clients.get(self._sampler_seat):
            raise ProtocolError("only the peer that samples answers steps")

    def _new_request(self, sink: Sink) -> str:
        if self.failure is not None:
            raise self.failure
        name = uuid.uuid4().hex
        self._active[name] = _Active(sink)
        return name

    def _header(self, request: str) -> dict[str, Any]:
        return {"session": self.session, "request": request}

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
        if orders.yields:
            await self._sampler.post("yield", {"session": self.session})
        for request in orders.finish:
            await self._post_all("finish", self._header(request))
        for given_up in orders.give_up:
            active = self._active.pop(given_up.request, None)
            if active is not None:  # else cancelled meanwhile
                active.sink.failed(CapacityError(given_up.why))
        for request in orders.swap_out:
            self._swapping_out[request] = Answers(self._clients.values())
            await self._post_all("suspend", self._header(request))
        for each in orders.reserve:
            self._reserving[each.request] = Answers(self._clients.values())
            await self._post_all("reserve", self._header(each.request) | {"tokens": each.tokens})
        for match in orders.match_prefix:
            self._matching[match.request] = Answers(self._clients.values())
            payload = prompt_to_payload(match.prompt)
            await self._post_all("recall", self._header(match.request), payload)
        if orders.step is not None:
            await self._post_all("step", step_to_header(orders.step) | {"session": self.session})

    @property
    def _sampler(self) -> PeerClient:
        return self._clients[self._sampler_seat]

    @property
    def _last_stage(self) -> list[PeerClient]:
        """Those that choose tokens together."""
        last = len(self.plan.stages) - 1
        return [client for (stage, _rank), client in self._clients.items() if stage == last]

    async def _post_all(self, kind: str, header: dict[str, Any], payload: bytes = b"") -> None:
        for client in self._clients.values():
            await client.post(kind, header, payload)

    async def _hang_up(self) -> None:
        assert self._release_task is not None
        await asyncio.shield(self._release_task)
        for client in self._clients.values():  # also those adopted since
            await client.aclose()

    async def _release(self) -> None:
        if self._pump_task is not None:
            self._pump_task.cancel()
            await asyncio.wait([self._pump_task])
        await gather_all(self._leave(client) for client in self._clients.values())

    async def _leave(self, client: PeerClient) -> None:
        """Wait until the peer has freed the shard, as far as it still answers; then hang up."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await client.call("close", {"session": self.session})
        except (EdgeError, TimeoutError):
            pass  # it frees the shard when the connection ends
        finally:
            await client.aclose()


def _outcome(
    asked: dict[str, Answers[PeerClient, str | None]], client: PeerClient, frame: Frame
) -> tuple[str, str | None] | None:
    """A request, and why a peer could not do what all were asked to, once all have answered."""
    request, why_not = text(frame.header, "request"), frame.header.get("why_not")
    if request not in asked:
        raise ProtocolError("nothing was asked about this request")
    answers = asked[request]
    if why_not is not None:
        why_not = f"peer {client.name}: {printable(why_not, limit=1000)}"
    answers.add(client, why_not)
    if not answers.are_complete:
        return None
    del asked[request]
    return request, next((each for each in answers.given if each is not None), None)
