"""Choosing a token: repetition penalty, temperature, top-k, top-p, min-p, one seeded draw.

Knows logits and numbers; knows nothing of text, models or devices. The order and the meaning of the
steps are those of the `transformers` logits processors, so a checkpoint's defaults mean the same:

    s_i  = l_i · r  if l_i < 0 else l_i / r      for every i in the history        (penalty r)
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

from kernels.sampling.noise import NOISE_SPREAD, gumbel_noise
from kernels.sampling.nucleus import BLOCK
from kernels.sampling.parameters import SamplingParameters, require_integer
from kernels.sampling.ranking import EVERYTHING, Border, find_border, float32_at_least

FloatArray: TypeAlias = NDArray[np.floating]
IdArray: TypeAlias = NDArray[np.int64]

_POSITION_LIMIT = 1 << 64


def probabilities(
    logits: FloatArray, history: Sequence[int] | IdArray, parameters: SamplingParameters
) -> NDArray[np.float64]:
    """The chance of every token, float64 (vocab,), summing to 1.

    logits: (vocab,), computed with as float32. history: ids of the prompt and of the tokens so far.
    Raises ValueError for logits that are not finite, and for a history outside the vocabulary.
    """
    scores = _checked_scores(logits, history, parameters.repetition_penalty)
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
) -> int:
    """The id of the next token.

    logits: (vocab,), computed with as float32. history: ids of the prompt and of the tokens so far.
    position: where the new token will stand in the sequence; with the seed it fixes the draw.
    Greedy (temperature 0) takes the lowest id among equal maxima.
    Raises ValueError for logits that are not finite, and for a history outside the vocabulary.
    """
    scores = _checked_scores(logits, history, parameters.repetition_penalty)
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
    # Whatever their noise, tokens farther below the likeliest lose against it.
    reach = float32_at_least(float(scores.max()) - NOISE_SPREAD * temperature)
    lowest = max(border.score, reach)
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


def penalised(
    logits: FloatArray,
    history: Sequence[int] | IdArray,
    penalty: float,
    *,
    first_id: int,
    vocab_size: int,
) -> NDArray[np.float32]:
    """The logits of the ids from `first_id` as float32, those of the history made less likely.

    Raises ValueError for a history outside the vocabulary.
    """
    scores = np.asarray(logits, dtype=np.float32)
    if penalty == 1.0 or len(history) == 0:
        return scores
    ids = np.asarray(history, dtype=np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"the history holds token ids from {ids.min()} to {ids.max()}, outside the vocabulary "
            f"of {vocab_size}"
        )
    places = ids - first_id
    places = places[(places >= 0) & (places < scores.size)]
    seen, factor, limit = scores[places], np.float32(penalty), np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        seen = np.where(seen < 0, seen * factor, seen / factor).clip(-limit, limit)
    changed = scores.copy()
    changed[places] = seen  # once, however often the token occurred
    return changed


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
    logits: FloatArray, history: Sequence[int] | IdArray, penalty: float
) -> NDArray[np.float32]:
    """The penalised logits of a whole vocabulary."""
    if logits.ndim != 1 or logits.size == 0:
        raise ValueError(f"logits must have shape (vocab,), not {logits.shape}")
    refuse_broken(count_broken(logits), logits.size)
    return penalised(logits, history, penalty, first_id=0, vocab_size=logits.size)


def _border(scores: NDArray[np.float32], parameters: SamplingParameters) -> Border:
    border = find_border(scores, parameters, vocab_size=scores.size)
    assert border is not None, "all tokens are known"
    return border
