"""A model on its peers, for callers with an event loop; prompts are checked here."""

from __future__ import annotations

import operator
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack, cast, overload

import numpy as np
from numpy.typing import NDArray

from edge.api.embedding import check_dimensions, pooled, rows_for
from edge.api.generation_options import (
    MOST_TOKENS_OF_A_TEXT,
    GenerationOptions,
    GenerationOverrides,
    check_priority,
)
from edge.api.joining import Joining
from edge.api.kept_reply import KeptReply
from edge.api.progress_bars import progress_bars
from edge.api.reply import AsyncReplyStream, BeginReply, Keep, Reply, ReplyUnderWay, evaluate
from edge.api.scoring import Score, score_of
from edge.api.standing_by import StandingBy
from edge.api.tool_choice import chosen, with_calls
from edge.concurrency.blocking import run_blocking
from edge.coordinator.generation import GenerationRequest
from edge.coordinator.journal import Asked, Journal, KeptLoad, KeptRequest, Reading
from edge.coordinator.kept_replies import LAST, KeptReplies
from edge.coordinator.lasting_model import LastingModel, Recovery
from edge.coordinator.observation import gather_grams
from edge.coordinator.shares import ANYBODY, Priority, Who
from edge.coordinator.work import Work
from edge.errors import PromptLengthError, RequestError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.models.spec import ModelSpec
from edge.option_fields import names_near_keywords, with_overrides
from edge.partition import Estimate, Plan
from edge.planning.drift import Drift, find_drift
from edge.planning.forecast import Forecast
from edge.planning.proposal import Proposal
from edge.progress import OnProgress, Progress
from edge.protocol.lease import Lease
from edge.protocol.peer_info import PeerInfo, gather_all
from edge.protocol.step_times import PeerTimes
from edge.text import Tokenizer
from edge.text.grammar import Grammars, Matcher
from edge.text.tool_schema import Tool, tool_schemas
from edge.text.tool_types import tool_types
from edge.weights.observation import ObservedRun
from edge.weights.pooling import MakersPooling, Pooling

Prompt = str | Sequence[int]

Prompts = list[str] | list[list[int]]
"""Several."""

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
class HeldModel:
    """What both kinds of models hold."""

    loaded: LastingModel
    forecast: Forecast
    name: str
    vocab_size: int
    hidden_size: int
    context_tokens: int
    longest_context_tokens: int
    """That it was made for."""
    end_ids: frozenset[int]
    sampling: SamplingParameters
    unused_settings: tuple[str, ...]
    pooling: MakersPooling
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    """Where there is a tokenizer."""
    peers: Mapping[str, PeerInfo]
    load: KeptLoad
    """What it was loaded by."""
    lease: Lease
    """That it is loaded under."""
    replies: KeptReplies
    """Where journals are."""
    attendants: tuple[Joining | StandingBy, ...]
    """What goes on beside its replies."""


