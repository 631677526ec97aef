"""Cases of operators: inputs, and the formula's outputs for them.

The self checks of back ends and the contract tests feed the same cases, so a formula's arguments
are put together in one place. The caller says how far outputs may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Draw:
    """Normal numbers from a seed.

    rounded: what becomes of arrays that an operator gets in a type of fewer bits.
    """

    def __init__(self, seed: int, rounded: Callable[[Array], Array] = lambda array: array) -> None:
        self._random = np.random.default_rng(seed)
        self._rounded = rounded

    def normal(self, *shape: int) -> Array:
        return self._random.standard_normal(shape, dtype=np.float32)

    def rounded(self, *shape: int, gain: float = 1) -> Array:
        """Normal numbers times `gain`, as products get them."""
        return self._rounded(np.float32(gain) * self.normal(*shape))


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an operator, whose faces take the arguments of its formula in the same order."""

    formula: Callable[..., Any]
    inputs: tuple[NDArray[Any], ...]
    """Arrays that differ from step to step: [batch, tokens, …], or [rows, …] without a batch."""
    weights: tuple[Any, ...]
    options: Mapping[str, Any]
    unbatched: bool
    """The formula takes arrays of one request, without the axis of a batch."""

    @classmethod
    def of(
        cls,
        formula: Callable[..., Any],
        *inputs: NDArray[Any],
        weights: tuple[Any, ...] = (),
        unbatched: bool = False,
        **options: Any,
    ) -> Case:
        """options: what the formula takes by name."""
        return cls(formula, inputs, weights, options, unbatched)

    def expected(self) -> tuple[Array, ...]:
        """The formula's results."""
        if not self.unbatched:
            return self._results(*self.inputs)
        requests = [self._results(*each) for each in zip(*self.inputs, strict=True)]
        return tuple(np.stack(each) for each in zip(*requests, strict=True))

    def _results(self, *inputs: NDArray[Any]) -> tuple[Array, ...]:
        found = self.formula(*inputs, *self.weights, **self.options)
        return found if isinstance(found, tuple) else (found,)
