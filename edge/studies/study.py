"""A study: one model, how it is loaded, and what a study needs of it then. Knows no cluster."""

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
    """A loaded model, which leaving its context frees: what studies use of `edge.AsyncModel`."""

    @property
    def name(self) -> str:
        """Name of the checkpoint."""

    async def logits(self, prompt: Sequence[int], /) -> NDArray[np.float32]:
        """Float32 [tokens, vocab]."""

    async def generate(
        self, prompt: Sequence[int], /, *, max_new_tokens: int, ignore_eos: bool
    ) -> MeasuredReply:
        """The whole answer to a prompt."""

    def stream(
        self, prompt: Sequence[int], options: GenerationOptions, /
    ) -> AbstractAsyncContextManager[AsyncIterable[object]]:
        """Token by token."""

    def _observed(self, spec: ModelSpec, /) -> AsyncIterator[tuple[Observed, NDArray[np.float32]]]:
        """Sums of the inputs of its products, where it was loaded with `observes`."""

    async def __aenter__(self) -> StudiedModel: ...

    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A model to study, and where."""

    load: Callable[[Path, LoadOptions], Awaitable[StudiedModel]]
    path: Path
    options: LoadOptions
    """What it is loaded with, but for what the study itself decides."""
    text: str | None
    """What it reads; None for what each study has in its place."""
    cache_root: Path
    """Folder of the caches of this device."""
    bars: Callable[[], AbstractContextManager[OnProgress]]
    """Opens a display of progress for one phase."""
