"""How likely tokens were, over the wire: what was written is read, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import ProtocolError
from edge.kernels.sampling.logprobs import MOST_LOGPROBS, Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.protocol.fields import from_json, to_json
from edge.protocol.step import SamplingTerms
from edge.protocol.token_logprobs import read_logprobs, write_logprobs

logprob = st.floats(-(2.0**100), 0.0, width=32)
told = st.none() | st.builds(
    Logprobs,
    logprob=logprob,
    top=st.lists(st.tuples(st.integers(0, 2**31 - 1), logprob), max_size=MOST_LOGPROBS).map(tuple),
)


@given(st.lists(told, max_size=5).map(tuple))
def test_what_is_written_is_read(tokens: tuple[Logprobs | None, ...]) -> None:
    assert read_logprobs(write_logprobs(tokens)) == (tokens if any(tokens) else ())


@given(st.binary(max_size=600))
def test_whatever_comes_is_read_or_refused(payload: bytes) -> None:
    try:
        found = read_logprobs(payload)
    except ProtocolError:
        return
    assert all(each is None or len(each.top) <= MOST_LOGPROBS for each in found)


def rows(*each: tuple[int, float]) -> bytes:
    return np.array(list(each), [("id", "<i4"), ("logprob", "<f4")]).tobytes()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"123", "no whole number of rows"),
        (rows((0, 0.5)), "at most 0"),
        (rows((0, -np.inf)), "finite"),
        (rows((0, np.nan)), "finite"),
        (rows((2, -1.0), (5, -1.0)), "logprobs of 2 tokens where 1 are left"),
        (rows((-2, 0.0)), "logprobs of -2 tokens"),
        (rows((1, -1.0), (-7, -1.0)), "logprobs of 1 tokens"),
        (rows((21, -1.0), *[(1, -1.0)] * 21), "logprobs of 21 tokens"),
    ],
)
def test_what_nobody_wrote_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read_logprobs(payload)


@pytest.mark.parametrize("count", [-1, 21])
def test_more_than_anybody_may_ask_for(count: int) -> None:
    terms = SamplingTerms(sampling=SamplingParameters(), end_ids=frozenset(), max_new_tokens=1)
    with pytest.raises(ProtocolError, match="logprobs: Expected `int`"):
        from_json(SamplingTerms, to_json(terms) | {"logprobs": count})
