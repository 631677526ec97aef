"""A model on its peers, for callers without an event loop: each call runs on the cluster's own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from edge.api.async_model import AsyncModel, DescribedModel, Prompt
from edge.api.generation_options import GenerationOptions, GenerationOverrides
from edge.api.reply import Reply, ReplyStream
from edge.concurrency.loop_thread import LoopThread
from edge.errors import RequestError
from edge.planning.drift import Drift
from edge.protocol.step_times import PeerTimes


class Model(DescribedModel):
    """A model on its peers. Made by `Cluster.load`; a context manager. For any thread.

    What its methods do, promise and raise, `AsyncModel` says of those of the same names.
    """

    def __init__(self, model: AsyncModel, loop: LoopThread) -> None:
        super().__init__(model._held)
        self._model = model
        self._loop = loop

    def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> Reply:
        """The whole answer to a text (special tokens are added) or to token ids (used as given).

        options, and by name what differs from them: see `edge.GenerationOptions`.
        Raises RequestError for values out of range or a prompt that does not fit the context,
        PeerLostError if a device goes away.
        """
        return self._loop.run(self._model.generate(prompt, options, **overrides))

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> ReplyStream:
        """Like `generate`, token by token. Leaving the loop early cancels the rest."""
        options = replace(options or GenerationOptions(), **overrides)
        return ReplyStream(self._reply_to(prompt, options), self._loop)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Float32 [tokens, vocab]: row i is what the model expects after token i."""
        return self._loop.run(self._model.logits(token_ids))

    def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since this was last called, and its memory."""
        return self._loop.run(self._model.measure())

    def check(self, times: Sequence[PeerTimes] | None = None) -> Drift | None:
        """What made the replies since the last check slower than predicted, if they were."""
        return self._loop.run(self._model.check(times))

    def close(self) -> None:
        """Free the model on its peers. May be called again, also after the cluster was closed.

        Replies under way in other threads end with RequestError.
        """
        with contextlib.suppress(RequestError):  # the cluster is closed, and this with it
            self._loop.run(self._model.aclose())

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
