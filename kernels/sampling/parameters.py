"""A user's terms for choosing the next token, checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from reprlib import Repr
from typing import Any

_SEED_LIMIT = 1 << 64
_COUNT_LIMIT = 1 << 31
_LARGEST_BIAS = 3.4e38
"""A float32 holds it."""


class _Short(Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Very long integers refuse to become text at all.
        return super().repr_int(x, level) if x.bit_length() <= 128 else "an enormous number"


shown = _Short().repr

MOST_BIASES = 1024
"""Tokens of a request that may have a bias of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """Terms of choosing the next token. Checked when made: an instance is always valid.

    temperature: 0 is greedy (the filters below then change nothing); 1 leaves the model's own odds.
    top_k: how many of the likeliest tokens stay; 0 keeps all.
    top_p: the likeliest tokens that together reach this share stay; 1 keeps all.
    min_p: tokens at least this likely, relative to the likeliest, stay; 0 keeps all.
    repetition_penalty: above 1 makes tokens of the prompt and the answer less likely.
    frequency_penalty: taken off a token's logit for each time that the answer has it, -2 to 2.
    presence_penalty: taken off the logit of every token that the answer has, -2 to 2.
    logit_bias: added to the logits of tokens, by their ids.
    seed: the same seed gives the same tokens, whatever the plan.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ValueError naming the first field that is out of range, and its range."""
        _require_number("temperature", self.temperature, at_least=0.0)
        require_integer("top_k", self.top_k)
        _require_number("top_p", self.top_p, at_least=0.0, at_most=1.0)
        _require_number("min_p", self.min_p, at_least=0.0, at_most=1.0)
        _require_number("repetition_penalty", self.repetition_penalty, at_least=0.01, at_most=100.0)
        _require_number("frequency_penalty", self.frequency_penalty, at_least=-2.0, at_most=2.0)
        _require_number("presence_penalty", self.presence_penalty, at_least=-2.0, at_most=2.0)
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MOST_BIASES:
            raise ValueError(
                f"logit_bias must be at most {MOST_BIASES} numbers by token id, not "
                f"{shown(self.logit_bias):.80}"
            )
        for token, bias in self.logit_bias.items():
            require_integer("a token id of logit_bias", token)
            _require_number("a logit_bias", bias, at_least=-_LARGEST_BIAS, at_most=_LARGEST_BIAS)
        require_integer("seed", self.seed, below=_SEED_LIMIT)

    def to_json(self) -> dict[str, Any]:
        """Every field, as JSON numbers; the biases by token ids as text."""
        biases = {str(token): bias for token, bias in self.logit_bias.items()}
        return {**asdict(self), "logit_bias": biases}

    @classmethod
    def from_json(cls, value: object) -> SamplingParameters:
        """Read what `to_json` wrote; absent fields take their default.

        Raises ValueError for anything but an object of known fields within their ranges.
        """
        if not isinstance(value, Mapping):
            raise ValueError(
                f"sampling parameters must be an object of numbers, not {type(value).__name__}"
            )
        known = {field.name for field in fields(cls)}
        if unknown := sorted(str(name) for name in value if name not in known):
            raise ValueError(
                f"unknown sampling parameter {', '.join(unknown)}; "
                f"known are {', '.join(sorted(known))}"
            )
        biases = value.get("logit_bias", {})
        if not isinstance(biases, Mapping) or len(biases) > MOST_BIASES:
            raise ValueError(f"logit_bias must be an object of at most {MOST_BIASES} numbers")
        return cls(**{**value, "logit_bias": {_id(each): biases[each] for each in biases}})


def _id(text: object) -> int:
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,10}", text):
        raise ValueError(f"a token id of logit_bias is a whole number, not {shown(text):.80}")
    return int(text)


def _require_number(
    name: str, value: object, *, at_least: float, at_most: float = sys.float_info.max
) -> None:
    # The comparison also turns away NaN, infinities, and integers too large for a float.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not at_least <= value <= at_most
    ):
        high = f" and at most {at_most:g}" if at_most < sys.float_info.max else " and finite"
        raise ValueError(
            f"{name} must be a number of at least {at_least:g}{high}, not {shown(value):.80}"
        )


def require_integer(name: str, value: object, *, below: int = _COUNT_LIMIT) -> None:
    """Raise ValueError naming the value and its range, unless it is within it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(
            f"{name} must be a whole number of at least 0 and below {below}, not {shown(value):.80}"
        )
