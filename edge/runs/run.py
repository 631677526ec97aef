"""A run: one plan on its peers, from its first step to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edge.answers.answer import Answer, OnEnd
from edge.answers.copies import KvLayout
from edge.answers.terms import Terms
from edge.errors import EdgeError, PeerLostError, RequestError
from edge.partition import Plan
from edge.protocol.assignment import Copies
from edge.protocol.client import IT_LEAVES, PeerClient
from edge.protocol.draft_frames import AskDrafts, DraftSource
from edge.protocol.frame_codec import Event
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step_frames import Tokens
from edge.protocol.step_times import PeerTimes, TokenSteps
from edge.protocol.topology import Place, Seat
from edge.runs.connections import Connections
from edge.runs.order_sender import OrderSender
from edge.runs.peer_events import PeerEvents
from edge.runs.prefix_exchange import ExchangeFacts, PrefixExchange
from edge.runs.spot_checks import SpotChecks
from edge.runs.under_way import AnswersUnderWay
from edge.scheduling import events
from edge.scheduling.decide import decide
from edge.scheduling.orders import Work
from edge.scheduling.routing import CopyState
from edge.scheduling.state import SchedulingState
from edge.weights.cache_layout import HeldLayer
from edge.weights.formats import WeightFormat

_log = logging.getLogger(__name__)


class PlanRun:
    """One plan that runs. Made by `load_model`; for one event loop.

    Any failure of a peer ends the run, because its shards may be out of step with each other. The
    other peers are freed, and the unfinished answers go back to the owner of the run.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        vocab_size: int,
        hidden_size: int,
        on_end: OnEnd,
        copies: Copies = "none",
        kv_is_rounded: bool = False,
        exchange_facts: ExchangeFacts | None = None,
    ) -> None:
        """copies: which keys and values the peers send copies of. exchange_facts: for stored
        prefixes that some devices lack; None: these are computed."""
        self.plan = plan
        self._connections = Connections(plan)
        self.held: dict[Seat, tuple[HeldLayer, ...]] = {}
        """The layers whose keys and values each shard keeps."""
        self.picture_seats = self._connections.picture_seats
        self.manifests: dict[Seat, str] = {}
        """The digest of each shard's weights."""
        self.sent_bytes: dict[str, int] = {}
        self.token_weight_bytes: dict[str, int] = {}
        self.failed = asyncio.Event()
        self.failure: EdgeError | None = None
        self._copies: Copies = copies
        self._kv_is_rounded = kv_is_rounded
        self._on_end = on_end
        self._answers = AnswersUnderWay(vocab_size, hidden_size, copies)
        self._peer_events = PeerEvents(
            self._connections, self._answers, tell=self._tell, fail=self.fail
        )
        if exchange_facts is not None:
            self._peer_events.exchange = PrefixExchange(self._connections, exchange_facts)
        self._sender = OrderSender(self._connections, self._answers, self._peer_events)
        self._spot_checks: SpotChecks | None = None
        self._state: SchedulingState | None = None
        """The scheduler's state; None before `start`."""
        self._events: list[events.Event] = []
        """Events for the next decision."""
        self._wake = asyncio.Event()
        self._pump_task: asyncio.Task[None] | None = None
        self._release_task: asyncio.Task[None] | None = None

    @property
    def session(self) -> str:
        return self._connections.session

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Unfinished answers."""
        return tuple(self._answers)

    @property
    def work(self) -> Work:
        """The work of the peers, up to the last decision."""
        return Work() if self._state is None else self._state.work

    def as_found_by(self, terms: Terms, speed: CopyState) -> CopyState:
        """The run as an answer of these terms would find it, with this speed."""
        if self._state is None:
            return speed
        submitted = (each for each in self._events if isinstance(each, events.Submitted))
        told = sum(len(each.prompt) for each in submitted)
        shared = self._answers.shared_tokens(terms)
        found = self._state.as_found_by(terms.prompt, terms.cache_salt, shared)
        # A request waits for its own beginning anyway.
        waiting = max(0, self._state.waiting_tokens + told - shared)
        return replace(
            speed, found_tokens=found, waiting_tokens=waiting, requests=len(self.answers)
        )

    @property
    def blamed(self) -> frozenset[str]:
        """The ids of the devices that were lost, as far as the failure names them."""
        if not isinstance(self.failure, PeerLostError):
            return frozenset()
        return self._connections.devices_named(self.failure.peer)

    def check_now_and_then(
        self, weight_format: WeightFormat, share: float, infos: Mapping[str, PeerInfo]
    ) -> None:
        """Have the peers prove their arithmetic after a share of steps. infos: by the peers'
        names."""
        self._spot_checks = SpotChecks(
            weight_format,
            share,
            peers=lambda: self._connections.peers,
            infos=infos,
            fail=self.fail,
        )

    def adopt(self, seat: Seat, client: PeerClient) -> None:
        """Take over the connection to the peer that runs the shard of this seat."""
        self._connections.adopt(seat, client)
        client.listen(self.on_event)
        client.watch(self.fail, self.leaving)

    async def start(self, places: Mapping[Seat, Place], state: SchedulingState) -> None:
        """Link the shards to each other, and begin to send steps."""
        self._state = state
        digests = await self._connections.link(places)
        told = {seat: digest for seat, digest in digests.items() if digest is not None}
        if len(set(told.values())) > 1:  # other kernels, or another form of keys and values
            self._peer_events.exchange = None
        if self._copies != "none" and len(told) == len(digests):
            self._answers.kv_layout = KvLayout(
                layers=dict(self.held), digests=told, is_rounded=self._kv_is_rounded
            )
        self._pump_task = asyncio.create_task(self._pump(state))

    def submit(self, answer: Answer) -> None:
        """Start an answer, or continue one that another plan has not finished.

        Its sink gets every outcome. If this run ends first, the answer goes to `on_end`.
        """
        if self.failure is not None:
            self._on_end((answer,), self.failure)
            return
        if answer.id in self._answers:
            answer.sink.failed(RequestError("a request with this id is under way; use another id"))
            return
        terms = answer.terms
        restored = self._answers.restored_tokens(answer)
        self._answers.add(answer)
        self._tell(
            events.Submitted(
                request=answer.id,
                prompt=terms.prompt,
                new_tokens=0 if terms.rows else terms.max_new_tokens - len(answer.tokens),
                answer=tuple(answer.tokens),
                restored=max(0, restored - len(terms.prompt)),
                restores_prompt=bool(restored and answer.copies and not answer.copies.first),
                singly=answer.singly,
                is_led=answer.matcher is not None,
                who=terms.who,
                salt=terms.cache_salt,
                rows=terms.rows or "logits",
                speculate=terms.speculate,
                together=answer.together,
                pairs=answer.pairs,
                pictures=None if answer.pictures is None else answer.pictures.places,
            )
        )
        self._peer_events.lead(answer)

    def cancel(self, id: str) -> None:
        """Forget an answer and free its KV cache on every peer. An unknown id is ignored."""
        self._peer_events.cancel(id)

    async def measure(self) -> list[PeerTimes]:
        """Each peer's times since the last call, in plan order."""
        return await self._connections.measure()

    async def count_steps(self) -> dict[Seat, TokenSteps]:
        """Each shard's decode steps so far."""
        return await self._connections.count_steps()

    async def observed(self, seat: Seat, run: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The sums of one of a shard's `observed_runs`: float32 of this shape."""
        return await self._connections.observed(seat, run, shape)

    @property
    def most_drafted(self) -> int:
        """The longest draft; 0: nothing is guessed on this plan."""
        return 0 if self._state is None else self._state.limits.drafts

    async def ask_drafts(self, source: DraftSource | None) -> None:
        """Have the sampler ask this draft model; None: none any more."""
        await self._connections.call_sampler(AskDrafts(session=self.session, source=source))

    async def aclose(self) -> None:
        """Free everything on the peers and hang up. May be called again."""
        self.fail(RequestError("the model is closed; load it again"))
        await self._hang_up()

    async def abort(self) -> None:
        """Disconnect at once. The peers then free everything."""
        self.fail(RequestError("the model is closed; load it again"))
        await self._connections.hang_up()
        await self._hang_up()

    def fail(self, error: EdgeError) -> None:
        """End the run. Only the first reason counts, as others follow from it."""
        if self.failure is not None:
            return
        self.failure = error
        self.failed.set()
        if self._spot_checks is not None:
            self._spot_checks.close()
        unfinished = self._answers.take_all()
        self._release_task = asyncio.create_task(self._release())
        self._on_end(unfinished, error)

    def leaving(self, client: PeerClient) -> None:
        """A peer's user is stopping it. It still computes, and leaves when its session closes, at
        the latest after `LEAVES_WITHIN_S`."""
        self.fail(PeerLostError(client.name, IT_LEAVES))

    def on_event(self, client: PeerClient, event: Event) -> None:
        """Handle a report of a peer, unless the run has ended."""
        if self.failure is None:
            self._peer_events.take(client, event)
            if self._spot_checks is not None and isinstance(event, Tokens) and event.last:
                self._spot_checks.step_ended()

    def _tell(self, event: events.Event) -> None:
        self._events.append(event)
        self._wake.set()

    async def _pump(self, state: SchedulingState) -> None:
        """Send all orders. As the only sender it gives every peer the same order of frames."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while True:
                    told, self._events = self._events, []
                    orders = decide(state, told)
                    await self._sender.send(orders)
                    if orders.step is None:
                        break
        except EdgeError as error:
            self.fail(error)
        except Exception as error:  # after a defect, callers must not wait for ever
            _log.exception("deciding on the next step failed")
            self.fail(
                EdgeError(f"the coordinator failed ({error!r})", remedy="load the model again")
            )

    async def _hang_up(self) -> None:
        assert self._release_task is not None
        await asyncio.shield(self._release_task)
        await self._connections.hang_up()  # includes peers adopted since the release

    async def _release(self) -> None:
        tasks = [*self._peer_events.questions, *([self._pump_task] if self._pump_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A closed model is not needed again; a plan that ended otherwise may be loaded again.
        parks = not isinstance(self.failure, RequestError)
        await self._connections.release(gone=self.blamed, parks=parks)
