"""A model on its peers, for callers with an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Unpack, cast, overload

import numpy as np
from numpy.typing import NDArray

from edge.api.described_model import DescribedModel, Messages, Prompt, Prompts, several
from edge.api.embedding import check_dimensions, pooled, rows_for
from edge.api.generation_options import (
    GenerationOptions,
    GenerationOverrides,
)
from edge.api.kept_reply import KeptReply
from edge.api.progress_bars import progress_bars
from edge.api.reply import AsyncReplyStream, Reply, evaluate
from edge.api.scoring import Score, score_of
from edge.concurrency.blocking import run_blocking
from edge.coordinator.kept_replies import LAST
from edge.coordinator.observation import gather_observed
from edge.coordinator.shares import Priority, Who
from edge.errors import RequestError
from edge.models.spec import ModelSpec
from edge.option_fields import checks_calls, with_overrides
from edge.planning.drift import Drift, find_drift
from edge.progress import OnProgress, Progress
from edge.protocol.peer_info import gather_all
from edge.protocol.step_times import PeerTimes
from edge.text.tool_schema import Tool
from edge.weights.observation import Observed
from edge.weights.pooling import Pooling


@checks_calls
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
        cache_salt: str = "",
        id: str | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> AsyncReplyStream:
        """Like `generate`, token by token. Leaving the loop early cancels the rest.

        client: on whose behalf; where requests wait, each client is served alike, however many it
        has. cache_salt: what this prompt and its answer leave in memory and on disk is found by
        prompts with the same one alone; so nobody learns from how soon a prompt is read what
        others have asked. id: what logs call it on every device, and no other request; None: a
        random one.
        """
        options = with_overrides(GenerationOptions, options, overrides)
        reply = self._reply_to(prompt, options, client=client, cache_salt=cache_salt, id=id)
        return AsyncReplyStream(reply)

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
        sentence-transformers), else the mean. normalize: to the length 1. dimensions: only the
        first `dimensions` values, for models that were trained for that. client: see `stream`.
        priority: see `GenerationOptions`. Raises RequestError for a text that does not fit the
        context, and for dimensions that the model has not.
        """
        prompts = several(texts)
        checked = [
            self._checked_ids(self._ids(each))
            for each in ([cast(Prompt, texts)] if prompts is None else prompts)
        ]
        rows = rows_for(pooling, self._held.pooling, name=self.name)
        check_dimensions(dimensions, self._held.hidden_size)
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

    def _observed(self, spec: ModelSpec) -> AsyncIterator[tuple[Observed, NDArray[np.float32]]]:
        """What its products were given so far, for one that was loaded with `observes`."""
        self._require_open()
        return gather_observed(self._held.loaded, spec)

    async def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since this was last called, and its memory."""
        self._require_open()
        times = await self._held.loaded.measure()
        self._held.forecast.learn(times)
        return times

    async def check(self, times: Sequence[PeerTimes] | None = None) -> Drift | None:
        """What made the replies since the last check slower than predicted, if they were.

        Calls `measure`, unless what it returned over these replies is given. None also where
        nothing is predicted, when replies ran at once, and when another plan runs by now.
        """
        self._require_open()
        proposal, answers = self.proposal, self._held.forecast.take()
        if proposal.choice.predicted is None:
            return None
        times = times or await self.measure()
        if self.proposal is not proposal:
            return None  # a device was lost meanwhile, or one has joined
        names = {id: peer.name for id, peer in self.peers.items()}
        return find_drift(answers, times, proposal.plan, names)

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
