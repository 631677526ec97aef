"""Rules that change logits before a token is chosen of them: the one place where they enter.

    b_i = l_i + bias_i                             bias by id
    r_i = b_i · r  if b_i < 0 else b_i / r         repetition penalty r: tokens of prompt or answer
    s_i = r_i - f · count_i - p                    frequency f, presence p: tokens of the answer
    s_i = `MASKED`                                 tokens that are not allowed

count_i is how often the token occurs in the answer so far. Bias and the penalties of the answer are
as OpenAI defines them, the repetition penalty as `transformers` does. Every rule looks at one token
at a time, in float32: shards that hold parts of the vocabulary get the very numbers of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge.kernels.sampling.parameters import SamplingParameters

IdArray: TypeAlias = NDArray[np.int64]
Bits: TypeAlias = NDArray[np.uint8]
"""A bit for each token of the vocabulary, the lowest bit of a byte first."""

MASKED = np.finfo(np.float32).min
"""The score of a token that is not allowed: no draw takes it while another token is left."""


def ids_of(bits: Bits, most: int) -> NDArray[np.intp] | None:
    """The ids of these tokens in rising order; None: there are more than `most`."""
    filled = np.flatnonzero(bits)
    if len(filled) > most:
        return None
    rows, columns = np.nonzero(np.unpackbits(bits[filled, None], axis=1, bitorder="little"))
    return None if len(rows) > most else 8 * filled[rows] + columns


def changes_logits(parameters: SamplingParameters) -> bool:
    """Whether scores are other numbers than logits."""
    return bool(
        parameters.repetition_penalty != 1.0
        or parameters.frequency_penalty
        or parameters.presence_penalty
        or parameters.logit_bias
    )


def apply_rules(
    logits: NDArray[np.floating],
    parameters: SamplingParameters,
    *,
    history: Sequence[int] | IdArray,
    prompt_tokens: int = 0,
    allowed: Bits | None = None,
    first_id: int,
    vocab_size: int,
) -> NDArray[np.float32]:
    """The scores of the ids from `first_id`, of their logits, (columns,).

    history: ids of the prompt and of the tokens so far; the first `prompt_tokens` are the prompt.
    allowed: of the whole vocabulary. Raises ValueError for a history or a bias outside the
    vocabulary, and where no token is allowed.
    """
    scores = np.asarray(logits, dtype=np.float32)
    is_changed = changes_logits(parameters) and (len(history) or parameters.logit_bias)
    if not is_changed and allowed is None:
        return scores
    scores = scores.copy()
    ids = np.asarray(history, dtype=np.int64)
    biased = np.fromiter(parameters.logit_bias, np.int64, len(parameters.logit_bias))
    for name, each in (("history", ids), ("logit bias", biased)):
        if each.size and (each.min() < 0 or each.max() >= vocab_size):
            raise ValueError(
                f"the {name} holds token ids from {each.min()} to {each.max()}, outside the "
                f"vocabulary of {vocab_size}"
            )
    limit = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        if biased.size:
            amounts = np.fromiter(parameters.logit_bias.values(), np.float32, biased.size)
            places, inside = _places(biased, first_id, scores.size)
            scores[places] = (scores[places] + amounts[inside]).clip(-limit, limit)
        if parameters.repetition_penalty != 1.0:
            places, _inside = _places(ids, first_id, scores.size)
            seen, factor = scores[places], np.float32(parameters.repetition_penalty)
            # Once, however often the token occurred.
            scores[places] = np.where(seen < 0, seen * factor, seen / factor).clip(-limit, limit)
        if parameters.frequency_penalty or parameters.presence_penalty:
            said, counts = np.unique(ids[prompt_tokens:], return_counts=True)
            places, inside = _places(said, first_id, scores.size)
            less = np.float32(parameters.frequency_penalty) * counts[inside].astype(np.float32)
            less += np.float32(parameters.presence_penalty)
            scores[places] = (scores[places] - less).clip(-limit, limit)
    if allowed is not None:
        if not allowed.any():
            raise ValueError("no token is allowed here; what the answer must be cannot go on")
        bits = np.unpackbits(allowed, count=vocab_size, bitorder="little")
        scores[bits[first_id : first_id + scores.size] == 0] = MASKED
    return scores


def _places(
    ids: IdArray, first_id: int, columns: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where those of the ids are that are within these columns, and which of the ids they are."""
    places = ids - first_id
    inside = (places >= 0) & (places < columns)
    return places[inside], inside
