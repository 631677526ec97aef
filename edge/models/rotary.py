"""Rotary positions as data: the angles of a head's elements. Knows no configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import shown
from edge.kernels.rope.reference import rope_tables
from edge.models.parts import MAX_SIZE, check_flags, exact_fields, finite

Array = NDArray[np.float32]

AXES = 3
"""Time, height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A rotation of a head's first elements in pairs, by position · frequency."""

    inverse_frequencies: tuple[float, ...]
    """The angle per position of each pair; empty: no rotation."""
    long_inverse_frequencies: tuple[float, ...] = ()
    """The frequencies of sessions with a context beyond `trained_tokens`; empty: the same ones."""
    trained_tokens: int = 0
    scale: float = 1.0
    """The scale of rotated elements."""
    axes: tuple[int, ...] = ()
    """The axis whose position turns each pair, where rows of pictures have positions by time,
    height and width (M-RoPE); empty: one position turns all."""
    is_interleaved: bool = False
    """Pairs are neighbours; else an element and the one half of the rotary elements further on."""

    def __post_init__(self) -> None:
        for name in ("inverse_frequencies", "long_inverse_frequencies", "axes"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise ValueError(f"{name} must be a list of numbers")
            made = value if name == "axes" else map(finite, value)
            object.__setattr__(self, name, tuple(made))
        if self.long_inverse_frequencies and len(self.long_inverse_frequencies) != len(
            self.inverse_frequencies
        ):
            raise ValueError("long_inverse_frequencies must be as many as inverse_frequencies")
        if self.axes and len(self.axes) != len(self.inverse_frequencies):
            raise ValueError("axes must be as many as inverse_frequencies")
        if any(type(each) is not int or not 0 <= each < AXES for each in self.axes):
            raise ValueError(f"axes must be 0 to {AXES - 1}")
        if type(self.trained_tokens) is not int or not 0 <= self.trained_tokens <= MAX_SIZE:
            raise ValueError(f"trained_tokens must be 0 to {MAX_SIZE}")
        if not finite(self.scale) > 0:
            raise ValueError(f"a rotation's scale must be above 0, not {shown(self.scale)}")
        check_flags(is_interleaved=self.is_interleaved)

    @property
    def turned_elements(self) -> int:
        """The rotary elements of a head."""
        return 2 * len(self.inverse_frequencies)

    def is_long(self, context_tokens: int) -> bool:
        """Whether a session for requests of N tokens has the long frequencies.

        All its requests use the same ones, short requests, too: a choice by request would need
        other keys once a reply passes `trained_tokens`.
        """
        return bool(self.long_inverse_frequencies) and context_tokens > self.trained_tokens

    def frequencies(self, context_tokens: int) -> tuple[float, ...]:
        """The inverse frequencies of a session for requests of `context_tokens` tokens."""
        is_long = self.is_long(context_tokens)
        return self.long_inverse_frequencies if is_long else self.inverse_frequencies

    def tables(self, context_tokens: int) -> tuple[Array, Array]:
        """(cos, sin), each [context_tokens, turned_elements / 2]."""
        frequencies = np.asarray(self.frequencies(context_tokens), dtype=np.float32)
        return rope_tables(frequencies, length=context_tokens, scale=self.scale)


def rotary_of(value: object) -> Rotary:
    """A Rotary, or one from JSON. Raises ValueError."""
    return value if isinstance(value, Rotary) else Rotary(**exact_fields(Rotary, value))


NO_ROTARY = Rotary(inverse_frequencies=())
