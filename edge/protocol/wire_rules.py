"""In which form activations travel: one rule for every sum and hop of a plan. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transport import WireRule

Wire = Literal["float32", "float16", "int8", "auto"]


WIRES: tuple[Wire, ...] = get_args(Wire)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRules:
    """One rule for each sum of a stage and each hop between stages of a plan."""

    sums: tuple[WireRule, ...]
    """By stage."""
    hops: tuple[WireRule, ...]
    """By the stage that sends; the last sends none."""

    def before(self, stage: int) -> WireRule:
        """How the hidden state reaches `stage`; the first receives none."""
        return self.hops[stage - 1] if stage > 0 else WireRule()

    def after(self, stage: int) -> WireRule:
        """How the hidden state leaves `stage`."""
        return self.hops[stage] if stage < len(self.hops) else WireRule()

    def to_json(self) -> dict[str, Any]:
        """Built-in types only."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any, *, num_stages: int) -> WireRules:
        """Raises ValueError, TypeError or KeyError for what is not `to_json` of such a plan."""
        rules = cls(sums=_read_rules(value["sums"]), hops=_read_rules(value["hops"]))
        if len(rules.sums) != num_stages or len(rules.hops) != num_stages - 1:
            raise ValueError(f"wire rules for {len(rules.sums)} stages; the plan has {num_stages}")
        return rules


def _read_rules(value: Any) -> tuple[WireRule, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError("wire rules must be a list")
    return tuple(WireRule(format=each["format"], above_bytes=each["above_bytes"]) for each in value)


def number_bytes(wire: Wire) -> float:
    """Of each number on the wire; at most so many where each link's form is yet to be chosen."""
    return {"float16": 2.0, "int8": 1 + 4 / 32}.get(wire, 4.0)
