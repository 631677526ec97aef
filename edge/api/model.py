"""A model on its peers, for callers without an event loop: calls run on the cluster's own."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from edge.answers.documents import Document
from edge.answers.journal_folder import LAST
from edge.answers.terms import GenerationOptions, GenerationOverrides
from edge.api.asking import Prompt, Prompts
from edge.api.async_model import AsyncModel
from edge.api.chat_prompts import Messages
from edge.api.described_model import DescribedModel
from edge.api.kept_reply import KeptReply
from edge.api.reply import Reply, ReplyStream
from edge.concurrency.loop_thread import LoopThread
from edge.errors import RequestError
from edge.models.pictures import Tile
from edge.option_fields import checks_calls, with_overrides
from edge.planning.drift import Drift
from edge.progress import OnProgress
from edge.protocol.step_times import PeerTimes
from edge.scheduling.fairness import Priority
from edge.studies.score import Score
from edge.text.tool_schema import Tool
from edge.weights.pooling import Pooling


@checks_calls
class Model(DescribedModel):
    """A model on its peers. Made by `Cluster.load`; a context manager. Thread-safe.

    See the methods of `AsyncModel` for details and errors.
    """

    def __init__(self, model: AsyncModel, loop: LoopThread) -> None:
        super().__init__(model._held)
        self._model = model
        self._loop = loop

    @overload
    def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> Reply: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        options: GenerationOptions | None = None,
        *,
        progress: bool | OnProgress | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[Reply]: ...

    def generate(
        self,
        prompt: Prompt | Prompts,
        options: GenerationOptions | None = None,
        *,
        progress: bool | OnProgress | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> Reply | list[Reply]:
        """The whole answer to a text (special tokens are added) or to token ids (used as given).

        For a list of prompts: the list of answers. progress: as for `Cluster.load`, by finished
        answers. options and overrides: see `edge.GenerationOptions`. Raises RequestError for values
        out of range or a prompt that does not fit the context, PeerLostError if a device is lost
        and failover is impossible.
        """
        work: Coroutine[Any, Any, Any] = self._model.generate(
            prompt,  # type: ignore[arg-type]
            options,
            progress=progress,
            **overrides,
        )
        found: Reply | list[Reply] = self._loop.run(work)
        return found

    def chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        variables: Mapping[str, object] | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> Reply:
        """The whole answer of the assistant in a conversation, by the model's chat template."""
        work = self._model.chat(
            messages,
            options,
            tools=tools,
            tool_choice=tool_choice,
            variables=variables,
            **overrides,
        )
        return self._loop.run(work)

    def stream_chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        variables: Mapping[str, object] | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> ReplyStream:
        """Like `chat`, token by token. Leaving the loop early cancels the rest."""
        options = with_overrides(GenerationOptions, options, overrides)
        prompt, options, schemas, tiles = self._asking.chat_prompt(
            messages, options, tools=tools, tool_choice=tool_choice, variables=variables
        )
        begin = self._asking.reply_to(prompt, options, chat_tools=schemas, tiles=tiles)
        return ReplyStream(begin, self._loop)

    def resume(self, reply: KeptReply | str = LAST) -> Reply:
        """The whole of an unfinished reply that was asked for with `journal`."""
        return self._loop.run(self._model.resume(reply))

    def stream_resume(self, reply: KeptReply | str = LAST) -> ReplyStream:
        """Like `resume`, token by token, beginning with the tokens that it had."""
        return ReplyStream(self._asking.resumed(reply), self._loop)

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
    ) -> ReplyStream:
        """Like `generate`, token by token. Leaving the loop early cancels the rest.

        chat_tools: the prompt is a conversation in the model's format, and these are its tools,
        perhaps none. Thinking, text and calls are told apart then, and stop strings count in the
        text alone. tiles: those of the prompt's pictures, of `read_pictures`. client: the client
        that asks; fair queueing serves clients alike. cache_salt: prefix caches are shared between
        prompts of one salt alone, so the time to the first token tells no other client what was
        asked. id: a unique name in the logs of every device; None: a random one.
        """
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
        return ReplyStream(begin, self._loop)

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Float32 [tokens, vocab]: row i is what the model expects after token i of the prompt."""
        return self._loop.run(self._model.logits(prompt))

    def keep(self, name: str, text: str) -> Document:
        """Compute a document, and keep it on this device by this name: answers may begin with it
        (`context` of `edge.GenerationOptions`)."""
        return self._loop.run(self._model.keep(name, text))

    def embed(
        self,
        texts: Prompt | Prompts,
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        client: str = "",
        priority: Priority = "normal",
    ) -> NDArray[np.float32]:
        """An embedding: float32 [hidden] of a text or token ids; of a list [texts, hidden].

        pooling: the "mean" of the hidden states after the last norm, or the "last" one; None: as
        the model's folder says, else the mean.
        """
        return self._loop.run(
            self._model.embed(
                texts,
                pooling=pooling,
                normalize=normalize,
                dimensions=dimensions,
                client=client,
                priority=priority,
            )
        )

    def score(self, prompt: Prompt) -> Score:
        """The log probability of each token of a text after the first."""
        return self._loop.run(self._model.score(prompt))

    def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since the last call, and its memory."""
        return self._loop.run(self._model.measure())

    def check(self, times: Sequence[PeerTimes] | None = None) -> Drift | None:
        """The cause, if the replies since the last check were slower than predicted; else None."""
        return self._loop.run(self._model.check(times))

    def close(self) -> None:
        """Free the model on its peers. May be called again, also after the cluster was closed.

        Replies under way in other threads end with RequestError.
        """
        with contextlib.suppress(RequestError):  # the cluster was closed, and the model with it
            self._loop.run(self._model.aclose())

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
