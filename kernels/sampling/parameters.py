"""A user's terms for choosing the next token, checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from reprlib import Repr
from typing import Annotated, Any, get_args, get_type_hints

from msgspec import Meta

_COUNT_LIMIT = 1 << 31

Temperature = Annotated[float, Meta(ge=0)]
TopK = Annotated[int, Meta(ge=0, lt=_COUNT_LIMIT)]
Share = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-3.4e38, le=3.4e38)]
"""What a float32 holds."""
TokenCount = Annotated[int, Meta(ge=0, lt=_COUNT_LIMIT)]
Seed = Annotated[int, Meta(ge=0, lt=1 << 64)]


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
    min_tokens: no end token is chosen before the answer has so many tokens.
    seed: the same seed gives the same tokens, whatever the plan.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: TokenCount = 0
    seed: Seed = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ValueError naming the first field that is out of range, and its range."""
        for name, annotation in _annotations().items():
            if name != "logit_bias":
                _require(name, getattr(self, name), annotation)
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MOST_BIASES:
            raise ValueError(
                f"logit_bias must be at most {MOST_BIASES} numbers by token id, not "
                f"{shown(self.logit_bias):.80}"
            )
        for token, bias in self.logit_bias.items():
            require_integer("a token id of logit_bias", token)
            _require("a logit_bias", bias, Bias)

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


@cache
def _annotations() -> Mapping[str, Any]:
    return get_type_hints(SamplingParameters, include_extras=True)


def _require(name: str, value: object, annotation: Any) -> None:
    kind, bounds = get_args(annotation)
    if kind is int:
        require_integer(name, value, below=bounds.lt)
        return
    # The comparison also turns away NaN, infinities, and integers too large for a float.
    most = sys.float_info.max if bounds.le is None else bounds.le
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not bounds.ge <= value <= most
    ):
        high = " and finite" if bounds.le is None else f" and at most {bounds.le:g}"
        raise ValueError(
            f"{name} must be a number of at least {bounds.ge:g}{high}, not {shown(value):.80}"
        )


def require_integer(name: str, value: object, *, below: int = _COUNT_LIMIT) -> None:
    """Raise ValueError naming the value and its range, unless it is within it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(
            f"{name} must be a whole number of at least 0 and below {below}, not {shown(value):.80}"
        )
