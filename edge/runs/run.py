"""A model on its peers, as its coordinator runs it: steps go out, tokens come back."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.answers.answer import OnEnd, Request
from edge.answers.copies import Copy, HeldLayer, KvCopies, KvLayout
from edge.errors import (
    CapacityError,
    EdgeError,
    PeerError,
    PeerLostError,
    ProtocolError,
    RequestError,
)
from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.rules import Bits
from edge.partition import Plan
from edge.planning.kv_copies import MOST_KEPT_KV_BYTES
from edge.protocol import messages
from edge.protocol.assignment import Copies
from edge.protocol.client import IT_LEAVES, PeerClient
from edge.protocol.error_codec import Failed
from edge.protocol.fields import printable, token_bytes
from edge.protocol.frame_codec import Event
from edge.protocol.peer_info import gather_all
from edge.protocol.step import SamplingTerms
from edge.protocol.step_times import PeerTimes
from edge.protocol.token_masks import write_masks
from edge.protocol.topology import Place, Seat
from edge.runs.acks import Acks
from edge.runs.connections import Connections
from edge.runs.dead_links import DeadLinks, Silence
from edge.scheduling.decide import Scheduler
from edge.scheduling.orders import Orders
from edge.scheduling.work import Work
from edge.transport.frame import Buffer

_log = logging.getLogger(__name__)


class PlanRun:
    """Made by `coordinator.load_model`; used from one event loop.

    Any failure of a peer ends the model: its shards may be out of step with each other. The other
    peers are freed, and the requests under way go back to the model's owner.
    """

    def __init__(
        self,
        plan: Plan,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        hidden_size: int,
        on_end: OnEnd,
        copies_kv: Copies = "none",
        kv_is_rounded: bool = False,
    ) -> None:
        """copies_kv: of what the peers send copies of the keys and values."""
        self.plan = plan
        self.held: dict[Seat, tuple[HeldLayer, ...]] = {}
        """The layers of which each shard keeps keys and values."""
        self.manifests: dict[Seat, str] = {}
        """The digest of each shard's weights."""
        self._copies_kv = copies_kv
        self._kv_is_rounded = kv_is_rounded
        self._kv_form: KvLayout | None = None
        self.sent_bytes: dict[str, int] = {}
        self.token_weight_bytes: dict[str, int] = {}
        self.failed = asyncio.Event()
        self.failure: EdgeError | None = None
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._scheduler = scheduler
        self._on_end = on_end
        self._connections = Connections(plan)
        self._requests: dict[str, Request] = {}
        """Those that are under way."""
        self._unannounced: dict[str, SamplingTerms] = {}
        """How to choose the tokens of those that no peer has heard of yet."""
        self._masks: dict[str, Bits] = {}
        """What the next token may be of those that keep to a grammar."""
        self._rows: dict[str, list[NDArray[np.float32]]] = {}
        """Logits or hidden states so far."""
        self._swap_outs: Acks[PeerClient, str | None] = Acks()
        self._reservations: Acks[PeerClient, str | None] = Acks()
        """Why a peer could not do what it was asked to, or None."""
        self._prefix_matches: Acks[PeerClient, int] = Acks()
        """Tokens of a prompt that a peer has."""
        self._handlers: dict[type[Event], Callable[[PeerClient, Any], None]] = {
            messages.KvRows: self._on_kv_rows,
            messages.Tokens: self._on_tokens,
            messages.Logits: self._on_logits,
            messages.States: self._on_states,
            messages.SwappedOut: self._on_swapped_out,
            messages.Reserved: self._on_reserved,
            messages.PrefixMatched: self._on_prefix_matched,
            messages.Waits: self._on_waits,
            messages.LinkSent: self._on_link_sent,
            Failed: self._on_failed,
        }
        self._stalls = DeadLinks()
        self._clock_ahead_s = math.inf
        """The clock here less that of the device that chooses, by the answer that came fastest."""
        self._asking: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._pump_task: asyncio.Task[None] | None = None
        self._release_task: asyncio.Task[None] | None = None

    @property
    def session(self) -> str:
        return self._connections.session

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those that are under way."""
        return tuple(self._requests.values())

    @property
    def work(self) -> Work:
        """What its peers were given to compute."""
        return self._scheduler.work

    @property
    def blamed(self) -> frozenset[str]:
        """The ids of the devices that went away, as far as the failure names them."""
        if not isinstance(self.failure, PeerLostError):
            return frozenset()
        return self._connections.devices_named(self.failure.peer)

    def adopt(self, seat: Seat, client: PeerClient) -> None:
        """Take over the connection to the peer that runs the shard of this seat."""
        self._connections.adopt(seat, client)
        client.listen(self.on_event)
        client.watch(self.fail, self.leaving)

    async def start(
        self,
        places: Mapping[Seat, Place],
        *,
        rows_agree: bool = False,
        batches_agree: bool = False,
    ) -> None:
        """Link the shards to each other. `rows_agree` and `batches_agree`: see `messages.Opened`,
        of all of them."""
        if rows_agree:
            self._scheduler.rows_agree()
        if batches_agree:
            self._scheduler.batches_agree()
        digests = await self._connections.link(places)
        told = {seat: digest for seat, digest in digests.items() if digest is not None}
        if self._copies_kv != "none" and len(told) == len(digests):
            self._kv_form = KvLayout(
                layers=dict(self.held), digests=told, is_rounded=self._kv_is_rounded
            )
        self._pump_task = asyncio.create_task(self._pump())

    def submit(self, request: Request) -> None:
        """Start a request, or go on with one that another plan did not finish.

        Whatever becomes of it, its sink is told, or its owner if this model ends.
        """
        if self.failure is not None:
            self._on_end((request,), self.failure)
            return
        terms = request.terms_left
        restored = self._restored(request)
        try:
            self._scheduler.add(
                request.id,
                request.prompt,
                answer=request.answer,
                restored=max(0, restored - len(request.prompt)),
                restores_prompt=bool(restored and request.kept and not request.kept.first),
                new_tokens=terms.max_new_tokens if terms else 0,
                singly=request.singly,
                is_repeated=bool(request.answer),
                is_led=request.matcher is not None,
                who=request.who,
                salt=request.cache_salt,
                rows=request.rows,
            )
        except ValueError as error:
            request.sink.failed(RequestError(str(error)))
            return
        self._requests[request.id] = request
        if terms is not None:
            self._unannounced[request.id] = terms
        self._lead(request)
        self._wake.set()

    def _restored(self, request: Request) -> int:
        """Up to which token keys and values are given back, not computed again; 0 for none."""
        kept, form = request.kept, self._kv_form
        request.kept = None
        if form is None or request.terms is None:
            return 0
        prompt, answered = len(request.prompt), len(request.answer)
        if kept is not None and kept.form.serves(form):
            last = kept.last(prompt + answered - 1)
            if last > prompt:
                request.kept = kept.put_into(form, last)
                return last
        first = 0 if self._copies_kv == "all" else prompt
        request.kept = KvCopies(form=form, first=first)
        return 0

    def _on_kv_rows(self, client: PeerClient, event: messages.KvRows) -> None:
        seat = self._connections.seat_of(client)
        room = MOST_KEPT_KV_BYTES[self._copies_kv]
        room -= sum(each.kept.num_bytes for each in self._requests.values() if each.kept)
        for part, rows in event.each():
            request = self._requests.get(part.request)
            if request is None or request.kept is None or len(rows) > room:
                continue  # it is over, or there are too many
            # The sampler's connection is another one: it may tell of these tokens later.
            copy = Copy(first=part.first, tokens=part.tokens, rows=bytes(rows))
            if request.kept.add(seat, copy):
                room -= len(rows)

    def cancel(self, request: str) -> None:
        """Forget a request and free its KV cache on every peer; unknown ones are ignored."""
        if self._forget(request) is not None:
            self._scheduler.cancel(request)
            self._wake.set()

    async def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since this was last called, in plan order."""
        return await self._connections.measure()

    async def observed(self, seat: Seat, run: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """What one shard has summed up of one of its `observed_runs`: float32 of this shape."""
        return await self._connections.observed(seat, run, shape)

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

    def leaving(self, client: PeerClient) -> None:
        """The peer's user has stopped it. It still computes, and goes once its session is closed,
        or within `LEAVES_WITHIN_S`."""
        self.fail(PeerLostError(client.name, IT_LEAVES))

    def on_event(self, client: PeerClient, event: Event) -> None:
        """A step's outcome from a peer."""
        if self.failure is not None:
            return
        try:
            self._handlers[type(event)](client, event)
        except (ProtocolError, ValueError) as error:
            self.fail(PeerError(client.name, f"sent a malformed {event.kind!r}: {error}"))
        self._wake.set()

    def _on_failed(self, client: PeerClient, event: Failed) -> None:
        self.fail(event.as_error(client.name))

    def _on_swapped_out(self, client: PeerClient, event: messages.SwappedOut) -> None:
        if outcome := _outcome(self._swap_outs, client, event):
            self._scheduler.swapped_out(outcome[0], why_not=outcome[1])

    def _on_reserved(self, client: PeerClient, event: messages.Reserved) -> None:
        if outcome := _outcome(self._reservations, client, event):
            self._scheduler.reserved(outcome[0], why_not=outcome[1])

    def _on_prefix_matched(self, client: PeerClient, event: messages.PrefixMatched) -> None:
        matches = self._prefix_matches.add(event.request, client, event.tokens)
        if matches is not None:  # what all have need not be computed
            found = self._scheduler.matched(event.request, min(matches))
            if (request := self._requests.get(event.request)) is not None:
                request.found_tokens = found
                request.singly = self._scheduler.made_singly(event.request)

    def _on_waits(self, client: PeerClient, event: messages.Waits) -> None:
        receiver, sender = self._connections.seat_of(client), (event.stage, event.rank)
        self._connections.name_of(sender)  # who is nobody is not asked
        silence = Silence(received=event.received, since_s=time.monotonic() - event.silent_s)
        self._stalls.waits(receiver, sender, silence)
        question = messages.AskLink(session=self.session, stage=receiver[0], rank=receiver[1])
        asking = asyncio.create_task(self._connections.ask(sender, question))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    def _on_link_sent(self, client: PeerClient, event: messages.LinkSent) -> None:
        receiver, sender = (event.stage, event.rank), self._connections.seat_of(client)
        to = self._connections.name_of(receiver)
        waited_s = self._stalls.began(receiver, sender, event.sent, now_s=time.monotonic())
        if waited_s is not None:
            self.fail(
                PeerLostError(
                    client.name,
                    f"what it sends to {to} has not arrived there for {waited_s:.1f} s",
                )
            )

    def _on_tokens(self, client: PeerClient, event: messages.Tokens) -> None:
        """A token for each entry of the oldest step under way, or none for a chunk."""
        self._connections.check_sampler(client)
        tokens, ends = event.tokens, event.ends
        for token in tokens:
            if token >= self._vocab_size:
                raise ProtocolError(f"token {token} of a vocabulary of {self._vocab_size}")
        step = self._scheduler.answered(tokens, ends, last=event.last, at_s=event.chosen_s)
        self._clock_ahead_s = min(self._clock_ahead_s, time.monotonic() - event.chosen_s)
        chosen_s = event.chosen_s + self._clock_ahead_s
        logprobs = event.logprobs or (None,) * len(tokens)
        for entry, token, end, each in zip(step.entries, tokens, ends, logprobs, strict=False):
            request = self._requests.get(entry.request)
            if request is None:
                continue  # cancelled while the step was under way
            self._check_logprobs(request, each)
            request.answer.append(token)
            if end is not None:
                self._forget(request.id)
            try:
                if request.sink.token(token, end, chosen_s, each):
                    self.cancel(request.id)
                elif end is None:
                    self._lead(request, token)
            except EdgeError as error:  # its text cannot be made; other requests can go on
                self.cancel(request.id)
                request.sink.failed(error)

    def _lead(self, request: Request, token: int | None = None) -> None:
        """Find what its next token may be, after this one; here, where its failure is its own."""
        if request.matcher is None:
            return
        try:
            if token is not None:
                request.matcher.take(token)
            self._masks[request.id] = request.matcher.allowed()
        except EdgeError as error:
            self.cancel(request.id)
            request.sink.failed(error)

    def _check_logprobs(self, request: Request, logprobs: Logprobs | None) -> None:
        """Raises ProtocolError unless they are what the request asked for."""
        asked = request.terms.logprobs if request.terms else None
        if (asked is None) != (logprobs is None):
            raise ProtocolError("logprobs where none were asked for, or none where they were")
        if asked is None or logprobs is None:
            return
        if len(logprobs.top) != min(asked, self._vocab_size):
            raise ProtocolError(
                f"{len(logprobs.top)} likeliest tokens, where {asked} were asked for"
            )
        if any(token >= self._vocab_size for token, _logprob in logprobs.top):
            raise ProtocolError(f"a likeliest token outside a vocabulary of {self._vocab_size}")

    def _on_logits(self, client: PeerClient, event: messages.Logits) -> None:
        self._take_rows(client, event.rows, self._vocab_size, states=False)

    def _on_states(self, client: PeerClient, event: messages.States) -> None:
        self._take_rows(client, event.rows, self._hidden_size, states=True)

    def _take_rows(self, client: PeerClient, found: Buffer, columns: int, *, states: bool) -> None:
        self._connections.check_sampler(client)
        step = self._scheduler.answered((), (), last=True)
        rows = np.frombuffer(found, np.float32)
        if step.states != states or rows.size != step.logit_rows * columns:
            raise ProtocolError(f"{rows.size} values for {step.logit_rows} rows of {columns}")
        (entry,) = step.entries
        request = self._requests.get(entry.request)
        if request is None:
            return  # cancelled while the step was under way
        parts = self._rows.setdefault(request.id, [])
        parts.append(rows.reshape(step.logit_rows, columns))
        if entry.end == len(request.prompt):
            self._forget(request.id)
            request.sink.rows(np.concatenate(parts))

    def _forget(self, request: str) -> Request | None:
        self._rows.pop(request, None)
        self._masks.pop(request, None)
        forgotten = self._requests.pop(request, None)
        if forgotten is not None:
            forgotten.kept = None  # megabytes, and who asked may hold on to the request
        return forgotten

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
        except Exception as error:  # a defect here: nobody is left waiting for a reply
            _log.exception("deciding on the next step failed")
            self.fail(
                EdgeError(f"the coordinator failed ({error!r})", remedy="load the model again")
            )

    async def _send(self, orders: Orders) -> None:
        peers, session = self._connections, self.session
        if orders.yields:
            await peers.post_sampler(messages.YieldRun(session=session))
        for save in orders.save:
            await peers.post(
                messages.SaveState(
                    session=session, request=save.request, tokens=save.tokens, place=save.place
                )
            )
        for name in orders.finish:
            self._unannounced.pop(name, None)
            await peers.post(messages.Finish(session=session, request=name))
        for name, kept in orders.keep.items():
            self._unannounced.pop(name, None)
            await peers.post(
                messages.Finish(
                    session=session,
                    request=name,
                    kept_tokens=kept.tokens,
                    answer=token_bytes(kept.answer),
                )
            )
        for name in orders.drop:
            await peers.post(messages.Finish(session=session, request=name))
        for name, why in orders.give_up.items():
            if (request := self._forget(name)) is not None:  # else cancelled meanwhile
                request.sink.failed(CapacityError(why))
        for name in orders.swap_out:
            self._swap_outs.ask(name, peers.peers)
            await peers.post(messages.SwapOut(session=session, request=name))
        for name, tokens in orders.reserve.items():
            self._reservations.ask(name, peers.peers)
            await peers.post(messages.Reserve(session=session, request=name, tokens=tokens))
        for name, match in orders.match.items():
            self._prefix_matches.ask(name, peers.peers)
            await peers.post(
                messages.MatchPrefix(
                    session=session,
                    request=name,
                    salt=match.salt or None,
                    source=match.source,
                    tokens=match.tokens,
                    moves=match.moves,
                    prompt=token_bytes(match.prompt),
                )
            )
        for name in orders.restore:
            await self._restore(name)
        if orders.step is not None:
            # Also of those that were cancelled meanwhile: the peers hear of that after the step.
            new = [e.request for e in orders.step.entries if e.request in self._unannounced]
            terms = {name: self._unannounced.pop(name) for name in new}
            step = messages.RunStep(session=session, step=orders.step, terms=terms)
            await peers.post(step, last_stage=self._with_masks(step))

    def _with_masks(self, step: messages.RunStep) -> messages.RunStep:
        masked = tuple(
            entry.request
            for entry in step.step.entries
            if entry.logit_rows and entry.request in self._masks
        )
        masks = write_masks([self._masks[name] for name in masked])
        return replace(step, masked=masked, masks=masks) if masked else step

    async def _restore(self, name: str) -> None:
        """Give every shard the keys and values that it, or who sat there before, has sent.

        Raises PeerError where one refuses them: they are forgotten then.
        """
        request = self._requests.get(name)
        if request is None or request.kept is None:
            return  # cancelled meanwhile: the peers hear of that next
        known, session = [*request.prompt, *request.answer], self.session

        def calls(copies: Sequence[Copy]) -> Iterator[messages.PutKv]:
            for copy in copies:
                yield messages.PutKv(
                    session=session,
                    request=name,
                    first=copy.first,
                    tokens=tuple(known[copy.first : copy.last]),
                    rows=copy.rows,
                )

        given = {seat: tuple(copies) for seat, copies in request.kept.copies.items()}
        try:
            await gather_all(
                self._connections.put_kv(seat, calls(copies)) for seat, copies in given.items()
            )
        except PeerLostError:
            raise
        except PeerError:
            request.kept = None
            raise

    async def _hang_up(self) -> None:
        assert self._release_task is not None
        await asyncio.shield(self._release_task)
        await self._connections.hang_up()  # also of those adopted since

    async def _release(self) -> None:
        tasks = [*self._asking, *([] if self._pump_task is None else [self._pump_task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Who closes it needs nothing again; a plan that ended otherwise may be loaded anew.
        parks = not isinstance(self.failure, RequestError)
        await self._connections.release(gone=self.blamed, parks=parks)


def _outcome(
    acks: Acks[PeerClient, str | None],
    client: PeerClient,
    event: messages.SwappedOut | messages.Reserved,
) -> tuple[str, str | None] | None:
    """A request, and why a peer could not do what all were asked to, once all have answered."""
    why_not = event.why_not
    if why_not is not None:
        why_not = f"peer {client.name}: {printable(why_not, limit=1000)}"
    answers = acks.add(event.request, client, why_not)
    if answers is None:
        return None
    return event.request, next((each for each in answers if each is not None), None)
