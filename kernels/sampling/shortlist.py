"""Choosing a token when the vocabulary lies in parts on several shards.

Each shard makes a shortlist of its part, and from all shortlists `choose` finds the very token that
`reference.sample` finds in all logits, or says that they do not suffice. What a shortlist holds
depends on what the parameters need:

    greedy                      the shard's best token
    temperature alone           the winner of the shard's own draw
    top-k, min-p                the shard's likeliest tokens, by rank
    top-p, of all tokens        the same, and the weight of the whole part by octaves

The tokens that the filters keep are a beginning of the ranking of all tokens. Shortlists show that
ranking down to the first place at which one of them ends; they suffice if the filters end before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge.kernels.sampling.nucleus import NUM_OCTAVES, Octaves, add_octaves, weigh
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.ranking import (
    EVERYTHING,
    Border,
    find_border,
    likeliest,
    limits_count,
    truncates,
)
from edge.kernels.sampling.reference import FloatArray, count_broken, draw, refuse_broken
from edge.kernels.sampling.rules import Bits, IdArray, apply_rules, changes_logits

Shortlist: TypeAlias = NDArray[np.void]
"""(1,) of `shortlist_dtype`: plain bytes of a size that is known beforehand."""

SHORTLIST_TOKENS = 256
"""Tokens of a shortlist where filters decide; more if top-k keeps more. They are 2 KiB."""


def shortlist_dtype(
    parameters: SamplingParameters,
    *,
    columns: int,
    vocab_size: int,
    tokens: int = SHORTLIST_TOKENS,
) -> np.dtype[Any]:
    """The dtype of the message of a shard with `columns` columns of the vocabulary."""
    most = 1
    if truncates(parameters, vocab_size):
        # With one more than top-k keeps, it shows that the border is not after its end.
        most = max(tokens, parameters.top_k + 1 if limits_count(parameters, vocab_size) else 1)
    return _dtype(min(most, columns), _needs_octaves(parameters, vocab_size))


def make_shortlist(
    logits: FloatArray,
    *,
    first_id: int,
    vocab_size: int,
    history: Sequence[int] | IdArray,
    parameters: SamplingParameters,
    position: int,
    prompt_tokens: int = 0,
    allowed: Bits | None = None,
    tokens: int = SHORTLIST_TOKENS,
) -> Shortlist:
    """The shortlist of one shard's part of the logits, (columns,), which begins at `first_id`.

    The others are as for `reference.sample`. Raises ValueError as `apply_rules` does; logits that
    are not finite are for `choose` to refuse.
    """
    columns = logits.size
    dtype = shortlist_dtype(parameters, columns=columns, vocab_size=vocab_size, tokens=tokens)
    shortlist: Shortlist = np.zeros(1, dtype)
    shortlist["broken"] = broken = count_broken(logits)
    if broken or not columns:
        return shortlist
    scores = apply_rules(
        logits,
        parameters,
        history=history,
        prompt_tokens=prompt_tokens,
        allowed=allowed,
        first_id=first_id,
        vocab_size=vocab_size,
    )
    if truncates(parameters, vocab_size):
        places = likeliest(scores, dtype["ids"].shape[0])
    elif parameters.temperature == 0.0:
        places = np.array([np.argmax(scores)])
    else:
        places = np.array([draw(scores, parameters, position, first_id=first_id) - first_id])
    shortlist["ids"] = places + first_id
    shortlist["scores"] = scores[places]
    if _needs_octaves(parameters, vocab_size):
        octaves = weigh(scores, parameters.temperature)
        shortlist["top"], shortlist["sums"] = octaves.top, octaves.sums
    return shortlist


def ranked_count(
    parameters: SamplingParameters,
    *,
    columns: int,
    vocab_size: int,
    tokens: int = SHORTLIST_TOKENS,
) -> int | None:
    """The number of a shard's columns, those that rank first, that make its shortlist.

    None where it depends on more than those: on all weights, a draw among all, or rules.
    """
    is_draw = parameters.temperature > 0.0 and not truncates(parameters, vocab_size)
    if is_draw or changes_logits(parameters) or _needs_octaves(parameters, vocab_size):
        return None
    dtype = shortlist_dtype(parameters, columns=columns, vocab_size=vocab_size, tokens=tokens)
    return int(dtype["ids"].shape[0])


def ranked_shortlist(columns: IdArray, scores: FloatArray, *, first_id: int) -> Shortlist:
    """A shortlist as of `make_shortlist`, from `ranked_count` columns and their logits as ranked.

    All logits of the part are finite.
    """
    shortlist: Shortlist = np.zeros(1, _dtype(columns.size, False))
    shortlist["ids"] = columns + first_id
    shortlist["scores"] = scores
    return shortlist


def choose(
    shortlists: Sequence[Shortlist],
    *,
    columns: Sequence[int],
    parameters: SamplingParameters,
    position: int,
) -> int | None:
    """The id that `reference.sample` chooses from all logits; None if the shortlists do not tell.

    shortlists, columns: of all parts of the vocabulary, in its order, and how large each part is.
    The others are as they were for `make_shortlist`. Raises ValueError for logits that were not
    finite.
    """
    vocab_size = sum(columns)
    refuse_broken(sum(int(each["broken"][0]) for each in shortlists), vocab_size)
    ids = np.concatenate([each["ids"][0] for each in shortlists], dtype=np.int64)
    scores = np.concatenate([each["scores"][0] for each in shortlists])
    if parameters.temperature == 0.0:
        return int(ids[scores.argmax()])  # the first of equal ones: parts come in the order of ids
    if not truncates(parameters, vocab_size):
        return draw(scores, parameters, position, ids=ids)
    known = _known(shortlists, columns)
    order = np.argsort(ids)
    order = order[known.kept(scores[order], ids[order])]
    ids, scores = ids[order], scores[order]
    octaves = None
    if _needs_octaves(parameters, vocab_size):
        octaves = add_octaves(
            [
                Octaves(top=float(each["top"][0]), sums=each["sums"][0])
                for each, part in zip(shortlists, columns, strict=True)
                if part
            ]
        )
    border = find_border(
        scores, parameters, vocab_size=vocab_size, ids=ids, known=known, octaves=octaves
    )
    if border is None:
        return None
    return draw(scores, parameters, position, ids=ids, border=border)


def _needs_octaves(parameters: SamplingParameters, vocab_size: int) -> bool:
    """Whether the share of top-p is one of all weight, which no shortlist of tokens tells."""
    return (
        parameters.temperature > 0.0
        and parameters.top_p < 1.0
        and not limits_count(parameters, vocab_size)
    )


@lru_cache(maxsize=256)
def _dtype(tokens: int, has_octaves: bool) -> np.dtype[Any]:
    fields: list[Any] = [("broken", "<i8")]
    if has_octaves:
        fields += [("top", "<f8"), ("sums", "<i8", (NUM_OCTAVES,))]
    return np.dtype([*fields, ("ids", "<i4", (tokens,)), ("scores", "<f4", (tokens,))])


def _known(shortlists: Sequence[Shortlist], columns: Sequence[int]) -> Border:
    """The end of the first shortlist to end, of those that do not hold their whole part."""
    ends = [
        Border(score=each["scores"][0][-1], last_id=int(each["ids"][0][-1]))
        for each, part in zip(shortlists, columns, strict=True)
        if each.dtype["ids"].shape[0] < part
    ]
    return max(ends, key=lambda each: (each.score, -each.last_id), default=EVERYTHING)
