"""Copies of the keys and values of an answer, as the shards of a plan have sent them.

A plan whose shards cut the model alike, and keep keys and values alike, takes them back: then only
the prompt has to be computed again, and the last few tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge.partition import Plan
from edge.protocol.topology import Seat

Shape = tuple[object, ...]


def shape_of(plan: Plan) -> Shape:
    """What is the same for plans that cut a model alike."""
    return tuple(
        (stage.layers, tuple(replace(each, device="") for each in stage.slices))
        for stage in plan.stages
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvForm:
    """Which shard keeps what, and how: copies go from one plan to another of the same form."""

    shape: Shape
    digests: Mapping[Seat, str]
    """Of how each shard keeps keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Of some tokens, from one shard."""

    first: int
    tokens: int
    rows: bytes

    @property
    def last(self) -> int:
        return self.first + self.tokens


@dataclass(slots=True, kw_only=True)
class KeptKv:
    """Of one request."""

    form: KvForm
    prompt_tokens: int
    copies: dict[Seat, list[Copy]] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, seat: Seat, copy: Copy) -> bool:
        """Keep what follows what the shard has sent; False, and nothing is kept, of all else."""
        parts = self.copies.setdefault(seat, [])
        if copy.first != (parts[-1].last if parts else self.prompt_tokens):
            return False
        parts.append(copy)
        self.num_bytes += len(copy.rows)
        return True

    def whole(self, most: int) -> int:
        """How many tokens of the answer, `most` of them, every shard has sent copies of."""
        ends = [{each.last for each in self.copies.get(seat, ())} for seat in self.form.digests]
        common = set.intersection(*ends) if ends else set()
        fitting = [end - self.prompt_tokens for end in common if end - self.prompt_tokens <= most]
        return max(fitting, default=0)

    def cut(self, tokens: int) -> None:
        """Forget what is behind so many tokens of the answer: it will come again."""
        for seat, parts in self.copies.items():
            self.copies[seat] = [each for each in parts if each.last <= self.prompt_tokens + tokens]
        self.num_bytes = sum(len(each.rows) for own in self.copies.values() for each in own)
