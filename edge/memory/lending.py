"""Lends unused memory for keys, values and buffers to streamed weights. Pure.

A shard reserves memory for the longest context and the largest step. A decode step needs little of
it, so layers and experts that would be read from disk may stay there until a step needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from edge.memory.step_memory import Widths, activation_bytes
from edge.memory.windows import with_windows
from edge.models.spec import ModelSpec
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype
from edge.weights.layout import whole_layout

FEW_ROWS = 8
"""Least rows for which buffers are counted, because blocks of small steps add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """The reserved memory of a shard, of which streamed weights may use a part."""

    widths: Widths
    limits: StepLimits
    lends_buffers: bool
    """Whether buffers are lent, too, and not only memory for keys and values."""

    def unused_bytes(self, rows: int, lengths: Iterable[int]) -> int:
        """Bytes that weights may borrow during a step of `rows` rows. lengths: tokens of all
        requests after the step."""
        spare = self._unused_kv(lengths)
        if self.lends_buffers:
            spare += buffers_unused(self.widths, self.limits, rows)
        return spare

    def _unused_kv(self, lengths: Iterable[int]) -> int:
        if self.widths.window_pages:
            return 0  # windows of further requests, and saved ones, may take it
        page = max(1, self.widths.cache_page_tokens)
        # A request may begin and end within a page.
        held = sum((-(-length // page) + 1) * page for length in lengths)
        return max(0, self.limits.cached_tokens - held) * self.widths.cache_token_bytes


def unused_by_decoding(
    spec: ModelSpec, limits: StepLimits, *, kv_dtype: KvDtype, has_tiles: bool
) -> int:
    """Bytes of buffers that a shard with the whole model does not need for one token. has_tiles:
    see `Widths.of_shard`."""
    spec = with_windows(spec, limits)
    widths = Widths.of_shard(spec, whole_layout(spec), kv_dtype=kv_dtype, has_tiles=has_tiles)
    return buffers_unused(widths, limits, rows=1)


def buffers_unused(widths: Widths, limits: StepLimits, rows: int) -> int:
    """Bytes of the largest step's buffers that a step of `rows` rows does not need."""
    rows = max(rows, FEW_ROWS)
    smaller = replace(limits, chunk_tokens=rows, requests=rows)
    return max(0, activation_bytes(widths, limits) - activation_bytes(widths, smaller))
