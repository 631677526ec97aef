"""A study: one model, its load, and the interface that a study needs. Knows no cluster."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.answers.terms import GenerationOptions
from edge.models.spec import ModelSpec
from edge.planning.load_options import LoadOptions
from edge.progress import OnProgress
from edge.weights.observation import Observed


class MeasuredReply(Protocol):
    """A whole answer."""

    @property
    def tokens_per_s(self) -> float:
        """Decode speed."""


class StudiedModel(Protocol):
    """The part of `edge.AsyncModel` that studies use; leaving its context frees it."""

    @property
    def name(self) -> str:
        """The name of the checkpoint."""

    async def logits(self, prompt: Sequence[int], /) -> NDArray[np.float32]:
        """Float32 [tokens, vocab]."""

    async def generate(
        self, prompt: Sequence[int], /, *, max_new_tokens: int, ignore_eos: bool
    ) -> MeasuredReply:
        """The whole answer to a prompt."""

    def stream(
        self, prompt: Sequence[int], options: GenerationOptions, /
    ) -> AbstractAsyncContextManager[AsyncIterable[object]]:
        """The answer to a prompt, token by token."""

    def _observed(self, spec: ModelSpec, /) -> AsyncIterator[tuple[Observed, NDArray[np.float32]]]:
        """The sums of its matrices' inputs, if it was loaded with `observes`."""

    async def __aenter__(self) -> StudiedModel: ...

    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A model to study, and its environment."""

    load: Callable[[Path, LoadOptions], Awaitable[StudiedModel]]
    path: Path
    options: LoadOptions
    """The options of the load, except those that the study sets."""
    text: str | None
    """The text that it reads; None: the study's default."""
    cache_root: Path
    """This device's cache folder."""
    bars: Callable[[], AbstractContextManager[OnProgress]]
    """Opens a display of progress for one phase."""
