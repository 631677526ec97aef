"""Errors of planning, and what a user can do about them.

PartitionError
├── PlanError      the plan, or the request for one, is wrong; `problems` lists every mistake
└── CapacityError  the devices are too small; `shortages` lists what each device lacks
"""

from collections.abc import Sequence
from dataclasses import dataclass

_PROBLEMS_SHOWN = 16
"""Problems that the message of a PlanError lists; its attribute `problems` has all of them."""


class PartitionError(Exception):
    """Base of the errors that this package raises on purpose. Wrong facts are a ValueError
    instead."""


class PlanError(PartitionError):
    """A plan that cannot be run, or that cannot exist.

    `problems` has one sentence for each mistake, in reading order.
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
    """The device's display name."""
    missing_bytes: int
    """At least 1."""

    @property
    def words(self) -> str:
        return f"{self.name!r} lacks {size_in_words(self.missing_bytes)}"


class CapacityError(PartitionError):
    """The devices are too small for the model and its workload.

    `shortages` lists every device that lacks memory; the model fits once each of them has what it
    lacks. `device` is the id of the one that lacks most, and `missing_bytes` is what that device
    lacks. `largest_context_tokens` is the longest context per request that fits the devices as they
    are, or None where no context fits.
    """

    def __init__(
        self,
        shortages: Sequence[Shortage],
        *,
        context_tokens: int,
        largest_context_tokens: int | None,
    ) -> None:
        self.shortages = tuple(shortages)
        # max() keeps the first of equals, so the order of the devices alone decides.
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
    """A number of bytes as text, with the exact number where rounding hides something."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit} ({count:,} bytes)"
    return f"{count:,} byte{'' if count == 1 else 's'}"
