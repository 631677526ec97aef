"""A model on its peers, for callers without an event loop: each call runs on the cluster's own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from edge.api.async_model import AsyncModel, Prompt
from edge.api.generation_options import GenerationOptions, GenerationOverrides
from edge.api.reply import Reply, ReplyStream
from edge.concurrency.loop_thread import LoopThread
from edge.errors import RequestError
from edge.planning.drift import Drift
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step_times import PeerTimes
from edge.text import Tokenizer
from partition import Estimate, Plan


class Model:
    """A model on its peers. Made by `Cluster.load`; a context manager. For any thread.

    What its methods do, promise and raise, `AsyncModel` says of those of the same names.
    """

    def __init__(self, model: AsyncModel, loop: LoopThread) -> None:
        self._model = model
        self._loop = loop

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return self._model.name

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self._model.vocab_size

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together."""
        return self._model.context_tokens

    @property
    def peers(self) -> Mapping[str, PeerInfo]:
        """Those that the model was loaded with, by id."""
        return self._model.peers

    @property
    def plan(self) -> Plan:
        """What runs where; devices are peers' ids (see `peers`)."""
        return self._model.plan

    @property
    def proposal(self) -> Proposal:
        """The plan with all that was known when it was chosen, and what is predicted of it."""
        return self._model.proposal

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Weights that were sent to each peer, by name; 0 for one that had its shard cached."""
        return self._model.sent_bytes

    @property
    def token_weight_bytes(self) -> Mapping[str, int]:
        """Weights, as its kernels keep them, that each peer reads for one token, by name."""
        return self._model.token_weight_bytes

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError for a checkpoint without tokenizer.json."""
        return self._model.tokenizer

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
        return ReplyStream(self._model._reply_to(prompt, options), self._loop)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Float32 [tokens, vocab]: row i is what the model expects after token i."""
        return self._loop.run(self._model.logits(token_ids))

    def measure(self) -> list[PeerTimes]:
        """Where each peer's time went since this was last called, and its memory."""
        return self._loop.run(self._model.measure())

    def predict(
        self, *, prompt_tokens: int, output_tokens: int, concurrency: int = 1
    ) -> Estimate | None:
        """How fast answers of this size should be; None where a device was not measured."""
        return self._model.predict(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, concurrency=concurrency
        )

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
