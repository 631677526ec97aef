"""Log probabilities of tokens, when shards have parts of the vocabulary.

logprob_i = l_i - log(Σ_j exp l_j) over the whole vocabulary of the raw logits l: before penalties,
temperature and filters, so they are the model's own. Each part gives its largest logit, the sum of
exp(l - largest) and its likeliest tokens: partial sums are float64, and are added up at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge.kernels.sampling.nucleus import BLOCK
from edge.kernels.sampling.ranking import likeliest

MOST_LOGPROBS = 20
"""Likeliest tokens that may be asked for next to the chosen one."""

LogprobPart: TypeAlias = NDArray[np.void]
"""(1,) of `part_dtype`: plain bytes of a size that is known beforehand."""

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """How likely a chosen token was, in nats, and the tokens that were the likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, logprob), by falling logprob and rising id."""


def part_dtype(count: int, *, columns: int, candidates: int) -> np.dtype[Any]:
    """The dtype of the message of a shard with `columns` columns, of which `count` are asked for.

    candidates: how many tokens its shortlist has; one of all shards' is the chosen one.
    """
    return _dtype(min(count, columns), candidates)


def make_part(
    logits: NDArray[np.float32], *, first_id: int, count: int, candidates: NDArray[np.integer[Any]]
) -> LogprobPart:
    """A shard's part of the logits, (columns,), from `first_id` on.

    candidates: ids of its part. The result is meaningless unless the logits are finite.
    """
    dtype = part_dtype(count, columns=logits.size, candidates=candidates.size)
    part: LogprobPart = np.zeros(1, dtype)
    if not logits.size:
        part["largest"] = -math.inf
        return part
    largest = float(logits.max())
    part["largest"] = largest
    with np.errstate(all="ignore"):
        part["sum"] = sum(
            np.exp(logits[start : start + BLOCK].astype(np.float64) - largest).sum()
            for start in range(0, logits.size, BLOCK)
        )
    places = likeliest(logits, count) if count else np.empty(0, np.intp)
    part["ids"], part["logits"] = places + first_id, logits[places]
    part["candidates"] = candidates
    part["candidate_logits"] = logits[candidates - first_id]
    return part


def combine(parts: Sequence[LogprobPart], token: int, *, count: int) -> Logprobs:
    """How likely `token`, a candidate of one of the parts, and the `count` likeliest tokens are."""
    largest = max(float(part["largest"][0]) for part in parts)
    total = sum(float(p["sum"][0]) * math.exp(float(p["largest"][0]) - largest) for p in parts)
    log_total = math.log(total)
    ids = np.concatenate([part["ids"][0] for part in parts])
    logits = np.concatenate([part["logits"][0] for part in parts])
    candidates = np.concatenate([part["candidates"][0] for part in parts])
    found = np.concatenate([part["candidate_logits"][0] for part in parts])
    (place,) = np.flatnonzero(candidates == token)[:1]
    ranked = np.lexsort((ids, -logits))[:count]
    return Logprobs(
        logprob=_logprob(float(found[place]) - largest - log_total),
        top=tuple(
            (int(ids[each]), _logprob(float(logits[each]) - largest - log_total)) for each in ranked
        ),
    )


def logprobs_of(logits: NDArray[np.float32], token: int, *, count: int) -> Logprobs:
    """The same of all logits (vocab,) in one place."""
    part = make_part(logits, first_id=0, count=count, candidates=np.array([token]))
    return combine([part], token, count=count)


def _logprob(value: float) -> float:
    """A finite float32, and never above 0."""
    return float(np.float32(min(max(value, _LOWEST), 0.0)))


@lru_cache(maxsize=256)
def _dtype(tokens: int, candidates: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("largest", "<f8"),
            ("sum", "<f8"),
            ("ids", "<i4", (tokens,)),
            ("logits", "<f4", (tokens,)),
            ("candidates", "<i4", (candidates,)),
            ("candidate_logits", "<f4", (candidates,)),
        ]
    )
