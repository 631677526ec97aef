"""Requests to a model: checked prompts and options become replies that can be started."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from edge.answers.documents import text_after_documents
from edge.answers.journal import Journal
from edge.answers.journal_records import JournalHead
from edge.answers.terms import AnswerReading, GenerationOptions, Terms
from edge.api.chat_prompts import Messages, chat_prompt
from edge.api.kept_documents import kept_documents
from edge.api.kept_reply import KeptReply
from edge.api.loaded_model import LoadedModel
from edge.api.reply import AskedReply, BeginReply, ReplyFeed
from edge.errors import PromptLengthError, RequestError, shown
from edge.models.further_head import FURTHER_FAMILIES
from edge.models.pictures import Tile, is_row
from edge.text.grammar import Matcher
from edge.text.tool_schema import Tool, tool_schemas
from edge.text.tool_types import tool_types

Prompt = str | Sequence[int]

LONGEST_ID = 256
"""Most characters of a request's id; peers accept at most 1,024."""

Prompts = list[str] | list[list[int]]
"""A list of prompts."""


def several(prompt: Prompt | Prompts) -> Sequence[Prompt] | None:
    """The prompts of a list, which may be empty; None for a single prompt."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return None
    if all(isinstance(each, str | Sequence | np.ndarray) for each in prompt):
        return cast(Sequence[Prompt], prompt)
    return None


def _are_messages(values: object) -> bool:
    return isinstance(values, Sequence) and all(isinstance(each, Mapping) for each in values)


class Asking:
    """Makes the replies of one model; for blocking and asynchronous callers."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def reply_to(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        *,
        chat_tools: Sequence[Tool] | None = None,
        tiles: Sequence[Tile] = (),
        client: str = "",
        cache_salt: str = "",
        id: str | None = None,
    ) -> BeginReply:
        """A reply that its reader starts. Checks the prompt and the options.

        chat_tools: the tools that the answer may call; None: the prompt is no conversation. tiles:
        the prompt's pictures, whose rows have ids in it.
        """
        if id is not None and not (id.isprintable() and len(id) <= LONGEST_ID):
            raise RequestError(
                f"id must be a text of at most {LONGEST_ID} printable characters, not {shown(id)}"
            )
        terms = self.terms(
            prompt,
            options,
            chat_tools,
            tiles=tiles,
            client=client,
            cache_salt=_digest(cache_salt),
        )
        model = self._model

        def keep() -> Journal | None:
            if not options.journal:
                return None
            head = JournalHead(begun_s=time.time(), load=model.load, terms=terms)
            return model.replies.begin(head, model.lease)

        return self._begin_reply(terms, keep, id)

    def terms(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        chat_tools: Sequence[Tool] | None = None,
        *,
        tiles: Sequence[Tile] = (),
        **further: Any,
    ) -> Terms:
        """The checked terms of an answer to this prompt. further: see GenerationOptions.terms."""
        if options.thinking is not None and isinstance(prompt, str):
            raise RequestError(
                "thinking is a setting of the chat template, which a text prompt does not use; use "
                "chat or stream_chat"
            )
        if isinstance(prompt, str):
            options = options.after_text()
            prompt = text_after_documents(prompt, kept_documents().texts(options.context))
        elif options.context:
            raise RequestError(
                "token ids begin with no document", remedy="give a text, or leave context out"
            )
        tokens = self.checked_ids(self.ids(prompt), has_pictures=bool(tiles))
        room = self._model.context_tokens - len(tokens)
        if room < 1:
            raise self._too_long(len(tokens), ": no room for an answer")
        terms = options.terms(
            tokens,
            end_ids=self._model.end_ids,
            room=room,
            usual=self._model.sampling,
            speculate=self._model.speculate,
            reading=None if chat_tools is None else self._reading(tokens, chat_tools),
            **further,
        )
        terms = replace(terms, tiles=tuple(tiles))
        if tiles and terms.speculate in ("draft", "mtp"):
            terms = replace(terms, speculate="auto")  # which knows tokens only
        if terms.speculate == "draft" and not self._model.has_draft:
            raise RequestError(
                'speculate "draft" needs a draft model', remedy="load the model with one: draft"
            )
        if terms.speculate == "mtp" != self._model.speculate:
            raise RequestError(
                "speculate mtp needs the model's further head, which was not loaded",
                remedy="load the model with speculate mtp; "
                f"{', '.join(FURTHER_FAMILIES)} have such heads",
            )
        given = (("logit_bias", terms.sampling.logit_bias), ("stop_token_ids", terms.end_ids))
        for name, ids in given:
            if (largest := max(ids, default=0)) >= self._model.vocab_size:
                raise RequestError(
                    f"{name} has token id {largest}, which is not one of the model's",
                    remedy=f"ids are 0..{self._model.vocab_size - 1}",
                )
        return terms

    def _begin_reply(
        self, terms: Terms, keep: Callable[[], Journal | None], id: str | None = None
    ) -> BeginReply:
        self.require_open()
        asked = AskedReply(terms=terms, match=self.matching(terms), keep=keep, id=id)
        return partial(ReplyFeed, self._model.maker, asked)

    def resumed(self, reply: KeptReply | str) -> BeginReply:
        """Resume a reply; reads its journal."""
        journal = self._model.replies.open(reply) if isinstance(reply, str) else reply.journal
        try:
            return self._resume(journal)
        except BaseException:
            journal.close()
            raise

    def _resume(self, journal: Journal) -> BeginReply:
        if not journal.is_open:
            raise RequestError(f"the reply {journal.id} was closed", remedy="open it again")
        head, terms = journal.content.head, journal.content.head.terms
        if head.load.fingerprint != self._model.load.fingerprint:
            raise RequestError(
                f"the reply {journal.id} was asked of {head.load.path}, and this is another model, "
                "or its files have changed",
                remedy="ask again",
            )
        if (unlike := head.load.unlike(self._model.load)) is not None:
            raise RequestError(
                f"the reply {journal.id} cannot continue on this model, which has {unlike}",
                remedy=f"load it as it was: edge run --resume {journal.id}",
            )
        self.checked_ids(terms.prompt, has_pictures=bool(terms.tiles))
        ids = [*(token.token_id for token in journal.content.tokens), *terms.end_ids]
        ids += terms.sampling.logit_bias
        most = self._model.context_tokens - len(terms.prompt)
        if any(id >= self._model.vocab_size for id in ids) or terms.max_new_tokens > most:
            raise RequestError(
                f"the reply {journal.id} does not fit this model: its journal is damaged",
                remedy="ask again",
            )
        if journal.content.lease.run != self._model.lease.run:
            journal.held_by(self._model.lease)
        return self._begin_reply(terms, lambda: journal)

    def matching(self, terms: Terms) -> Callable[[], Matcher] | None:
        """Compiles the grammar of an answer, which takes time; None: it has no grammar."""
        if terms.grammar is None:
            return None
        grammars, tokenizer = self._model.grammars, self._model.tokenizer
        if grammars is None or tokenizer is None:
            raise RequestError(
                f"{self._model.name} has no tokenizer.json, which a schema or grammar needs",
                remedy="leave both out, or put the model's tokenizer.json beside it",
            )
        is_thinking = tokenizer.begins_thinking(terms.prompt_tokens)
        return partial(
            grammars.begin,
            terms.grammar,
            is_thinking=is_thinking,
            guesses=terms.speculate != "off",
        )

    def ids(self, prompt: Prompt) -> Sequence[int]:
        return self._model.required_tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def chat_prompt(
        self, messages: Messages, options: GenerationOptions, **asked: Any
    ) -> tuple[list[int], GenerationOptions, Sequence[Tool], Sequence[Tile]]:
        """See `edge.api.chat_prompts.chat_prompt`."""
        return chat_prompt(self._model, messages, options, **asked)

    def _reading(self, prompt: Sequence[int], tools: Sequence[Tool]) -> AnswerReading | None:
        """How an answer to a conversation is read; None without a tokenizer."""
        if (tokenizer := self._model.tokenizer) is None:
            return None
        return AnswerReading(
            thinking=tokenizer.begins_thinking([id for id in prompt if not is_row(id)]),
            form=tokenizer.answer_form,
            tools=tool_types(tool_schemas(tools) or ()),
        )

    def _too_long(self, tokens: int, what: str = "") -> PromptLengthError:
        """The error for a prompt of `tokens` tokens; it says what helps."""
        remedy = "shorten it, or load the model with more context_tokens"
        if self._model.context_tokens == self._model.longest_context_tokens:
            remedy = "shorten it: the model was trained for no more"
        return PromptLengthError(
            f"the prompt has {tokens} tokens and the context {self._model.context_tokens}{what}",
            remedy=remedy,
            prompt_tokens=tokens,
            context_tokens=self._model.context_tokens,
        )

    def require_open(self) -> None:
        """Raises the error that ended the model, if it has ended."""
        if (failure := self._model.running.failure) is not None:
            raise failure

    def checked_ids(
        self, token_ids: Sequence[int], *, has_pictures: bool = False
    ) -> tuple[int, ...]:
        """The prompt's ids, checked. has_pictures: some may stand for rows of pictures."""
        try:
            if isinstance(token_ids, bytes | bytearray | memoryview | Set | Mapping):
                raise TypeError  # not integers, or unordered
            tokens = tuple(operator.index(token) for token in token_ids)
        except TypeError:
            hint = "; messages are for chat and stream_chat" if _are_messages(token_ids) else ""
            raise RequestError(
                f"a prompt must be a text or a sequence of token ids, which are whole numbers{hint}"
            ) from None
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) > self._model.context_tokens:
            raise self._too_long(len(tokens))
        wrong = [
            token
            for token in tokens
            if not 0 <= token < self._model.vocab_size and not (has_pictures and is_row(token))
        ]
        if wrong:
            raise RequestError(
                f"token id {shown(wrong[0])} is not one of the model's",
                remedy=f"ids are 0..{self._model.vocab_size - 1}",
            )
        return tokens


def _digest(salt: str) -> str:
    """The digest of a salt. Peers get it in place of the salt."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest() if salt else ""