@names_near_keywords
class DescribedModel:
    """What a model tells at once, with or without an event loop."""

    def __init__(self, held: HeldModel) -> None:
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
        """What its generation_config.json sets beside `sampling`, and is not heeded: by name."""
        return self._held.unused_settings

    @property
    def peers(self) -> Mapping[str, PeerInfo]:
        """Those that the model was loaded with, by id."""
        return self._held.peers

    @property
    def plan(self) -> Plan:
        """What runs where; devices are peers' ids (see `peers`)."""
        return self._held.loaded.plan

    @property
    def proposal(self) -> Proposal:
        """The plan with all that was known when it was chosen, and what is predicted of it."""
        return self._held.forecast.proposal

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Weights that were sent to each peer, by name; 0 for one that had its shard cached."""
        return dict(self._held.loaded.sent_bytes)

    @property
    def token_weight_bytes(self) -> Mapping[str, int]:
        """Weights, as its kernels keep them, that each peer reads for one token, by name."""
        return dict(self._held.loaded.token_weight_bytes)

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
        return tuple(self._held.loaded.recoveries)

    @property
    def work(self) -> Work:
        """How many tokens its peers were given to compute so far, and in how many steps."""
        return self._held.loaded.work

    @property
    def is_recovering(self) -> bool:
        """A device was lost or joined, and the model is loaded anew; answers wait."""
        return self._held.loaded.is_recovering

    @property
    def is_over(self) -> bool:
        """It was closed, or has lost peers and does not fit on those that are left."""
        return self._held.loaded.failure is not None

    def predict(
        self, *, prompt_tokens: int, output_tokens: int, concurrency: int = 1
    ) -> Estimate | None:
        """How fast answers of this size should be; None where a device was not measured."""
        try:
            return self.proposal.predict(
                prompt_tokens=prompt_tokens, output_tokens=output_tokens, concurrency=concurrency
            )
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _reply_to(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        *,
        reading: Reading | None = None,
        client: str = "",
        id: str | None = None,
    ) -> BeginReply:
        """A reply to be started by whoever reads it; the prompt and the options are checked."""
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
        request = options.request(
            tokens,
            end_ids=self._held.end_ids,
            room=room,
            usual=self._held.sampling,
        )
        if (biased := max(request.sampling.logit_bias, default=0)) >= self.vocab_size:
            raise RequestError(
                f"logit_bias has token id {biased}, which is not one of the model's",
                remedy=f"ids are 0..{self.vocab_size - 1}",
            )
        held = self._held

        def keep() -> Journal | None:
            if not options.journal:
                return None
            kept = KeptRequest.of(request, reading)
            return held.replies.begin(
                Asked(begun_s=time.time(), load=held.load, request=kept), held.lease
            )

        return self._begin_reply(request, reading, keep, Who(client, options.priority), id)

    def _begin_reply(
        self,
        request: GenerationRequest,
        reading: Reading | None,
        keep: Keep,
        who: Who = ANYBODY,
        id: str | None = None,
    ) -> BeginReply:
        self._require_open()
        held = self._held
        match = self._matching(request)
        begin = partial(ReplyUnderWay, held.loaded, request, held.tokenizer, held.forecast)
        return partial(begin, reading, match, keep, who=who, id=id)

    def _resumed(self, reply: KeptReply | str) -> BeginReply:
        """A reply that goes on; its journal is ours until then. Reads its file."""
        journal = self._held.replies.open(reply) if isinstance(reply, str) else reply.journal
        try:
            return self._goes_on(journal)
        except BaseException:
            journal.close()
            raise

    def _goes_on(self, journal: Journal) -> BeginReply:
        if not journal.is_open:
            raise RequestError(f"the reply {journal.id} was closed", remedy="open it again")
        asked = journal.kept.asked
        if asked.load.fingerprint != self._held.load.fingerprint:
            raise RequestError(
                f"the reply {journal.id} is of {asked.load.path} as it was then, and this is "
                "another model, or its files were changed since",
                remedy="ask again",
            )
        if (unlike := asked.load.unlike(self._held.load)) is not None:
            raise RequestError(
                f"the reply {journal.id} cannot go on with this model, which has {unlike}",
                remedy=f"load it as it was: edge run --resume {journal.id}",
            )
        request = asked.request.request()
        self._checked_ids(request.prompt_ids)
        ids = [*(token.token_id for token in journal.kept.tokens), *request.end_ids]
        ids += request.sampling.logit_bias
        most = self.context_tokens - len(request.prompt_ids)
        if any(id >= self.vocab_size for id in ids) or request.max_new_tokens > most:
            raise RequestError(
                f"the reply {journal.id} is not of this model: it was damaged", remedy="ask again"
            )
        if journal.kept.lease.run != self._held.lease.run:
            journal.held_by(self._held.lease)
        return self._begin_reply(request, asked.request.reading, lambda: journal)

    def _matching(self, request: GenerationRequest) -> Callable[[], Matcher] | None:
        """What makes the matcher of an answer that keeps to a grammar; takes its time."""
        if request.grammar is None:
            return None
        grammars, tokenizer = self._held.grammars, self._held.tokenizer
        if grammars is None or tokenizer is None:
            raise RequestError(
                f"{self.name} has no tokenizer.json, so its answers can be kept to no schema or "
                "grammar"
            )
        is_thinking = tokenizer.begins_thinking(request.prompt_ids)
        return partial(grammars.begin, request.grammar, is_thinking=is_thinking)

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
    ) -> tuple[list[int], GenerationOptions, Reading]:
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
        return ids, options, Reading(thinking=thinking, form=form, tools=tool_types(schemas))

    def _too_long(self, tokens: int, what: str = "") -> PromptLengthError:
        """Of a prompt of so many; it says what helps."""
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
        if (failure := self._held.loaded.failure) is not None:
            raise failure

    def _checked_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        try:
            tokens = tuple(operator.index(token) for token in token_ids)
        except TypeError:
            hint = "; messages are for chat and stream_chat" if _are_messages(token_ids) else ""
            raise RequestError(
                f"a prompt is a text or a sequence of token ids, which are whole numbers{hint}"
            ) from None
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) > self.context_tokens:
            raise self._too_long(len(tokens))
        wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
        if wrong:
            raise RequestError(
                f"token id {wrong[0]} is not one of the model's",
                remedy=f"ids are 0..{self.vocab_size - 1}",
            )
        return tokens


@names_near_keywords
class AsyncModel(DescribedModel):
    """A model on its peers. Made by `AsyncCluster.load`; an asynchronous context manager.

    For the loop that the cluster was opened on. Any number of replies may be under way at once.
    """

    @overload
    async def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> Reply: ...

    @overload
    async def generate(
        self,
        prompt: Prompts,
        options: GenerationOptions | None = None,
        *,
        progress: bool | OnProgress | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[Reply]: ...

    async def generate(
        self,
        prompt: Prompt | Prompts,
        options: GenerationOptions | None = None,
        *,
        progress: bool | OnProgress | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> Reply | list[Reply]:
        """The whole answer to a text (special tokens are added) or to token ids (used as given).

        Of a list of such prompts the answers, in its order: as many at once as the model was loaded
        for (`concurrency`); of an empty one none. progress: a bar of those that are whole (None: on
        a terminal, and in a notebook with ipywidgets), or a function that takes `Progress`.
        options, and by name what differs from them: see `edge.GenerationOptions`. Raises
        RequestError for values out of range or a prompt that does not fit the context,
        PeerLostError if a device goes away and what is left cannot go on.
        """
        if (prompts := several(prompt)) is not None:
            replies: dict[int, Reply] = {}
            with progress_bars(progress) as on_progress:

                def tell() -> None:
                    done, total = len(replies), len(prompts)
                    on_progress(Progress(phase="generate", peer="", done=done, total=total))

                async def answer(number: int, each: Prompt) -> None:
                    replies[number] = await self._whole(self.stream(each, options, **overrides))
                    tell()

                tell()
                await gather_all(answer(number, each) for number, each in enumerate(prompts))
            return [replies[number] for number in range(len(prompts))]
        return await self._whole(self.stream(prompt, options, **overrides))  # type: ignore[arg-type]

    async def chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        variables: Mapping[str, object] | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> Reply:
        """The whole answer of the assistant in a conversation, by the model's chat template.

        messages: objects with role and content, or the text of a user's only message. tools: what
        the model may call, each a JSON schema or a function with types and a docstring; what it
        calls is in `Reply.tool_calls`. tool_choice: "auto", "none", "required" (it must call one),
        or the name of the tool that it must call. thinking=False has a model that can think answer
        at once. variables: further names for the template, such as {"documents": []}. Raises
        RequestError, too, where there is no template or it refuses the messages.
        """
        stream = await self.stream_chat(
            messages,
            options,
            tools=tools,
            tool_choice=tool_choice,
            variables=variables,
            **overrides,
        )
        return await self._whole(stream)

    async def stream_chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        variables: Mapping[str, object] | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> AsyncReplyStream:
        """Like `chat`, token by token, once the template has run."""
        encode = partial(
            self._chat_prompt,
            messages,
            with_overrides(GenerationOptions, options, overrides),
            tools=tools,
            tool_choice=tool_choice,
            variables=variables,
        )
        prompt, asked, reading = await run_blocking(encode)
        return AsyncReplyStream(self._reply_to(prompt, asked, reading=reading))

    async def resume(self, reply: KeptReply | str = LAST) -> Reply:
        """The whole of a reply that was asked for with `journal` and not finished: what there was,
        and what would have followed. `reply`: see `edge.KeptReply`; or its id, or "last".

        Raises RequestError for one that is not kept, that another process has under way, or that
        is of another model or one that was loaded otherwise; and what `generate` raises.
        """
        return await self._whole(await self.stream_resume(reply))

    async def stream_resume(self, reply: KeptReply | str = LAST) -> AsyncReplyStream:
        """Like `resume`, token by token: at first those that there were."""
        return AsyncReplyStream(await run_blocking(lambda: self._resumed(reply)))

    async def _whole(self, stream: AsyncReplyStream) -> Reply:
        async with stream:
            async for _token in stream:
                pass
        return stream.reply()

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        client: str = "",
        id: str | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> AsyncReplyStream:
        """Like `generate`, token by token. Leaving the loop early cancels the rest.

        client: on whose behalf; where requests wait, each client is served alike, however many it
        has. id: what logs call it on every device, and no other request; None: a random one.
        """
        options = with_overrides(GenerationOptions, options, overrides)
        return AsyncReplyStream(self._reply_to(prompt, options, client=client, id=id))

    async def check_grammar(self, prompt: Prompt, options: GenerationOptions) -> None:
        """Raise now what a stream would raise with its first token: RequestError for a schema or
        grammar that no answer can be kept to."""
        tokens = self._checked_ids(self._ids(prompt))
        request = options.request(
            tokens, end_ids=self._held.end_ids, room=1, usual=self._held.sampling
        )
        if (match := self._matching(request)) is not None:
            await run_blocking(match)

    async def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Float32 [tokens, vocab]: row i is what the model expects after token i of the prompt."""
        tokens = self._checked_ids(self._ids(prompt))
        self._require_open()
        return await evaluate(self._held.loaded, tokens)

    async def embed(
        self,
        texts: Prompt | Prompts,
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        client: str = "",
        priority: Priority = "normal",
    ) -> NDArray[np.float32]:
        """Float32 [hidden] of a text or token ids; of a list of them [texts, hidden], in its order.

        They are made of the hidden states after the last norm: pooling takes their mean, or only
        that of the last token; None: as the model's folder says (modules.json of
        sentence-transformers), else the mean. normalize: to the length 1. dimensions: only so many
        of the first values, for models that were trained for that. client: see `stream`. priority:
        see `GenerationOptions`. Raises RequestError for a text that does not fit the context, and
        for dimensions that the model has not.
        """
        prompts = several(texts)
        checked = [
            self._checked_ids(self._ids(each))
            for each in ([cast(Prompt, texts)] if prompts is None else prompts)
        ]
        rows = rows_for(pooling, self._held.pooling, name=self.name)
        check_dimensions(dimensions, self._held.hidden_size)
        check_priority(priority)
        who = Who(client, priority)
        self._require_open()
        found = np.empty((len(checked), dimensions or self._held.hidden_size), np.float32)

        async def fill(number: int, tokens: tuple[int, ...]) -> None:
            states = await evaluate(self._held.loaded, tokens, rows, who=who)
            found[number] = pooled(states, normalize=normalize, dimensions=dimensions)

        await gather_all(fill(number, tokens) for number, tokens in enumerate(checked))
        return found[0] if prompts is None else found

    async def score(self, prompt: Prompt) -> Score:
        """How likely a text is, token by token. It takes the memory of its logits: a float32 for
        each of its tokens and each token of the vocabulary. Raises RequestError for one of fewer
        than two tokens: each is judged by those before it."""
        tokens = self._checked_ids(self._ids(prompt))
        if len(tokens) < 2:
            raise RequestError(
                "a score is of each token after the first, and there is one token",
                remedy="give a longer text",
            )
        return await run_blocking(partial(score_of, tokens, await self.logits(tokens)))

    def _observed(self, spec: ModelSpec) -> AsyncIterator[tuple[ObservedRun, NDArray[np.float32]]]:
        """What its products were given so far, for one that was loaded with `observes`."""
        self._require_open()
        return gather_grams(self._held.loaded, spec)

    async def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since this was last called, and its memory."""
        self._require_open()
        return await self._held.loaded.measure()

    async def check(self, times: Sequence[PeerTimes] | None = None) -> Drift | None:
        """What made the replies since the last check slower than predicted, if they were.

        Calls `measure`, unless what it returned over these replies is given. None also where
        nothing is predicted, and when replies ran at once.
        """
        self._require_open()
        answers = self._held.forecast.take()
        if self.proposal.choice.predicted is None:
            return None
        names = {id: peer.name for id, peer in self.peers.items()}
        return find_drift(answers, times or await self.measure(), self.plan, names)

    async def aclose(self) -> None:
        """Free the model on its peers; replies under way end with RequestError. May be repeated."""
        try:
            for attendant in self._held.attendants:
                await attendant.aclose()
            await self._held.loaded.aclose()
        finally:
            if self._held.tokenizer is not None:
                await run_blocking(self._held.tokenizer.close)

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
