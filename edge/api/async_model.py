"""A model on its peers, for callers with an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Unpack, cast, overload

import numpy as np
from numpy.typing import NDArray

from edge.answers.documents import Document, check_document
from edge.answers.journal_folder import LAST
from edge.answers.terms import GenerationOptions, GenerationOverrides, Terms
from edge.api.asking import Prompt, Prompts, several
from edge.api.chat_prompts import Messages
from edge.api.described_model import DescribedModel
from edge.api.embedding import check_dimensions, pooled, rows_for, stacked
from edge.api.kept_documents import document_ids, kept_documents
from edge.api.kept_reply import KeptReply
from edge.api.progress_bars import progress_bars
from edge.api.reply import AsyncReplyStream, Reply, evaluate
from edge.concurrency.blocking import run_blocking
from edge.models.pictures import Tile
from edge.models.spec import ModelSpec
from edge.option_fields import checks_calls, with_overrides
from edge.planning.drift import Drift, FinishedAnswer, find_drift
from edge.progress import OnProgress, Progress
from edge.protocol.peer_info import gather_all
from edge.protocol.step_times import PeerTimes
from edge.runs.observation import gather_observed
from edge.scheduling.fairness import Priority
from edge.studies.score import Score, check_scored, score_of
from edge.text.tool_schema import Tool
from edge.weights.observation import Observed
from edge.weights.pooling import Pooling


@checks_calls
class AsyncModel(DescribedModel):
    """A model on its peers. Made by `AsyncCluster.load`; an asynchronous context manager.

    For the cluster's event loop. Any number of replies may be under way at once.
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

        For a list of prompts: the list of answers, up to `concurrency` (of the load) at once.
        progress: a bar of finished answers (None: on a terminal, and in a notebook with
        ipywidgets), or a function that takes `Progress`. options and overrides: see
        `edge.GenerationOptions`. Raises RequestError for values out of range or a prompt that does
        not fit the context, PeerLostError if a device is lost and failover is impossible.
        """
        if (prompts := several(prompt)) is not None:
            streams = [self.stream(each, options, **overrides) for each in prompts]
            return await _each_whole(streams, progress)
        return await whole(self.stream(prompt, options, **overrides))  # type: ignore[arg-type]

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

        messages: objects with role and content, or the text of a user's only message. A content is
        a text, or a list of parts: {"type": "text", "text": …} and {"type": "image", "image": …},
        with the image as a path, bytes, a data URL or a PIL.Image. tools: each a JSON schema, or a
        function with types and a docstring; calls are in `Reply.tool_calls`. tool_choice: "auto",
        "none", "required", or the name of the tool that must be called. variables: further names
        for the template, such as {"documents": []}. Raises RequestError, too, without a template,
        or if it refuses the messages.
        """
        stream = await self.stream_chat(
            messages,
            options,
            tools=tools,
            tool_choice=tool_choice,
            variables=variables,
            **overrides,
        )
        return await whole(stream)

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
            self._asking.chat_prompt,
            messages,
            with_overrides(GenerationOptions, options, overrides),
            tools=tools,
            tool_choice=tool_choice,
            variables=variables,
        )
        prompt, asked, schemas, tiles = await run_blocking(encode)
        begin = self._asking.reply_to(prompt, asked, chat_tools=schemas, tiles=tiles)
        return AsyncReplyStream(begin)

    async def resume(self, reply: KeptReply | str = LAST) -> Reply:
        """The whole of an unfinished reply that was asked for with `journal`. reply: a KeptReply,
        its id, or "last".

        Raises RequestError for a reply that is not kept, that another process has open, or that is
        of another model or another kind of load; and the errors of `generate`.
        """
        return await whole(await self.stream_resume(reply))

    async def stream_resume(self, reply: KeptReply | str = LAST) -> AsyncReplyStream:
        """Like `resume`, token by token, beginning with the tokens that it had."""
        return AsyncReplyStream(await run_blocking(lambda: self._asking.resumed(reply)))

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        chat_tools: Sequence[Tool] | None = None,
        tiles: Sequence[Tile] = (),
        client: str = "",
        cache_salt: str = "",
        id: str | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> AsyncReplyStream:
        """Like `generate`, token by token; for the arguments see `Model.stream`."""
        options = with_overrides(GenerationOptions, options, overrides)
        begin = self._asking.reply_to(
            prompt,
            options,
            chat_tools=chat_tools,
            tiles=tiles,
            client=client,
            cache_salt=cache_salt,
            id=id,
        )
        return AsyncReplyStream(begin)

    async def check_grammar(
        self, prompt: Prompt, options: GenerationOptions, tiles: Sequence[Tile] = ()
    ) -> None:
        """Raises RequestError for a schema or grammar that no answer can follow, which a stream
        would raise with its first token."""
        terms = self._asking.terms(prompt, options, tiles=tiles)
        if (match := self._asking.matching(terms)) is not None:
            await run_blocking(match)

    async def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Float32 [tokens, vocab]: row i is what the model expects after token i of the prompt."""
        tokens = self._asking.checked_ids(self._asking.ids(prompt))
        self._asking.require_open()
        return await evaluate(self._held.running, Terms(prompt=tokens, rows="logits"))

    async def keep(self, name: str, text: str) -> Document:
        """Compute a document, and keep it on this device by this name: answers may begin with it
        (`context` of `edge.GenerationOptions`).

        Raises RequestError for a bad name, and a text that is empty or longer than the context.
        """
        check_document(name, text)
        ids = await run_blocking(lambda: document_ids(self._held.required_tokenizer, text))
        await whole(self.stream(ids, max_new_tokens=1))
        keep = partial(kept_documents().keep, name, text, model=self.name, tokens=len(ids))
        return await run_blocking(keep)

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
        """An embedding: float32 [hidden] of a text or token ids; of a list [texts, hidden], in
        order.

        It is made of the hidden states after the last norm. pooling: their "mean", or the "last"
        one; None: as the model's folder says (modules.json of sentence-transformers), else the
        mean. normalize: to length 1. dimensions: only the first values, for models that were
        trained for that. client: see `stream`. priority: see `GenerationOptions`. Raises
        RequestError for a text that does not fit the context, and for dimensions that the model
        does not have.
        """
        prompts = several(texts)
        checked = [
            self._asking.checked_ids(self._asking.ids(each))
            for each in ([cast(Prompt, texts)] if prompts is None else prompts)
        ]
        rows = rows_for(pooling, self._held.pooling, name=self.name)
        check_dimensions(dimensions, self._held.hidden_size)
        asked = [
            Terms(prompt=each, rows=rows, client=client, priority=priority) for each in checked
        ]
        self._asking.require_open()

        async def vector(terms: Terms) -> NDArray[np.float32]:
            states = await evaluate(self._held.running, terms)
            return pooled(states, normalize=normalize, dimensions=dimensions)

        found = await gather_all(map(vector, asked))
        if prompts is None:
            return found[0]
        return stacked(found, dimensions or self._held.hidden_size)

    async def score(self, prompt: Prompt) -> Score:
        """The log probability of each token of a text after the first. It takes the memory of all
        logits, float32 [tokens, vocab]. Raises RequestError for fewer than two tokens."""
        tokens = self._asking.checked_ids(self._asking.ids(prompt))
        check_scored(tokens)
        return await run_blocking(partial(score_of, tokens, await self.logits(tokens)))

    def _observed(self, spec: ModelSpec) -> AsyncIterator[tuple[Observed, NDArray[np.float32]]]:
        """The sums of the inputs of its matrices, for a model that was loaded with `observes`."""
        self._asking.require_open()
        return gather_observed(self._held.running, spec)

    async def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since the last call, and its memory."""
        self._asking.require_open()
        times = await self._held.running.measure()
        self._held.forecast.learn(times)
        return times

    async def check(self, times: Sequence[PeerTimes] | None = None) -> Drift | None:
        """The cause, if the replies since the last check were slower than predicted; else None.

        times: the result of `measure` over these replies; None: it is called. Also returns None
        without a prediction by measurements, for replies that ran at once, and after a change of
        the plan.
        """
        self._asking.require_open()
        return await _drift(self, self._held.forecast.take(), times)

    async def aclose(self) -> None:
        """Free the model on its peers; replies under way end with RequestError. May be repeated."""
        try:
            for attendant in self._held.attendants:
                await attendant.aclose()
            if self._held.pictures is not None:
                await self._held.pictures.aclose()
            await self._held.running.aclose()
        finally:
            await run_blocking(self._held.close_processes)

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _drift(
    model: AsyncModel, answers: Sequence[FinishedAnswer], times: Sequence[PeerTimes] | None
) -> Drift | None:
    """The cause, if these replies were slower than predicted; else None."""
    proposal = model.proposal
    if proposal.choice.predicted is None or proposal.is_rough:
        return None
    times = times or await model.measure()
    if model.proposal is not proposal:
        return None  # a device was lost or has joined meanwhile
    names = {id: peer.name for id, peer in model.peers.items()}
    return find_drift(answers, times, proposal.plan, names)


async def _each_whole(
    streams: Sequence[AsyncReplyStream], progress: bool | OnProgress | None
) -> list[Reply]:
    with progress_bars(progress) as on_progress:
        done = count()

        def tell() -> None:
            told = Progress(phase="generate", peer="", done=next(done), total=len(streams))
            on_progress(told)

        async def answer(stream: AsyncReplyStream) -> Reply:
            reply = await whole(stream)
            tell()
            return reply

        tell()
        return await gather_all(map(answer, streams))


async def whole(stream: AsyncReplyStream) -> Reply:
    """The reply at the end of a stream."""
    async with stream:
        async for _token in stream:
            pass
    return stream.reply()
