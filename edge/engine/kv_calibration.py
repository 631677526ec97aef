"""Calibration of quantised KV caches: the tokens to measure, equal on every shard of a plan. Pure.

They depend on the model and its limits. Another context or less KV memory changes them: fewer
tokens may fit, and scales are chosen for the positions of the context (`OrtCache.with_codes`).
Scales for every possible context would be wider.
"""

from __future__ import annotations

from edge.memory.step_memory import calibration_tokens
from edge.models.spec import ModelSpec
from edge.protocol.step import Step, StepEntry, StepLimits

_GOLDEN = 2654435761
"""2³² over the golden ratio: multiples of it spread evenly, for any count."""


def calibration_step(spec: ModelSpec, limits: StepLimits) -> Step:
    """One chunk of token ids spread over the vocabulary, in no order."""
    count = calibration_tokens(limits)
    tokens = tuple(index * _GOLDEN % 2**32 * spec.vocab_size >> 32 for index in range(1, count + 1))
    entry = StepEntry(request="calibration", position=0, tokens=tokens, logit_rows=0)
    return Step(entries=(entry,))
