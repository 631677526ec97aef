"""The tokens by which rounded KV caches are measured, the same for every shard of a plan. Pure.

The same for a model with the same limits, too, but not for one loaded with another context or less
KV memory: fewer tokens may fit then, and scales are chosen for the places that the context has
(`OrtCache.with_codes`). Scales that fit every context that the model could have would be wider.
"""

from __future__ import annotations

from edge.memory.step_memory import calibration_tokens
from edge.models.spec import ModelSpec
from edge.protocol.step import Step, StepEntry, StepLimits

_GOLDEN = 2654435761
"""2³² over the golden ratio: multiples of it spread evenly, however many one takes."""


def calibration_step(spec: ModelSpec, limits: StepLimits) -> Step:
    """One chunk of ids from all over the vocabulary, in no order."""
    count = calibration_tokens(limits)
    tokens = tuple(index * _GOLDEN % 2**32 * spec.vocab_size >> 32 for index in range(1, count + 1))
    entry = StepEntry(request="calibration", position=0, tokens=tokens, logit_rows=0)
    return Step(entries=(entry,))
