"""Distributed sampling: the shards of the last stage choose tokens and seldom exchange all logits.

All shards of the stage make the same calls for the same steps. Each knows the terms and tokens of
the requests, finds the shortlist of its own vocabulary columns, and sends it to rank 0, the
sampler. If shortlists do not determine the token, the sampler asks for all logits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import StepLogits
from edge.errors import PeerError
from edge.kernels.sampling.logprobs import (
    LogprobPart,
    Logprobs,
    combine,
    logprobs_of,
    make_part,
    part_dtype,
)
from edge.kernels.sampling.ranking import truncates
from edge.kernels.sampling.reference import sample
from edge.kernels.sampling.rules import Bits
from edge.kernels.sampling.shortlist import (
    SHORTLIST_TOKENS,
    Shortlist,
    choose,
    make_shortlist,
    ranked_count,
    ranked_shortlist,
    shortlist_dtype,
)
from edge.protocol.step import FinishReason, SamplingTerms, Step, StepEntry
from edge.transport import Collective, SoloCollective


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A chosen token, with its logprobs if the request asks for them."""

    token: int
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class _Request:
    """State of one request that sampling needs."""

    terms: SamplingTerms
    history: array[int] = field(default_factory=lambda: array("q"))
    """Its tokens so far; numpy reads them in place."""
    new_tokens: int = 0
    mask: Bits | None = None
    """Tokens that the grammar allows in the step under way; None: any."""
    allowed: Bits | None = None
    """Tokens that may be chosen in the step under way; None: any."""
    is_cancelled: bool = False
    """Set by the loop's thread; read between the steps of a run."""


