"""The owner of a session: a run of a model, and the term of its coordinator."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

MOST_TERMS = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A run of a model and a term. The run keeps its name when another coordinator takes over; the
    term then grows by 1."""

    run: Annotated[str, Meta(min_length=1, max_length=64)] = field(
        default_factory=lambda: uuid.uuid4().hex
    )
    term: Annotated[int, Meta(ge=1, le=MOST_TERMS)] = 1
