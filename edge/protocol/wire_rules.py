"""Wire formats of activations: one rule for every sum and hop of a plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from msgspec import Meta

from edge.partition import MOST_SHARDS
from edge.transport import WireRule

Wire = Literal["float32", "float16", "int8", "auto"]


WIRES: tuple[Wire, ...] = get_args(Wire)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRules:
    """One rule for each sum of a stage and each hop between stages of a plan."""

    sums: Annotated[tuple[WireRule, ...], Meta(max_length=MOST_SHARDS)]
    """By stage."""
    hops: Annotated[tuple[WireRule, ...], Meta(max_length=MOST_SHARDS)]
    """By the stage that sends; the last sends none."""

    @property
    def rounds(self) -> bool:
        """Whether some numbers are rounded, which may depend on the number of rows in a message."""
        return any(each.format != "float32" for each in (*self.sums, *self.hops))

    def before(self, stage: int) -> WireRule:
        """The rule of the hop to `stage`; the first stage receives none."""
        return self.hops[stage - 1] if stage > 0 else WireRule()

    def after(self, stage: int) -> WireRule:
        """The rule of the hop from `stage`."""
        return self.hops[stage] if stage < len(self.hops) else WireRule()


def number_bytes(wire: Wire) -> float:
    """Bytes of each number on the wire. For "auto", the largest, because the format of each link is
    chosen later."""
    return {"float16": 2.0, "int8": 1 + 4 / 32}.get(wire, 4.0)
