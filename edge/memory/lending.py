"""Memory that is kept for keys, values and buffers, and that a step leaves unused. Pure.

A shard keeps memory for the longest context and for the largest step. A step of decoding needs
little of it, so layers and experts that would be read from disk may stay there until one does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from edge.memory.step_memory import Widths, activation_bytes
from edge.models.spec import ModelSpec
from edge.protocol.step import StepLimits
from edge.weights.layout import whole_layout

FEW_ROWS = 8
"""Rows of a step whose buffers are never smaller than this, as their sizes add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """What one shard keeps, of which weights may have what no step uses."""

    widths: Widths
    limits: StepLimits
    lends_buffers: bool
    """Else weights may have what is kept for keys and values alone."""

    def unused_bytes(self, rows: int, lengths: Iterable[int]) -> int:
        """Bytes that weights may take more while a step of `rows` rows is computed, after which
        requests have keys and values of these `lengths`, in tokens."""
        spare = self._unused_kv(lengths)
        if self.lends_buffers:
            spare += buffers_unused(self.widths, self.limits, rows)
        return spare

    def _unused_kv(self, lengths: Iterable[int]) -> int:
        page = max(1, self.widths.cache_page_tokens)
        # A request begins and ends in the middle of a page.
        held = sum((-(-length // page) + 1) * page for length in lengths)
        return max(0, self.limits.cached_tokens - held) * self.widths.cache_token_bytes


def unused_by_decoding(spec: ModelSpec, limits: StepLimits) -> int:
    """Bytes of its buffers that a shard with all of the model does not need for one token."""
    return buffers_unused(Widths.of_shard(spec, whole_layout(spec)), limits, rows=1)


def buffers_unused(widths: Widths, limits: StepLimits, rows: int) -> int:
    """Bytes that the largest step computes with and one of `rows` rows does not."""
    rows = max(rows, FEW_ROWS)
    smaller = replace(limits, chunk_tokens=rows, requests=rows)
    return max(0, activation_bytes(widths, limits) - activation_bytes(widths, smaller))
