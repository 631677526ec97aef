"""Who a session belongs to: a run of a model, and the coordinator that has it now."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

MOST_TERMS = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A run keeps its name from coordinator to coordinator. One that takes it over adds 1 to its
    term."""

    run: Annotated[str, Meta(min_length=1, max_length=64)] = field(
        default_factory=lambda: uuid.uuid4().hex
    )
    term: Annotated[int, Meta(ge=1, le=MOST_TERMS)] = 1
