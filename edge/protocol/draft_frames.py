"""Frames about a draft model: it serves drafts to the sampler of a larger one, which asks it.

The questions themselves go over a link of their own (edge/engine/draft_questions.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.protocol.frame_codec import Call, Done
from edge.protocol.topology import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDrafts(Call[Done]):
    """Have a loaded model guess the tokens of a larger one, for the device that samples those and
    links up next."""

    kind, limit_s = "serve_drafts", 60.0
    session: str
    device: str | None
    """Its id; None: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """A draft model that serves drafts: where it is, and its sizes."""

    place: Place
    session: str
    context_tokens: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    ahead: bool
    """It drafts on while steps run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDrafts(Call[Done]):
    """Have the sampler link up with a draft model, and ask it from then on, or ask none."""

    kind, limit_s = "ask_drafts", 60.0
    session: str
    source: DraftSource | None
    """None: there is none any more."""