class DistributedSampling:
    """One shard's part of sampling. Called from the compute thread, except `begin` and `cancel`.

    `collective` joins the shards of the last stage; rank 0 is the sampler.
    """

    def __init__(
        self, parts: Sequence[range], rank: int, *, shortlist_tokens: int = SHORTLIST_TOKENS
    ) -> None:
        """parts: each rank's vocabulary ids, in order. They begin at 0."""
        self.collective: Collective = SoloCollective()
        self._columns = [len(part) for part in parts]
        self._rank = rank
        self._vocab_size = sum(self._columns)
        self._first_id = sum(self._columns[:rank])
        self._shortlist_tokens = shortlist_tokens
        self._requests: dict[str, _Request] = {}
        self._recalled: dict[str, array[int]] = {}
        """Prompts whose prefix may come from a cache: see `recall`."""
        self._gathered: list[NDArray[np.float32]] = []

    def begin(self, request: str, terms: SamplingTerms) -> None:
        """Add a request that wants tokens."""
        self._requests[request] = _Request(terms)

    def cancel(self, request: str) -> None:
        """End the run of this request after its next token."""
        known = self._requests.get(request)
        if known is not None:
            known.is_cancelled = True

    def forget(self, request: str) -> None:
        """Remove a request. Unknown ones are ignored."""
        self._requests.pop(request, None)
        self._recalled.pop(request, None)

    def recall(self, request: str, prompt: Sequence[int]) -> None:
        """Announce a prompt whose first step may begin anywhere in it."""
        self._recalled[request] = array("q", prompt)

    def allow(self, step: Step, masks: Mapping[str, Bits]) -> None:
        """Set the token masks of this step."""
        for _index, entry, request in self._choices(step):
            request.mask = masks.get(entry.request)

    def wants_logits(self, step: Step) -> bool:
        """Whether the step wants logits instead of tokens: one of its requests was not begun."""
        return step.logit_rows > 0 and any(
            entry.request not in self._requests for entry in step.entries
        )

    def may_ask(self, step: Step) -> bool:
        """Whether the sampler may ask for all logits after it has the shortlists."""
        return not (step.states or self._sends_logits(step)) and any(
            truncates(request.terms.sampling, self._vocab_size)
            for _index, _entry, request in self._choices(step)
        )

    def offer(self, step: Step, own: StepLogits) -> None:
        """On shards other than the sampler: send shortlists, logits or states for this step.

        own: this shard's logits [batch, rows, columns].
        """
        self.remember(step)
        if not step.logit_rows:
            return
        if step.states:
            self.gather_states(step, own)
        elif self._sends_logits(step):
            self.send_logits(own)
        else:
            self.collective.gather(self._shortlists(step, own), None, root=0)

    def send_logits(self, own: StepLogits) -> None:
        """Send all logits [batch, rows, columns] of this shard to the sampler."""
        self.collective.gather(np.ascontiguousarray(own.array()), None, root=0)

    def choose(self, step: Step, own: StepLogits, ask_all: Callable[[], None]) -> list[Chosen]:
        """On the sampler: a token for each entry that wants one.

        own: this shard's logits [batch, rows, columns]. ask_all: makes the other shards call
        `send_logits`. Raises PeerError for logits that are not finite.
        """
        self.remember(step)
        if not step.logit_rows:
            return []
        chosen: list[Chosen | None] = [None for _choice in self._choices(step)]
        if not self._sends_logits(step) or self._ranks_alone(step, own):
            chosen = self._choose_from_shortlists(step, own)
            if None in chosen:
                ask_all()
        if None not in chosen:
            return [each for each in chosen if each is not None]
        logits = self.gather_logits(own)
        return [
            each or self._sample(logits[index, -1], entry, request)
            for each, (index, entry, request) in zip(chosen, self._choices(step), strict=True)
        ]

    def gather_logits(self, own: StepLogits) -> NDArray[np.float32]:
        """On the sampler: the columns of all shards, concatenated to [batch, rows, vocab]."""
        if len(self._columns) == 1:
            return own.array()
        shapes = [(*own.array().shape[:2], columns) for columns in self._columns]
        if [each.shape for each in self._gathered] != shapes:
            self._gathered = [np.empty(shape, np.float32) for shape in shapes]
        self.collective.gather(np.ascontiguousarray(own.array()), self._gathered, root=0)
        return np.concatenate(self._gathered, axis=-1)

    def gather_states(self, step: Step, own: StepLogits) -> NDArray[np.float32]:
        """On every shard: the hidden states [rows, hidden] of a step with `states`; the sampler
        gets them. Shards without vocabulary do not compute them: if the sampler has none, the first
        shard that has some sends them."""
        speaker = next(rank for rank, columns in enumerate(self._columns) if columns)
        rows: NDArray[np.float32] = own.states()[0]
        if not speaker:
            return rows
        empty = np.empty(0, np.float32)
        mine = np.ascontiguousarray(rows) if self._rank == speaker else empty
        if self._rank:
            self.collective.gather(mine, None, root=0)
            return mine
        found = np.empty(rows.shape, np.float32)
        sent = [found if rank == speaker else empty for rank in range(len(self._columns))]
        self.collective.gather(mine, sent, root=0)
        return found

    def take(self, step: Step, tokens: Sequence[int]) -> list[FinishReason | None]:
        """On the sampler: count the chosen tokens. Returns for each why it ends its request, or
        None."""
        ends: list[FinishReason | None] = []
        for token, (_index, _entry, request) in zip(tokens, self._choices(step), strict=True):
            request.new_tokens += 1
            if token in request.terms.end_ids:
                ends.append("stop")
            elif request.new_tokens >= request.terms.max_new_tokens:
                ends.append("length")
            else:
                ends.append(None)
        return ends

    def is_cancelled(self, step: Step) -> bool:
        """Whether a request of the step was cancelled."""
        return any(request.is_cancelled for _index, _entry, request in self._choices(step))

    def _choices(self, step: Step) -> Iterator[tuple[int, StepEntry, _Request]]:
        """The entries that want a token: place in the step, entry and request state."""
        for index, entry in enumerate(step.entries):
            if entry.logit_rows and (request := self._requests.get(entry.request)) is not None:
                yield index, entry, request

    def remember(self, step: Step) -> None:
        """Add the step's tokens to the histories. Called by `offer` and `choose`."""
        for entry in step.entries:
            request = self._requests.get(entry.request)
            if request is not None:
                if not request.history:
                    prompt = self._recalled.pop(entry.request, array("q"))
                    request.history.extend(prompt[: entry.position])
                request.history.extend(entry.tokens)
                if entry.logit_rows:
                    answered = entry.end - request.terms.prompt_tokens
                    request.allowed = self._allowed(request, answered)

    def _allowed(self, request: _Request, answered: int) -> Bits | None:
        """The mask without end tokens while the answer has too few tokens; the mask itself where
        only end tokens are left of it."""
        terms = request.terms
        if answered >= terms.sampling.min_tokens or not terms.end_ids:
            return request.mask
        bits = np.full(-(-self._vocab_size // 8), 0xFF, np.uint8)
        if request.mask is not None:
            bits = request.mask.copy()
        for id in terms.end_ids:
            if id < self._vocab_size:
                bits[id >> 3] &= ~(1 << (id & 7)) & 0xFF
        left = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return bits if left.any() else request.mask

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Add tokens that were restored instead of computed. Before `begin` they are the request's
        first."""
        if (known := self._requests.get(request)) is not None:
            known.history.extend(tokens)
        else:
            self._recalled.setdefault(request, array("q")).extend(tokens)

    def _sends_logits(self, step: Step) -> bool:
        """Whether all logits are sent at once: there is one shard, or shortlists would be hardly
        smaller.

        Equal on every shard: it follows from the step, the requests' terms and the plan.
        """
        if len(self._columns) == 1 or self.wants_logits(step):
            return True
        logits = step.batch * step.logit_rows * sum(self._columns[1:])
        shortlists = sum(self._num_bytes(step, columns) for columns in self._columns[1:])
        return 2 * shortlists >= 4 * logits

    def _ranks_alone(self, step: Step, own: StepLogits) -> bool:
        """Whether a single shard can choose from its top-ranked columns, without all logits."""
        return len(self._columns) == 1 and all(
            self._ranked_count(request, own) is not None
            for _index, _entry, request in self._choices(step)
        )

    def _num_bytes(self, step: Step, columns: int) -> int:
        return sum(
            dtype.itemsize
            for _index, _entry, request in self._choices(step)
            for dtype in self._dtypes(request.terms, columns)
        )

    def _dtypes(self, terms: SamplingTerms, columns: int) -> list[np.dtype[np.void]]:
        """The dtypes of a shard's shortlist and, if wanted, of its part of the logprobs."""
        shortlist = shortlist_dtype(
            terms.sampling,
            columns=columns,
            vocab_size=self._vocab_size,
            tokens=self._shortlist_tokens,
        )
        if terms.logprobs is None:
            return [shortlist]
        candidates = shortlist["ids"].shape[0]
        return [shortlist, part_dtype(terms.logprobs, columns=columns, candidates=candidates)]

    def _shortlists(self, step: Step, own: StepLogits) -> NDArray[np.uint8]:
        """This shard's shortlists for all choices of the step, concatenated as bytes."""
        choices = list(self._choices(step))
        counts = [self._ranked_count(request, own) for _index, _entry, request in choices]
        most = max((count for count in counts if count is not None), default=0)
        best = own.best(most) if most else None
        found = []
        for (index, entry, request), count in zip(choices, counts, strict=True):
            if best is None or count is None or best[0][index, 0] < 0:
                logits = own.array()[index, -1]
                shortlist = self._shortlist(logits, entry, request)
                found.append(shortlist.view(np.uint8))
                if request.terms.logprobs is not None:
                    part = self._logprob_part(logits, shortlist, request.terms.logprobs)
                    found.append(part.view(np.uint8))
            else:
                columns, scores = best
                shortlist = ranked_shortlist(
                    columns[index, :count], scores[index, :count], first_id=self._first_id
                )
                found.append(shortlist.view(np.uint8))
        return np.concatenate(found)

    def _logprob_part(
        self, logits: NDArray[np.float32], shortlist: Shortlist, count: int
    ) -> LogprobPart:
        candidates = shortlist["ids"][0]
        if shortlist["broken"][0]:  # without candidates; the sampler refuses such logits
            candidates = np.full_like(candidates, self._first_id)
        return make_part(logits, first_id=self._first_id, count=count, candidates=candidates)

    def _ranked_count(self, request: _Request, own: StepLogits) -> int | None:
        """Number of top-ranked columns to fetch from `own`. None if they are not enough."""
        if not own.can_rank or request.terms.logprobs is not None or request.allowed is not None:
            return None
        return ranked_count(
            request.terms.sampling,
            columns=self._columns[self._rank],
            vocab_size=self._vocab_size,
            tokens=self._shortlist_tokens,
        )

    def _shortlist(
        self, logits: NDArray[np.float32], entry: StepEntry, request: _Request
    ) -> NDArray[np.void]:
        return make_shortlist(
            logits,
            first_id=self._first_id,
            vocab_size=self._vocab_size,
            history=np.asarray(request.history),
            prompt_tokens=request.terms.prompt_tokens,
            parameters=request.terms.sampling,
            position=entry.end,
            allowed=request.allowed,
            tokens=self._shortlist_tokens,
        )

    def _choose_from_shortlists(self, step: Step, own: StepLogits) -> list[Chosen | None]:
        """A token for each choice, or None if the shortlists do not determine it."""
        mine = self._shortlists(step, own)
        messages = [np.empty(self._num_bytes(step, columns), np.uint8) for columns in self._columns]
        self.collective.gather(mine, messages, root=0)
        starts = [0] * len(messages)
        chosen: list[Chosen | None] = []
        for _index, entry, request in self._choices(step):
            sent: list[list[NDArray[np.void]]] = [[], []]
            for rank, (message, columns) in enumerate(zip(messages, self._columns, strict=True)):
                for kind, dtype in enumerate(self._dtypes(request.terms, columns)):
                    stop = starts[rank] + dtype.itemsize
                    sent[kind].append(message[starts[rank] : stop].view(dtype))
                    starts[rank] = stop
            shortlists, parts = sent
            try:
                token = choose(
                    shortlists,
                    columns=self._columns,
                    parameters=request.terms.sampling,
                    position=entry.end,
                )
            except ValueError as error:
                raise PeerError("sampler", str(error)) from error
            count = request.terms.logprobs
            if token is None:
                chosen.append(None)
            elif count is None:
                chosen.append(Chosen(token=token))
            else:
                chosen.append(Chosen(token=token, logprobs=combine(parts, token, count=count)))
        return chosen

    def _sample(self, logits: NDArray[np.float32], entry: StepEntry, request: _Request) -> Chosen:
        try:
            token = sample(
                logits,
                history=np.asarray(request.history),
                prompt_tokens=request.terms.prompt_tokens,
                parameters=request.terms.sampling,
                position=entry.end,
                allowed=request.allowed,
            )
        except ValueError as error:
            raise PeerError("sampler", str(error)) from error
        count = request.terms.logprobs
        found = None if count is None else logprobs_of(logits, token, count=count)
        return Chosen(token=token, logprobs=found)
