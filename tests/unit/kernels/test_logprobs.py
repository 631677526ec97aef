"""Logprobs of a vocabulary in parts are those of the whole: log softmax in float64."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge.kernels.sampling.logprobs import combine, logprobs_of, make_part, part_dtype

all_logits = st.integers(1, 300).flatmap(
    lambda size: hnp.arrays(
        np.float32,
        size,
        elements=st.floats(-50, 50, width=32) | st.sampled_from([0.0, 1.0, -3e38, 3e38, 80.0]),
    )
)


def expected(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    return found


@given(all_logits, st.integers(0, 20), st.data())
def test_parts_tell_what_the_whole_does(
    logits: np.ndarray, count: int, data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, logits.size - 1))
    cuts = data.draw(st.lists(st.integers(0, logits.size), max_size=3))
    parts = []
    for start, stop in itertools.pairwise([0, *sorted(cuts), logits.size]):
        mine = np.array([token] if start <= token < stop else [start] * (start < stop), np.int64)
        part = make_part(logits[start:stop], first_id=start, count=count, candidates=mine)
        dtype = part_dtype(count, columns=stop - start, candidates=mine.size)
        parts.append(np.frombuffer(part.tobytes(), dtype))
    found = combine(parts, token, count=count)
    wanted = expected(logits)
    wanted = wanted.clip(np.finfo(np.float32).min)
    np.testing.assert_allclose(found.logprob, wanted[token], rtol=1e-6, atol=1e-6)
    ranked = np.lexsort((np.arange(logits.size), -logits))[:count]
    assert [each for each, _logprob in found.top] == ranked.tolist()
    np.testing.assert_allclose([v for _id, v in found.top], wanted[ranked], rtol=1e-6, atol=1e-6)
    whole = logprobs_of(logits, token, count=count)
    assert [each for each, _logprob in whole.top] == ranked.tolist()
    assert abs(whole.logprob - found.logprob) <= 1e-6 * max(1, abs(found.logprob))


def test_a_large_vocabulary_is_summed_whole() -> None:
    logits = np.random.default_rng(3).normal(0, 6, 70_001).astype(np.float32)
    found = logprobs_of(logits, 70_000, count=5)
    assert abs(found.logprob - expected(logits)[70_000]) < 1e-5
