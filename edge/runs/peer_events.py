"""Reports of a run's peers: tokens, rows, copies, acks, waits. Each is checked against the question
or step that it answers, and becomes an event for scheduling and a result for an answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from edge.answers.answer import Answer
from edge.errors import EdgeError, PeerError, PeerLostError, ProtocolError
from edge.protocol.client import PeerClient
from edge.protocol.error_codec import Failed
from edge.protocol.fields import one_line
from edge.protocol.frame_codec import Event
from edge.protocol.kv_frames import KvRows, Reserved, SwappedOut
from edge.protocol.prefix_frames import PrefixMatched
from edge.protocol.session_frames import AskLink, LinkSent, Waits
from edge.protocol.step_frames import Logits, States, Tokens
from edge.protocol.topology import Seat
from edge.runs.acks import Acks
from edge.runs.connections import Connections
from edge.runs.dead_links import DeadLinks, Silence
from edge.runs.prefix_exchange import PrefixExchange
from edge.runs.under_way import AnswersUnderWay
from edge.scheduling import events
from edge.scheduling.decide import most_found
from edge.scheduling.orders import Match
from edge.scheduling.prefixes import joined
from edge.scheduling.state import StepUnderWay
from edge.transport.frame import Buffer

_log = logging.getLogger(__name__)

Tell = Callable[[events.Event], None]


class PeerEvents:
    """Handles the reports of a run's peers. `tell` gets scheduling events; `fail` ends the run."""

    def __init__(
        self,
        connections: Connections,
        answers: AnswersUnderWay,
        *,
        tell: Tell,
        fail: Callable[[EdgeError], None],
    ) -> None:
        self._connections, self._answers = connections, answers
        self._tell, self._fail = tell, fail
        self.steps: deque[StepUnderWay] = deque()
        """Steps that were sent and not answered yet."""
        self._reports = 0
        """Number of token reports for the oldest step."""
        self.swap_outs: Acks[PeerClient, str | None] = Acks()
        self.reservations: Acks[PeerClient, str | None] = Acks()
        """The reason why a peer could not swap out or reserve, or None."""
        self.prefix_matches: Acks[PeerClient, tuple[Seat, PrefixMatched]] = Acks()
        """What the shard of a seat has of a prompt in its prefix cache."""
        self.exchange: PrefixExchange | None = None
        """Evens out what devices have; None: each computes what another lacks."""
        self._new_matches: set[str] = set()
        """Requests whose prefix is looked up for the first time, in no other request."""
        self._exchanged: set[str] = set()
        """Requests whose prefix is looked up again."""
        self._dead_links = DeadLinks()
        self._clock_ahead_s = math.inf
        """The local clock minus the sampler's, by the answer that arrived fastest."""
        self.questions: set[asyncio.Task[None]] = set()
        """Questions about links that are not sent yet."""
        self._handlers: dict[type[Event], Callable[[PeerClient, Any], None]] = {
            KvRows: self._on_kv_rows,
            Tokens: self._on_tokens,
            Logits: lambda client, event: self._on_rows(client, event.rows, states=False),
            States: lambda client, event: self._on_rows(client, event.rows, states=True),
            SwappedOut: self._on_swapped_out,
            Reserved: self._on_reserved,
            PrefixMatched: self._on_prefix_matched,
            Waits: self._on_waits,
            LinkSent: self._on_link_sent,
            Failed: lambda client, event: self._fail(event.as_error(client.name)),
        }

    def take(self, client: PeerClient, event: Event) -> None:
        """Handle a report. A malformed one ends the run with an error that names the peer."""
        try:
            self._handlers[type(event)](client, event)
        except (ProtocolError, ValueError) as error:
            self._fail(PeerError(client.name, f"sent a malformed {event.kind!r}: {error}"))

    def cancel(self, id: str) -> None:
        """Forget an answer and have scheduling free it. An unknown id is ignored."""
        self._exchanged.discard(id)
        self._new_matches.discard(id)
        if self._answers.forget(id) is not None:
            self._tell(events.Cancelled(id))

    def lead(self, answer: Answer) -> None:
        """Have the answer's grammar, if it has one, say what comes next; or end the answer."""
        if (matcher := answer.matcher) is None:
            return
        try:
            self._answers.allow(answer, matcher)
            guesses = matcher.guesses
        except EdgeError as error:
            self._end(answer, error)
            return
        if guesses or matcher.was_guessed:
            self._tell(
                events.Guessed(request=answer.id, tokens=guesses, was_guessed=matcher.was_guessed)
            )

    def _end(self, answer: Answer, error: EdgeError) -> None:
        self.cancel(answer.id)
        answer.sink.failed(error)

    def _oldest_step(self, client: PeerClient, tokens: int) -> StepUnderWay:
        """The oldest step. Raises ProtocolError for another peer, or another number of tokens."""
        self._connections.check_sampler(client)
        if not self.steps:
            raise ProtocolError("it answers a step, but no step is under way")
        if tokens != self.steps[0].tokens:
            raise ProtocolError(f"{tokens} tokens for a step that gives {self.steps[0].tokens}")
        return self.steps[0]

    def _on_tokens(self, client: PeerClient, event: Tokens) -> None:
        """A token for each entry of the oldest step under way, or none for a chunk; or several for
        its only entry, if it verified a draft."""
        step = self._oldest_step(client, 1 if event.drafted else len(event.tokens)).step
        if event.drafted > step.drafts:
            raise ProtocolError(f"a draft of {event.drafted} tokens where {step.drafts} may be")
        if (event.together or event.guesses) and not step.drafts:
            raise ProtocolError("guesses, or several rows of an answer, where one may be")
        if step.logit_rows and not event.tokens:
            raise ProtocolError("no token for a step that gives rows")
        self._reports += len(event.tokens) if event.drafted else 1
        if self._reports > step.run:
            raise ProtocolError(f"more tokens than a run of {step.run} gives")
        self._answers.check_ids(event.tokens, event.guesses)
        logprobs = event.logprobs or (None,) * len(event.tokens)
        entries = step.entries * len(event.tokens) if event.drafted else step.entries
        answers = [self._answers.get(entry.request) for entry in entries]
        for number, (answer, end, each) in enumerate(
            zip(answers, event.ends, logprobs, strict=False), start=1
        ):
            if answer is not None:  # else cancelled while the step was under way
                count = number if event.drafted else 1
                self._answers.check_token(answer, count, end is not None, each)
        for answer in answers[:1] if event.drafted else answers[: len(event.tokens)]:
            if answer is not None:
                answer.passes.count(event.drafted, len(event.tokens))
        if event.last:
            self.steps.popleft()
            self._reports = 0
        self._tell(
            events.Answered(
                tokens=event.tokens,
                ends=event.ends,
                last=event.last,
                at_s=event.chosen_s,
                drafted=event.drafted,
                together=event.together,
                pairs=event.pairs,
                guesses=event.guesses,
            )
        )
        self._clock_ahead_s = min(self._clock_ahead_s, time.monotonic() - event.chosen_s)
        chosen_s = event.chosen_s + self._clock_ahead_s
        for answer, token, end, each, pairs in zip(
            answers, event.tokens, event.ends, logprobs, event.pairs_of_each, strict=False
        ):
            if answer is None or answer.id not in self._answers:
                continue  # cancelled, perhaps by the sink of an answer before it
            if event.together:
                position = len(answer.terms.prompt) + len(answer.tokens)
                answer.together = joined(answer.together, (position - 1, position))
            answer.tokens.append(token)
            answer.pairs = pairs
            if end is not None:
                self._answers.forget(answer.id)
            try:
                if answer.sink.token(token, end, chosen_s, each):
                    self.cancel(answer.id)
                elif end is None and answer.matcher is not None:
                    answer.matcher.take(token)
            except EdgeError as error:  # ends this answer alone
                self._end(answer, error)
        for answer in dict.fromkeys(answers):
            if answer is not None and answer.id in self._answers:
                self.lead(answer)

    def _on_rows(self, client: PeerClient, content: Buffer, *, states: bool) -> None:
        step = self._oldest_step(client, 0).step
        if not step.logit_rows:
            raise ProtocolError("rows for a step that gives none")
        rows = self._answers.check_rows(step, content, states=states)
        self.steps.popleft()
        self._tell(events.Answered())
        (entry,) = step.entries
        answer = self._answers.get(entry.request)
        if answer is not None:  # else cancelled while the step was under way
            self._answers.add_rows(answer, entry.end, rows)

    def _on_kv_rows(self, client: PeerClient, event: KvRows) -> None:
        self._answers.keep_copies(self._connections.seat_of(client), event)

    def _on_swapped_out(self, client: PeerClient, event: SwappedOut) -> None:
        done, why_not = _outcome(self.swap_outs, client, event)
        if done:
            self._tell(events.SwapOutDone(request=event.request, why_not=why_not))

    def _on_reserved(self, client: PeerClient, event: Reserved) -> None:
        done, why_not = _outcome(self.reservations, client, event)
        if done:
            self._tell(events.DiskReserved(request=event.request, why_not=why_not))

    def ask_prefix(self, request: str, match: Match) -> None:
        """Expect every peer to report what it has of a prompt."""
        self.prefix_matches.ask(request, self._connections.peers)
        if request in self._exchanged:
            self._exchanged.remove(request)
        elif match.source is None and not match.tokens:
            self._new_matches.add(request)

    async def _even_out(
        self, exchange: PrefixExchange, request: str, found: Mapping[Seat, PrefixMatched]
    ) -> None:
        """Exchange what devices have of a prefix, and go on with what is found then."""
        has_moved = False
        try:
            has_moved = await exchange.even_out(request, found)
        except EdgeError as error:  # a lost peer is noticed elsewhere
            _log.info("a prefix is computed again: %s", error)
        except Exception:
            _log.exception("exchanging a prefix failed; it is computed again")
        if has_moved:
            if self._answers.get(request) is not None:
                self._exchanged.add(request)
            self._tell(events.PrefixMoved(request=request))
        else:
            self._found_prefix(request, found.values())

    def _on_prefix_matched(self, client: PeerClient, event: PrefixMatched) -> None:
        said = self._connections.seat_of(client), event
        request, answer = event.request, self._answers.get(event.request)
        _check_tokens(event, None if answer is None else len(answer.terms.prompt))
        found = self.prefix_matches.add(request, client, said)
        if found is None:
            return
        is_new = request in self._new_matches
        self._new_matches.discard(request)
        if is_new and self.exchange is not None and len(found) > 1:
            evening = asyncio.create_task(self._even_out(self.exchange, request, dict(found)))
            self.questions.add(evening)
            evening.add_done_callback(self.questions.discard)
        else:
            self._found_prefix(request, [each for _seat, each in found])

    def _found_prefix(self, request: str, matches: Collection[PrefixMatched]) -> None:
        # Only tokens that all shards have need not be computed.
        tokens = min(each.tokens for each in matches)
        points = sorted(set.intersection(*(set(each.points) for each in matches)))
        self._tell(events.PrefixFound(request=request, tokens=tokens, points=tuple(points)))

    def _on_waits(self, client: PeerClient, event: Waits) -> None:
        receiver, sender = self._connections.seat_of(client), (event.stage, event.rank)
        self._connections.name_of(sender)  # refuses a seat outside the plan
        silence = Silence(received=event.received, since_s=time.monotonic() - event.silent_s)
        self._dead_links.waits(receiver, sender, silence)
        question = AskLink(session=self._connections.session, stage=receiver[0], rank=receiver[1])
        asking = asyncio.create_task(self._connections.ask(sender, question))
        self.questions.add(asking)
        asking.add_done_callback(self.questions.discard)

    def _on_link_sent(self, client: PeerClient, event: LinkSent) -> None:
        receiver, sender = (event.stage, event.rank), self._connections.seat_of(client)
        to = self._connections.name_of(receiver)
        waited_s = self._dead_links.began(receiver, sender, event.sent, now_s=time.monotonic())
        if waited_s is not None:
            self._fail(
                PeerLostError(
                    client.name,
                    f"nothing that it sends to {to} has arrived there for {waited_s:.1f} s",
                )
            )


def _check_tokens(event: PrefixMatched, prompt_tokens: int | None) -> None:
    """Raises ProtocolError for tokens that a prompt of this length does not have."""
    told = (event.tokens, *event.points, *event.stored)
    if prompt_tokens is not None and max(told) > most_found(prompt_tokens):
        raise ProtocolError(f"{max(told)} tokens known of a prompt of {prompt_tokens}")
    if min(told) < 0:
        raise ProtocolError("fewer tokens than none")


def _outcome(
    acks: Acks[PeerClient, str | None],
    client: PeerClient,
    event: SwappedOut | Reserved,
) -> tuple[bool, str | None]:
    """Whether all peers have answered about this request, and the reason of one that could not."""
    why_not = event.why_not
    if why_not is not None:
        why_not = f"peer {client.name}: {one_line(why_not, limit=1000)}"
    answers = acks.add(event.request, client, why_not)
    if answers is None:
        return False, None
    return True, next((each for each in answers if each is not None), None)
