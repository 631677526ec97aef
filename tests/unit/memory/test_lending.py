"""What a step leaves of a shard's memory, and never more."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from edge.memory.lending import Lending, buffers_unused
from edge.memory.step_memory import Widths, buffer_bytes
from edge.protocol.step import StepLimits
from edge.weights.layout import whole_layout
from tests.support.specs import plain_spec

SPEC = plain_spec(
    hidden_size=64, num_heads=6, head_size=16, ffn_columns=96, vocab_size=100, context_tokens=512
)
LIMITS = StepLimits(context_tokens=512, chunk_tokens=64, requests=4, cached_tokens=1024)
WIDTHS = Widths.of_shard(SPEC, whole_layout(SPEC))
PAGE = WIDTHS.cache_page_tokens


OF_A_PAGE = PAGE * WIDTHS.cache_token_bytes


def lending(*, lends_buffers: bool = False) -> Lending:
    return Lending(widths=WIDTHS, limits=LIMITS, lends_buffers=lends_buffers)


def test_the_memory_of_tokens_that_nobody_has() -> None:
    """A request's pages are its own, and one more: it begins and ends in the middle of one."""
    unused_bytes = lending().unused_bytes
    all_bytes = LIMITS.cached_tokens * WIDTHS.cache_token_bytes
    assert unused_bytes(1, []) == all_bytes
    assert unused_bytes(1, [1]) == all_bytes - 2 * OF_A_PAGE
    assert unused_bytes(1, [PAGE, PAGE + 1]) == all_bytes - (2 + 3) * OF_A_PAGE
    assert unused_bytes(1, [LIMITS.cached_tokens]) == 0
    assert unused_bytes(1, [9 * LIMITS.cached_tokens]) == 0, "of a request longer than memory"


def test_the_buffers_of_rows_that_a_step_has_not() -> None:
    unused = buffers_unused(WIDTHS, LIMITS, 1)
    full = [LIMITS.cached_tokens]
    assert unused > 0
    assert lending(lends_buffers=True).unused_bytes(1, full) == unused
    assert lending(lends_buffers=True).unused_bytes(LIMITS.chunk_tokens, full) == 0
    assert lending().unused_bytes(1, full) == 0, "where they have a limit of their own"


@given(rows=st.integers(1, 64), fewer=st.integers(1, 64))
def test_what_a_step_needs_of_the_buffers_is_left(rows: int, fewer: int) -> None:
    """What is not unused is as much as a shard would keep whose largest step is this one."""
    rows, fewer = max(rows, fewer), min(rows, fewer)
    unused = buffers_unused(WIDTHS, LIMITS, rows)
    assert 0 <= unused <= buffers_unused(WIDTHS, LIMITS, fewer)
    smaller = replace(LIMITS, chunk_tokens=max(rows, 8), requests=1)
    own_bytes = buffer_bytes(WIDTHS, replace(LIMITS, requests=1)) - unused
    made_once = buffer_bytes(WIDTHS, smaller)
    assert own_bytes >= made_once
