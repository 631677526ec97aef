"""Errors of dividing work, and what the person asking can do about them.

PartitionError
├── PlanError      the plan, or the request for one, is wrong; `problems` says each thing
└── CapacityError  the devices are too small; `shortages` says who lacks what
"""

from collections.abc import Sequence
from dataclasses import dataclass

_PROBLEMS_SHOWN = 16
"""Problems that the message of a PlanError spells out; `problems` always has all of them."""


class PartitionError(Exception):
    """Base of everything this package raises on purpose, apart from ValueError for wrong facts."""


class PlanError(PartitionError):
    """A plan that cannot be run, or that cannot exist.

    `problems` holds one whole sentence for each thing that is wrong, in reading order.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        shown = " ".join(self.problems[:_PROBLEMS_SHOWN])
        hidden = len(self.problems) - _PROBLEMS_SHOWN
        super().__init__(f"{shown} And {hidden} more problems." if hidden > 0 else shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """One device that is too small, and by how much."""

    device: str
    """The id of the device."""
    name: str
    """What people call it."""
    missing_bytes: int
    """At least 1."""

    @property
    def words(self) -> str:
        return f"{self.name!r} lacks {size_in_words(self.missing_bytes)}"


class CapacityError(PartitionError):
    """The devices are too small for the model and its workload.

    `shortages` lists every device that is short; together they are one remedy, so giving each
    device what it lacks is enough. `device` is the one that lacks most, `missing_bytes` is what
    that one lacks. `largest_context_tokens` is the longest context per request that would fit the
    devices as they are, or None when no context would.
    """

    def __init__(
        self,
        shortages: Sequence[Shortage],
        *,
        context_tokens: int,
        largest_context_tokens: int | None,
    ) -> None:
        self.shortages = tuple(shortages)
        # max() keeps the first of equals, so the answer does not depend on anything but the order.
        worst = max(self.shortages, key=lambda shortage: shortage.missing_bytes)
        self.device = worst.device
        self.missing_bytes = worst.missing_bytes
        self.context_tokens = context_tokens
        self.largest_context_tokens = largest_context_tokens
        super().__init__(self._message())

    def _message(self) -> str:
        lacks = "; ".join(shortage.words for shortage in self.shortages)
        remedies = ["that much more memory", "a smaller dtype for the weights"]
        if self.largest_context_tokens is not None:
            remedies.append(
                f"at most {self.largest_context_tokens:,} context tokens per request"
                f" instead of {self.context_tokens:,}"
            )
        return f"The model does not fit: {lacks}. What helps: {', or '.join(remedies)}."


def size_in_words(count: int) -> str:
    """Bytes for people, with the exact number where rounding hides something."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit} ({count:,} bytes)"
    return f"{count:,} byte{'' if count == 1 else 's'}"
