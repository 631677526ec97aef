"""Rotary positions as data: which angles the elements of a head turn by. Knows no configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import shown
from edge.kernels.rope.reference import rope_tables
from edge.models.parts import MAX_SIZE, check_flags, exact_fields, finite

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The first elements of a head turn, two by two, by position · frequency; the others stay."""

    inverse_frequencies: tuple[float, ...]
    """Angle per position, one for each pair; none where nothing turns."""
    long_inverse_frequencies: tuple[float, ...] = ()
    """Those of sessions whose context is longer than `trained_tokens`, where they are others."""
    trained_tokens: int = 0
    scale: float = 1.0
    """What turned elements are multiplied by."""
    is_interleaved: bool = False
    """A pair are neighbours; else an element and the one half of the turned ones further on."""

    def __post_init__(self) -> None:
        for name in ("inverse_frequencies", "long_inverse_frequencies"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise ValueError(f"{name} must be a list of numbers")
            object.__setattr__(self, name, tuple(map(finite, value)))
        if self.long_inverse_frequencies and len(self.long_inverse_frequencies) != len(
            self.inverse_frequencies
        ):
            raise ValueError("long_inverse_frequencies must be as many as inverse_frequencies")
        if type(self.trained_tokens) is not int or not 0 <= self.trained_tokens <= MAX_SIZE:
            raise ValueError(f"trained_tokens must be 0 to {MAX_SIZE}")
        if not finite(self.scale) > 0:
            raise ValueError(f"a rotation's scale must be above 0, not {shown(self.scale)}")
        check_flags(is_interleaved=self.is_interleaved)

    @property
    def turned_elements(self) -> int:
        """Elements of a head that turn."""
        return 2 * len(self.inverse_frequencies)

    def is_long(self, context_tokens: int) -> bool:
        """Whether a session that takes requests of N tokens has the long frequencies.

        All its requests turn alike, however short they are: a choice by the length of a request
        would need other keys once a reply passes `trained_tokens`.
        """
        return bool(self.long_inverse_frequencies) and context_tokens > self.trained_tokens

    def frequencies(self, context_tokens: int) -> tuple[float, ...]:
        """Inverse frequencies of a session that takes requests of `context_tokens` tokens."""
        is_long = self.is_long(context_tokens)
        return self.long_inverse_frequencies if is_long else self.inverse_frequencies

    def tables(self, context_tokens: int) -> tuple[Array, Array]:
        """(cos, sin), each [context_tokens, turned_elements / 2]."""
        frequencies = np.asarray(self.frequencies(context_tokens), dtype=np.float32)
        return rope_tables(frequencies, length=context_tokens, scale=self.scale)


def rotary_of(value: object) -> Rotary:
    """As it is, or from JSON. Raises ValueError."""
    return value if isinstance(value, Rotary) else Rotary(**exact_fields(Rotary, value))


NO_ROTARY = Rotary(inverse_frequencies=())
