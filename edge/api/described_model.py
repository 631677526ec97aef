"""The part of a loaded model that needs no waiting: its facts, and the checks of prompts."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from edge.answers.journal import Journal
from edge.answers.journal_folder import JournalFolder
from edge.answers.journal_records import JournaledLoad, JournalHead
from edge.answers.terms import MOST_TOKENS_OF_A_TEXT, AnswerReading, GenerationOptions, Terms
from edge.api.kept_reply import KeptReply
from edge.api.reply import AskedReply, BeginReply, ReplyFeed, ReplyMaker
from edge.api.tool_choice import chosen, with_calls
from edge.errors import PromptLengthError, RequestError, shown
from edge.kernels.sampling.parameters import SamplingParameters
from edge.option_fields import checks_calls
from edge.partition import Estimate, Plan, Workload
from edge.planning.forecast import Forecast
from edge.planning.proposal import Proposal
from edge.protocol.lease import Lease
from edge.protocol.peer_info import PeerInfo
from edge.runs.model import Recovery, RunningModel
from edge.runs.recovery.joining import Joining
from edge.runs.recovery.standing_by import StandingBy
from edge.scheduling.orders import Work
from edge.text import Tokenizer
from edge.text.grammar import Grammars, Matcher
from edge.text.tool_schema import Tool, tool_schemas
from edge.text.tool_types import tool_types
from edge.weights.pooling import MakersPooling

Prompt = str | Sequence[int]

LONGEST_ID = 256
"""Characters of what a request is called; peers take no more than 1,024."""

Prompts = list[str] | list[list[int]]
"""Several."""

_USUAL = Workload()

Messages = str | Sequence[Mapping[str, object]]
"""A conversation: objects with role and content; or the one message of a user."""


def several(prompt: Prompt | Prompts) -> Sequence[Prompt] | None:
    """The prompts of a list of them, which may be empty; None for a single prompt."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return None
    if all(isinstance(each, str | Sequence | np.ndarray) for each in prompt):
        return cast(Sequence[Prompt], prompt)
    return None


