"""Who a session belongs to: a run of a model, and the coordinator that has it now."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

MOST_TERMS = 1 << 32
_LONGEST_RUN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A run keeps its name from coordinator to coordinator; who takes it over adds one to its term.

    ValueError for what is none.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    term: int = 1

    def __post_init__(self) -> None:
        if not 0 < len(self.run) <= _LONGEST_RUN:
            raise ValueError(f"a run's name has 1 to {_LONGEST_RUN} characters")
        if not 0 < self.term <= MOST_TERMS:
            raise ValueError(f"term {self.term}")
