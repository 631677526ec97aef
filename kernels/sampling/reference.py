"""Choosing a token: rules, temperature, top-k, top-p, min-p, one seeded draw.

Knows logits and numbers; knows nothing of text, models or devices. The order and the meaning of the
steps are those of the `transformers` logits processors, so a checkpoint's defaults mean the same:

    s_i  = what the rules make of logit l_i                                        (`rules.py`)
    w_i  = exp((s_i - max s) / T)                                                  (temperature T)
    keep   s_i ≥ the k-th largest s              (equal scores at the border stay) (top-k)
    keep   i while the kept weight ranked before i is < p · (kept weight)          (top-p)
    keep   w_i ≥ m · max w                                                         (min-p m)

*Ranked* is by falling score, equal scores by rising id. Each filter keeps the tokens up to a place
of that ranking, so one *border* says what all of them keep.

The draw is the kept token with the largest s_i / T + noise_i (`noise.py`): a correct draw by the
weights w. The noise depends on (seed, position, id) and on nothing else, so neither batching nor a
replay after a lost device changes the tokens; two plans whose sums differ in the last bit compare
almost the same numbers, and almost never choose differently; and no sum over the vocabulary is
needed, except by top-p, where it is exact (`nucleus.py`). So shards that hold parts of the
vocabulary can choose bit for bit the token that is chosen here (`shortlist.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge.kernels.sampling.noise import NOISE_SPREAD, gumbel_noise
from edge.kernels.sampling.nucleus import BLOCK
from edge.kernels.sampling.parameters import SamplingParameters, require_integer
from edge.kernels.sampling.ranking import EVERYTHING, Border, find_border, float32_at_least
from edge.kernels.sampling.rules import MASKED, Bits, IdArray, apply_rules

FloatArray: TypeAlias = NDArray[np.floating]

_POSITION_LIMIT = 1 << 64


def probabilities(
    logits: FloatArray,
    history: Sequence[int] | IdArray,
    parameters: SamplingParameters,
    *,
    prompt_tokens: int = 0,
    allowed: Bits | None = None,
) -> NDArray[np.float64]:
    """The chance of every token, float64 (vocab,), summing to 1.

    logits: (vocab,), computed with as float32. history, prompt_tokens, allowed: as `apply_rules`
    takes them. Raises ValueError for logits that are not finite, and as `apply_rules` does.
    """
    scores = _checked_scores(logits, parameters, history, prompt_tokens, allowed)
    chances = np.zeros(scores.size, dtype=np.float64)
    if parameters.temperature == 0.0:
        chances[np.argmax(scores)] = 1.0
        return chances
    kept = _border(scores, parameters).kept(scores)
    with np.errstate(under="ignore", over="ignore"):  # a tiny temperature: far tokens weigh 0
        distance = (float(scores.max()) - scores[kept].astype(np.float64)) / parameters.temperature
        weights = np.exp(-distance)
    chances[kept] = weights / weights.sum()
    return chances


def sample(
    logits: FloatArray,
    *,
    history: Sequence[int] | IdArray,
    parameters: SamplingParameters,
    position: int,
    prompt_tokens: int = 0,
    allowed: Bits | None = None,
) -> int:
    """The id of the next token.

    logits: (vocab,), computed with as float32. history, prompt_tokens, allowed: as `apply_rules`
    takes them.
    position: where the new token will stand in the sequence; with the seed it fixes the draw.
    Greedy (temperature 0) takes the lowest id among equal maxima.
    Raises ValueError for logits that are not finite, and as `apply_rules` does.
    """
    scores = _checked_scores(logits, parameters, history, prompt_tokens, allowed)
    if parameters.temperature == 0.0:
        return int(np.argmax(scores))
    return draw(scores, parameters, position, border=_border(scores, parameters))


def draw(
    scores: NDArray[np.float32],
    parameters: SamplingParameters,
    position: int,
    *,
    ids: IdArray | None = None,
    first_id: int = 0,
    border: Border = EVERYTHING,
) -> int:
    """The id of the token with the largest s_i / T + noise_i of those that `border` keeps.

    scores: (n,), at least one, and the likeliest of them kept. Their ids are `ids` (n,), or count
    up from `first_id`. Of tokens whose sums are rounded to the same number the one with more noise
    wins, and then the one that ranks first: the draw among part of the tokens never contradicts the
    draw among all.
    """
    require_integer("position", position, below=_POSITION_LIMIT)
    temperature = parameters.temperature
    # With any noise, tokens farther below the likeliest lose against it.
    likeliest = scores.max()
    reach = float32_at_least(float(likeliest) - NOISE_SPREAD * temperature)
    lowest = max(border.score, reach)
    if lowest == MASKED and likeliest > MASKED:
        lowest = np.nextafter(MASKED, np.float32(0))
    winner = (-np.inf, -np.inf, -np.inf, 0)
    for start in range(0, scores.size, BLOCK):
        block = scores[start : start + BLOCK]
        near = np.flatnonzero(block >= lowest)
        near_ids = near + (start + first_id) if ids is None else ids[start : start + BLOCK][near]
        near_scores = block[near]
        if near.size and near_scores.min() == border.score:
            kept = border.kept(near_scores, near_ids)
            near_ids, near_scores = near_ids[kept], near_scores[kept]
        if not near_ids.size:
            continue
        noise = gumbel_noise(parameters.seed, position, near_ids)
        # Times T where that is less than 1: a division by a tiny temperature would be infinite.
        sums = near_scores.astype(np.float64)
        sums /= max(temperature, 1.0)
        sums += noise * min(temperature, 1.0)
        for place in np.flatnonzero(sums == sums.max()):
            token = int(near_ids[place])
            winner = max(winner, (sums[place], noise[place], near_scores[place], -token))
    return -winner[-1]


def count_broken(logits: FloatArray) -> int:
    """The number of these that are NaN or infinite."""
    finite = np.isfinite(np.asarray(logits, dtype=np.float32))
    return 0 if finite.all() else int(np.count_nonzero(~finite))


def refuse_broken(broken: int, vocab_size: int) -> None:
    """Raise ValueError if there are any."""
    if broken:
        raise ValueError(
            f"{broken} of {vocab_size} logits are NaN or infinite: the weights are damaged or a "
            "device computed wrongly; check the checkpoint and try another device"
        )


def _checked_scores(
    logits: FloatArray,
    parameters: SamplingParameters,
    history: Sequence[int] | IdArray,
    prompt_tokens: int,
    allowed: Bits | None,
) -> NDArray[np.float32]:
    """The scores of a whole vocabulary."""
    if logits.ndim != 1 or logits.size == 0:
        raise ValueError(f"logits must have shape (vocab,), not {logits.shape}")
    refuse_broken(count_broken(logits), logits.size)
    return apply_rules(
        logits,
        parameters,
        history=history,
        prompt_tokens=prompt_tokens,
        allowed=allowed,
        first_id=0,
        vocab_size=logits.size,
    )


def _border(scores: NDArray[np.float32], parameters: SamplingParameters) -> Border:
    border = find_border(scores, parameters, vocab_size=scores.size)
    assert border is not None, "all tokens are known"
    return border