def _are_messages(values: object) -> bool:
    return isinstance(values, Sequence) and all(isinstance(each, Mapping) for each in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What `Model` and `AsyncModel` know of a loaded model."""

    running: RunningModel
    forecast: Forecast
    name: str
    vocab_size: int
    hidden_size: int
    context_tokens: int
    longest_context_tokens: int
    """The longest context that it was made for."""
    end_ids: frozenset[int]
    sampling: SamplingParameters
    unused_settings: tuple[str, ...]
    pooling: MakersPooling
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    """None where there is no tokenizer."""
    peers: Mapping[str, PeerInfo]
    load: JournaledLoad
    """How it was loaded."""
    lease: Lease
    """The lease of its sessions."""
    replies: JournalFolder
    """The journals of unfinished replies."""
    attendants: tuple[Joining | StandingBy, ...]
    """Tasks that run in the background of its replies."""

    @property
    def maker(self) -> ReplyMaker:
        return ReplyMaker(running=self.running, tokenizer=self.tokenizer, forecast=self.forecast)


@checks_calls
class DescribedModel:
    """The facts of a loaded model, and the checks of prompts for it."""

    def __init__(self, held: LoadedModel) -> None:
        self._held = held

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder or file."""
        return self._held.name

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self._held.vocab_size

    @property
    def hidden_size(self) -> int:
        """How many values the hidden state of a token has, and an embedding."""
        return self._held.hidden_size

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together."""
        return self._held.context_tokens

    @property
    def longest_context_tokens(self) -> int:
        """The longest context that it was made for: what `context_tokens` of a load may be."""
        return self._held.longest_context_tokens

    @property
    def sampling(self) -> SamplingParameters:
        """How tokens are chosen where GenerationOptions leaves it open: as its makers say."""
        return self._held.sampling

    @property
    def unused_settings(self) -> Sequence[str]:
        """Settings of its generation_config.json outside `sampling` that are not used, by name."""
        return self._held.unused_settings

    @property
    def peers(self) -> Mapping[str, PeerInfo]:
        """Those that the model was loaded with, by id."""
        return self._held.peers

    @property
    def plan(self) -> Plan:
        """What runs where; devices are peers' ids (see `peers`)."""
        return self._held.running.plan

    @property
    def proposal(self) -> Proposal:
        """The plan with all that was known when it was chosen, and what is predicted of it."""
        return self._held.forecast.proposal

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Weights that were sent to each peer, by name; 0 for one that had its shard cached."""
        return dict(self._held.running.sent_bytes)

    @property
    def token_weight_bytes(self) -> Mapping[str, int]:
        """Weights, as its kernels keep them, that each peer reads for one token, by name."""
        return dict(self._held.running.token_weight_bytes)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError for a checkpoint without one."""
        if self._held.tokenizer is None:
            raise RequestError(
                f"{self.name} has no tokenizer.json", remedy="give token ids instead of text"
            )
        return self._held.tokenizer

    @property
    def can_chat(self) -> bool:
        """It has a chat template."""
        return self._held.tokenizer is not None and self._held.tokenizer.has_chat_template

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """How it went on after peers were lost, or others joined; the first time first."""
        return tuple(self._held.running.recoveries)

    @property
    def work(self) -> Work:
        """How many tokens its peers were given to compute so far, and in how many steps."""
        return self._held.running.work

    @property
    def is_recovering(self) -> bool:
        """A device was lost or joined, and the model is loaded anew; answers wait."""
        return self._held.running.is_recovering

    @property
    def is_over(self) -> bool:
        """It was closed, or has lost peers and does not fit on those that are left."""
        return self._held.running.failure is not None

    def predict(
        self,
        *,
        prompt_tokens: int = _USUAL.prompt_tokens,
        output_tokens: int = _USUAL.output_tokens,
        concurrency: int = 1,
    ) -> Estimate | None:
        """How fast answers of this size should be; None where a device was not measured.

        Of a model with experts that come from disk, with as many of them in memory as replies were
        seen to find there by the last `measure`.
        """
        return self._held.forecast.of(
            prompt_tokens=prompt_tokens, new_tokens=output_tokens, concurrency=concurrency
        )

    def _reply_to(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        *,
        reading: AnswerReading | None = None,
        client: str = "",
        cache_salt: str = "",
        id: str | None = None,
    ) -> BeginReply:
        """A reply that its reader starts. The prompt and the options are checked here."""
        if id is not None and not (id.isprintable() and len(id) <= LONGEST_ID):
            raise RequestError(
                f"id must be a text of at most {LONGEST_ID} printable characters, not {shown(id)}"
            )
        terms = self._terms(
            prompt, options, reading=reading, client=client, cache_salt=_digest(cache_salt)
        )
        held = self._held

        def keep() -> Journal | None:
            if not options.journal:
                return None
            head = JournalHead(begun_s=time.time(), load=held.load, terms=terms)
            return held.replies.begin(head, held.lease)

        return self._begin_reply(terms, keep, id)

    def _terms(self, prompt: Prompt, options: GenerationOptions, **further: Any) -> Terms:
        """The checked terms of an answer to this prompt. further: see GenerationOptions.terms."""
        if options.thinking is not None and isinstance(prompt, str):
            raise RequestError(
                "thinking is told to a chat template, and a text goes to the model as it is; use "
                "chat or stream_chat"
            )
        if options.max_new_tokens is None and isinstance(prompt, str):
            options = replace(options, max_new_tokens=MOST_TOKENS_OF_A_TEXT)
        tokens = self._checked_ids(self._ids(prompt))
        room = self.context_tokens - len(tokens)
        if room < 1:
            raise self._too_long(len(tokens), ": no room for an answer")
        terms = options.terms(
            tokens, end_ids=self._held.end_ids, room=room, usual=self._held.sampling, **further
        )
        if (biased := max(terms.sampling.logit_bias, default=0)) >= self.vocab_size:
            raise RequestError(
                f"logit_bias has token id {biased}, which is not one of the model's",
                remedy=f"ids are 0..{self.vocab_size - 1}",
            )
        return terms

    def _begin_reply(
        self, terms: Terms, keep: Callable[[], Journal | None], id: str | None = None
    ) -> BeginReply:
        self._require_open()
        asked = AskedReply(terms=terms, match=self._matching(terms), keep=keep, id=id)
        return partial(ReplyFeed, self._held.maker, asked)

    def _resumed(self, reply: KeptReply | str) -> BeginReply:
        """Resume a reply; reads its journal."""
        journal = self._held.replies.open(reply) if isinstance(reply, str) else reply.journal
        try:
            return self._resume(journal)
        except BaseException:
            journal.close()
            raise

    def _resume(self, journal: Journal) -> BeginReply:
        if not journal.is_open:
            raise RequestError(f"the reply {journal.id} was closed", remedy="open it again")
        head, terms = journal.content.head, journal.content.head.terms
        if head.load.fingerprint != self._held.load.fingerprint:
            raise RequestError(
                f"the reply {journal.id} is of {head.load.path} as it was then, and this is "
                "another model, or its files were changed since",
                remedy="ask again",
            )
        if (unlike := head.load.unlike(self._held.load)) is not None:
            raise RequestError(
                f"the reply {journal.id} cannot go on with this model, which has {unlike}",
                remedy=f"load it as it was: edge run --resume {journal.id}",
            )
        self._checked_ids(terms.prompt)
        ids = [*(token.token_id for token in journal.content.tokens), *terms.end_ids]
        ids += terms.sampling.logit_bias
        most = self.context_tokens - len(terms.prompt)
        if any(id >= self.vocab_size for id in ids) or terms.max_new_tokens > most:
            raise RequestError(
                f"the reply {journal.id} is not of this model: it was damaged", remedy="ask again"
            )
        if journal.content.lease.run != self._held.lease.run:
            journal.held_by(self._held.lease)
        return self._begin_reply(terms, lambda: journal)

    def _matching(self, terms: Terms) -> Callable[[], Matcher] | None:
        """Makes the matcher of an answer with a grammar, which takes its time; None: no grammar."""
        if terms.grammar is None:
            return None
        grammars, tokenizer = self._held.grammars, self._held.tokenizer
        if grammars is None or tokenizer is None:
            raise RequestError(
                f"{self.name} has no tokenizer.json, so its answers can be kept to no schema or "
                "grammar",
                remedy="leave both out, or put the model's tokenizer.json beside it",
            )
        is_thinking = tokenizer.begins_thinking(terms.prompt)
        return partial(grammars.begin, terms.grammar, is_thinking=is_thinking)

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _chat_prompt(
        self,
        messages: Messages,
        options: GenerationOptions,
        *,
        tools: Sequence[Tool] | None,
        tool_choice: str,
        variables: Mapping[str, object] | None,
    ) -> tuple[list[int], GenerationOptions, AnswerReading]:
        """Token ids of a conversation, how to answer it, and how the answer is read."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        schemas, must = chosen(tool_schemas(tools) or (), tool_choice)
        ids = self.tokenizer.encode_chat(
            messages, tools=schemas or None, thinking=options.thinking, variables=variables
        )
        if schemas and not self.tokenizer.has_told_tools(
            ids, messages, thinking=options.thinking, variables=variables
        ):
            raise RequestError(
                f"the chat template of {self.name} takes no tools, and writes the same without",
                remedy="leave tools out, or use a model that was made to call some",
            )
        options = with_calls(
            options,
            self.tokenizer.answer_form,
            tools=schemas,
            must=must,
            several=tool_choice in ("auto", "required"),
        )
        thinking = self.tokenizer.begins_thinking(ids)
        form = self.tokenizer.answer_form
        return ids, options, AnswerReading(thinking=thinking, form=form, tools=tool_types(schemas))

    def _too_long(self, tokens: int, what: str = "") -> PromptLengthError:
        """The error for a prompt of `tokens` tokens; it says what helps."""
        remedy = "shorten it, or load the model with more context_tokens"
        if self.context_tokens == self.longest_context_tokens:
            remedy = "shorten it: the model was made for no more"
        return PromptLengthError(
            f"the prompt has {tokens} tokens and the context {self.context_tokens}{what}",
            remedy=remedy,
            prompt_tokens=tokens,
            context_tokens=self.context_tokens,
        )

    def __repr__(self) -> str:
        count = len(self.plan.devices)
        said = "over" if self.is_over else f"on {count} device{'s' if count > 1 else ''}"
        return (
            f"<{type(self).__name__} {self.name} ({self.proposal.dtype}) {said}, "
            f"context {self.context_tokens} tokens>"
        )

    def _require_open(self) -> None:
        """Raises what ended the model, if anything did."""
        if (failure := self._held.running.failure) is not None:
            raise failure

    def _checked_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        try:
            if isinstance(token_ids, bytes | bytearray | memoryview | Set | Mapping):
                raise TypeError  # their numbers are no ids, or in no order
            tokens = tuple(operator.index(token) for token in token_ids)
        except TypeError:
            hint = "; messages are for chat and stream_chat" if _are_messages(token_ids) else ""
            raise RequestError(
                f"a prompt must be a text or a sequence of token ids, which are whole numbers{hint}"
            ) from None
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) > self.context_tokens:
            raise self._too_long(len(tokens))
        wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
        if wrong:
            raise RequestError(
                f"token id {shown(wrong[0])} is not one of the model's",
                remedy=f"ids are 0..{self.vocab_size - 1}",
            )
        return tokens


def _digest(salt: str) -> str:
    """Which peers are told; they do not learn the salt."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest() if salt else ""
