"""Which layers keep the newest tokens only, and how many of them. Pure."""

from __future__ import annotations

from collections.abc import Callable

from edge.kernels.kv_cache.cache_size import cache_head_size, keeps_unrounded, kept_tokens
from edge.memory.step_memory import (
    MOST_CALIBRATION_TOKENS,
    PAGE_BYTES,
    cache_token_bytes,
    layer_token_bytes,
    layer_window_bytes,
    window_bytes,
)
from edge.models.attention import Attention
from edge.models.spec import ModelSpec, keeping_windows
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype, kv_bits
from edge.weights.layout import ShardLayout

_LEAST_SAVED = 1.5
"""A context at least so many times as long as the tokens that are kept: below that, places for
saved windows cost more than the windows save."""


def with_windows(spec: ModelSpec, limits: StepLimits) -> ModelSpec:
    """The model as it is loaded with these limits: whether layers with a sliding window keep the
    newest tokens only."""
    if not limits.windows:
        return spec
    return keeping_windows(spec, lambda mixer: _kept(mixer, limits.chunk_tokens))


def can_keep_windows(
    spec: ModelSpec, kv_dtype: KvDtype, *, context_tokens: int, chunk_tokens: int
) -> bool:
    """Whether layers with a sliding window should keep the newest tokens only.

    Not beside states, which are cut in another way than windows; and not with tokens that are kept
    unrounded, which are states, too.
    """
    if spec.has_states or keeps_unrounded(kv_bits(kv_dtype)):
        return False
    kept = [_kept(each, chunk_tokens) for each in spec.attentions.values() if each.window]
    return bool(kept) and context_tokens >= _LEAST_SAVED * max(kept)


def cut_end(spec: ModelSpec) -> Callable[[int], int] | None:
    """The most tokens that a request may have so that it can be cut at any position after a given
    one; None: any number."""
    mixers = (kind.mixer for kind in spec.kinds)
    rows = [each.window_rows for each in mixers if isinstance(each, Attention)]
    bounded = {each for each in rows if each is not None}
    if not bounded:
        return None
    return lambda position: min(each.end(position) for each in bounded)


def kv_memory(
    spec: ModelSpec, limits: StepLimits, kv_dtype: KvDtype
) -> tuple[int, Callable[[int, int], int]] | None:
    """All memory of keys and values; and the part that one request takes with N tokens, which fill
    pages of M tokens. In bytes of all layers: what fits there fits each shard, whose memory is for
    `room_token_bytes`. None: no layer keeps the newest tokens only.
    """
    token_bytes, _ = _all_bytes(spec, kv_dtype)
    rows: dict[int, int] = {}
    for mixer in spec.attentions.values():
        if mixer.kept_tokens is not None:
            row_bytes = layer_window_bytes(mixer, kv_dtype) // mixer.kept_tokens
            rows[mixer.kept_tokens] = rows.get(mixer.kept_tokens, 0) + row_bytes
    if not rows:
        return None
    arrays = 2 * sum(each.kept_tokens is not None for each in spec.attentions.values())

    def of_windows(tokens: int) -> int:
        used = sum(min(tokens, kept) * size for kept, size in rows.items())
        return used + arrays * PAGE_BYTES  # as `window_pages` of the buffers

    def held(tokens: int, of_pages: int) -> int:
        return of_pages * token_bytes + of_windows(tokens)

    windows = limits.windows * of_windows(max(rows))
    return limits.cached_tokens * token_bytes + windows, held


def room_token_bytes(spec: ModelSpec, layout: ShardLayout, kv_dtype: KvDtype) -> int:
    """Bytes that a shard has for each token of `cached_tokens`: those of its layers that keep all,
    and at least as much beside its windows as the whole model has beside all of them. So all shards
    have room for the same requests."""
    own_bytes, own_window = cache_token_bytes(layout, kv_dtype), window_bytes(layout, kv_dtype)
    if not own_window:
        return own_bytes
    all_bytes, all_windows = _all_bytes(spec, kv_dtype)
    return max(own_bytes, -(-own_window * all_bytes // all_windows))


def _all_bytes(spec: ModelSpec, kv_dtype: KvDtype) -> tuple[int, int]:
    """Bytes of a token, and of one request's windows, in all layers."""
    mixers = list(spec.attentions.values())
    tokens = sum(layer_token_bytes(each, kv_dtype) for each in mixers)
    return tokens, sum(layer_window_bytes(each, kv_dtype) for each in mixers)


def _kept(mixer: Attention, chunk_tokens: int) -> int:
    assert mixer.window is not None
    least = min(MOST_CALIBRATION_TOKENS, chunk_tokens)  # of which scales of codes are chosen
    size = cache_head_size(mixer.head_size, 8)
    return kept_tokens(mixer.window, size, chunk_tokens, least=least)
