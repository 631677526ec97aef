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
from edge.models.pictures import PICTURE_IDS
from edge.protocol.step import FinishReason, SamplingTerms, Speculation, Step
from edge.protocol.token_masks import PackedMask, unpacked
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
    masks: Sequence[Bits] = ()
    """Tokens that the grammar allows in the rows of the step under way; empty: any."""
    is_cancelled: bool = False
    """Set by the loop's thread; read between the steps of a run."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """One token to choose: by one row of a step, behind the request's first `end` tokens."""

    index: int
    """The entry's place in the step."""
    row: int
    """The row's place in the entry, counted from the last (−1)."""
    rows: int
    """Rows of the entry that want a token."""
    end: int
    request: _Request

    @property
    def mask(self) -> Bits | None:
        """Tokens that the grammar allows; None: any. Rows behind those with a mask are not used."""
        masks, number = self.request.masks, self.row + self.rows
        return masks[number] if number < len(masks) else None

    @property
    def history(self) -> NDArray[np.int64]:
        """The tokens, where another token of the prompt stands for each row of a picture."""
        found = np.asarray(self.request.history)[: self.end]
        are_rows = found >= PICTURE_IDS
        if not are_rows.any():
            return found
        return np.where(are_rows, 0 if are_rows.all() else found.min(), found)


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

    @property
    def is_alone(self) -> bool:
        """Whether it has the whole vocabulary."""
        return len(self._columns) == 1

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

    def allow(self, step: Step, masks: Mapping[str, Sequence[PackedMask]]) -> None:
        """Set the token masks of this step."""
        for entry in step.entries:
            if (request := self._requests.get(entry.request)) is not None:
                packed = masks.get(entry.request, ())
                request.masks = [unpacked(mask, self._vocab_size) for mask in packed]

    def way(self, step: Step) -> Speculation:
        """How drafts are made for the step's only request."""
        known = self._requests.get(step.entries[0].request)
        return "off" if known is None or step.batch > 1 else known.terms.speculate

    def wants_logits(self, step: Step) -> bool:
        """Whether the step wants logits instead of tokens: one of its requests was not begun."""
        return step.logit_rows > 0 and any(
            entry.request not in self._requests for entry in step.entries
        )

    def may_ask(self, step: Step) -> bool:
        """Whether the sampler may ask for all logits after it has the shortlists."""
        return not (step.states or self._sends_logits(step)) and any(
            truncates(choice.request.terms.sampling, self._vocab_size)
            for choice in self._choices(step)
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
        """On the sampler: a token for each entry that wants one; of a step with a draft, for each
        row up to the first guess that is wrong.

        own: this shard's logits [batch, rows, columns]. ask_all: makes the other shards call
        `send_logits`. Raises PeerError for logits that are not finite.
        """
        self.remember(step)
        if not step.logit_rows:
            return []
        choices = list(self._choices(step))
        told: list[Chosen | None] = [None for _choice in choices]
        logits: NDArray[np.float32] | None = None
        if not self._sends_logits(step) or self._ranks_alone(step, own):
            told = self._choose_from_shortlists(step, own)
            if None in _used(step, told):
                ask_all()
                logits = self.gather_logits(own)
        else:
            logits = self.gather_logits(own)
        chosen: list[Chosen] = []
        for known, choice in zip(told, choices, strict=True):
            if known is None:
                assert logits is not None
                chosen.append(self._sample(logits[choice.index, choice.row], choice))
            else:
                chosen.append(known)
            if _is_last(step, len(chosen), chosen[-1].token):
                break
        return chosen

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
        None. A draft's tokens behind such an end do not count."""
        ends: list[FinishReason | None] = []
        for token, choice in zip(tokens, self._choices(step), strict=False):
            request = choice.request
            request.new_tokens += 1
            if token in request.terms.end_ids:
                ends.append("stop")
            elif request.new_tokens >= request.terms.max_new_tokens:
                ends.append("length")
            else:
                ends.append(None)
            if step.drafted and ends[-1] is not None:
                break
        return ends

    def known(self, step: Step) -> tuple[Sequence[int], SamplingTerms]:
        """On the sampler: the tokens of the step's only request, guesses included, and its
        terms."""
        request = self._requests[step.entries[0].request]
        return request.history, request.terms

    def settle(
        self, step: Step, tokens: Sequence[int]
    ) -> list[tuple[Sequence[int], SamplingTerms]]:
        """On the sampler: all tokens of each of the step's requests after it gave `tokens`, several
        to its only one, and their terms. Wrong guesses are forgotten."""
        found: list[tuple[Sequence[int], SamplingTerms]] = []
        own = [tokens] if step.batch == 1 else [(token,) for token in tokens]
        for entry, given in zip(step.entries, own, strict=True):
            request = self._requests[entry.request]
            del request.history[entry.end - entry.logit_rows + len(given) :]
            request.history.append(given[-1])
            found.append((request.history, request.terms))
        return found

    def computes_together(self, step: Step) -> bool:
        """Whether the step computes several tokens of an answer, guesses included."""
        entry = step.entries[0]
        request = self._requests.get(entry.request)
        is_answer = request is not None and entry.position >= request.terms.prompt_tokens
        return step.drafts > 0 and step.num_tokens > 1 and is_answer

    def ends_run(self, step: Step) -> bool:
        """Whether a request of the step was cancelled, or needs masks for its next step."""
        requests = [self._requests.get(entry.request) for entry in step.entries]
        return any(each is not None and (each.is_cancelled or each.masks) for each in requests)

    def is_led(self, step: Step) -> bool:
        """Whether a grammar leads a request of the step."""
        return any(choice.request.masks for choice in self._choices(step))

    def prompt_so_far(self, step: Step) -> tuple[Sequence[int], SamplingTerms] | None:
        """On the sampler: the first tokens of the prompt that the step computes a chunk of, and the
        terms of its request; None: it computes none, or no tokens are wanted."""
        request = self._requests.get(step.entries[-1].request)
        if request is None or step.is_decode or (step.batch > 1 and not step.is_mixed):
            return None
        return request.history, request.terms

    def _choices(self, step: Step) -> Iterator[_Choice]:
        """The rows that want a token: the last of each entry, or all of a draft's."""
        rows = 1 + step.drafted
        for index, entry in enumerate(step.entries):
            if entry.logit_rows and (request := self._requests.get(entry.request)) is not None:
                for row in range(-rows, 0):
                    yield _Choice(index, row, rows, entry.end + row + 1, request)

    def remember(self, step: Step) -> None:
        """Add the step's tokens to the histories, in place of guesses that were wrong. Called by
        `offer` and `choose`."""
        for entry in step.entries:
            request = self._requests.get(entry.request)
            if request is not None:
                if not request.history:
                    prompt = self._recalled.pop(entry.request, array("q"))
                    request.history.extend(prompt[: entry.position])
                del request.history[entry.position :]
                request.history.extend(entry.tokens)

    def _allowed(self, choice: _Choice) -> Bits | None:
        """Tokens that may be chosen; None: any. The mask without end tokens while the answer has
        too few tokens; the mask itself where only end tokens are left of it."""
        mask, terms = choice.mask, choice.request.terms
        answered = choice.end - terms.prompt_tokens
        if answered >= terms.sampling.min_tokens or not terms.end_ids:
            return mask
        bits = np.full(-(-self._vocab_size // 8), 0xFF, np.uint8)
        if mask is not None:
            bits = mask.copy()
        for id in terms.end_ids:
            if id < self._vocab_size:
                bits[id >> 3] &= ~(1 << (id & 7)) & 0xFF
        left = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return bits if left.any() else mask

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
            self._ranked_count(choice, own) is not None for choice in self._choices(step)
        )

    def _num_bytes(self, step: Step, columns: int) -> int:
        return sum(
            dtype.itemsize
            for choice in self._choices(step)
            for dtype in self._dtypes(choice.request.terms, columns)
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
        counts = [self._ranked_count(choice, own) for choice in choices]
        most = max((count for count in counts if count is not None), default=0)
        best = own.best(most) if most else None
        found = []
        for choice, count in zip(choices, counts, strict=True):
            index, terms = choice.index, choice.request.terms
            if best is None or count is None or best[0][index, 0] < 0:
                logits = own.array()[index, choice.row]
                shortlist = self._shortlist(logits, choice)
                found.append(shortlist.view(np.uint8))
                if terms.logprobs is not None:
                    part = self._logprob_part(logits, shortlist, terms.logprobs)
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

    def _ranked_count(self, choice: _Choice, own: StepLogits) -> int | None:
        """Number of top-ranked columns to fetch from `own`, which ranks last rows. None if they are
        not enough."""
        terms = choice.request.terms
        if not own.can_rank or choice.row != -1 or terms.logprobs is not None:
            return None
        if self._allowed(choice) is not None:
            return None
        return ranked_count(
            terms.sampling,
            columns=self._columns[self._rank],
            vocab_size=self._vocab_size,
            tokens=self._shortlist_tokens,
        )

    def _shortlist(self, logits: NDArray[np.float32], choice: _Choice) -> NDArray[np.void]:
        terms = choice.request.terms
        return make_shortlist(
            logits,
            first_id=self._first_id,
            vocab_size=self._vocab_size,
            history=choice.history,
            prompt_tokens=terms.prompt_tokens,
            parameters=terms.sampling,
            position=choice.end,
            allowed=self._allowed(choice),
            tokens=self._shortlist_tokens,
        )

    def _choose_from_shortlists(self, step: Step, own: StepLogits) -> list[Chosen | None]:
        """A token for each choice, or None if the shortlists do not determine it."""
        mine = self._shortlists(step, own)
        messages = [np.empty(self._num_bytes(step, columns), np.uint8) for columns in self._columns]
        self.collective.gather(mine, messages, root=0)
        starts = [0] * len(messages)
        chosen: list[Chosen | None] = []
        for choice in self._choices(step):
            terms = choice.request.terms
            sent: list[list[NDArray[np.void]]] = [[], []]
            for rank, (message, columns) in enumerate(zip(messages, self._columns, strict=True)):
                for kind, dtype in enumerate(self._dtypes(terms, columns)):
                    stop = starts[rank] + dtype.itemsize
                    sent[kind].append(message[starts[rank] : stop].view(dtype))
                    starts[rank] = stop
            shortlists, parts = sent
            try:
                token = choose(
                    shortlists,
                    columns=self._columns,
                    parameters=terms.sampling,
                    position=choice.end,
                )
            except ValueError as error:
                raise PeerError("sampler", str(error)) from error
            count = terms.logprobs
            if token is None:
                chosen.append(None)
            elif count is None:
                chosen.append(Chosen(token=token))
            else:
                chosen.append(Chosen(token=token, logprobs=combine(parts, token, count=count)))
        return chosen

    def _sample(self, logits: NDArray[np.float32], choice: _Choice) -> Chosen:
        terms = choice.request.terms
        try:
            token = sample(
                logits,
                history=choice.history,
                prompt_tokens=terms.prompt_tokens,
                parameters=terms.sampling,
                position=choice.end,
                allowed=self._allowed(choice),
            )
        except ValueError as error:
            raise PeerError("sampler", str(error)) from error
        count = terms.logprobs
        found = None if count is None else logprobs_of(logits, token, count=count)
        return Chosen(token=token, logprobs=found)


def _is_last(step: Step, count: int, token: int) -> bool:
    """Whether `token`, the one of row `count` of a step with a draft, is the last that is used: the
    next row's input is another, or not wanted. False in a step without a draft."""
    if not step.drafted:
        return False
    guesses = step.entries[0].tokens[-step.drafted :]
    return count >= min(step.run, 1 + step.drafted) or token != guesses[count - 1]


def _used(step: Step, told: Sequence[Chosen | None]) -> Sequence[Chosen | None]:
    """The choices up to the last that is used, as far as they are known."""
    for count, each in enumerate(told, start=1):
        if each is not None and _is_last(step, count, each.token):
            return told[:count]
        if each is None and step.drafted:
            return told[:count]
    return told
