"""Memory of a shard beside weights and KV cache, for computing and for loading. Pure.

Programs make their buffers with the sizes given here. Temporary memory of kernels is bounded by the
largest step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge.kernels.attention.tiles import attends_in_tiles, joined_tile_values, tile_values
from edge.kernels.kv_cache.cache_size import (
    cache_row,
    keeps_unrounded,
    unrounded_shape,
)
from edge.models.attention import Attention
from edge.models.experts import Experts, expert_number
from edge.models.spec import FeedForward, Mixer, ModelSpec
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype, WeightFormat, kv_bits
from edge.weights.further import FurtherHead
from edge.weights.layout import ShardLayout
from edge.weights.observation import observed_bytes

LOGIT_CHUNK_BYTES = 4 << 20
"""Bytes of logits per step, if the logits of all rows are sent."""

_LOOSE_LAYER_BYTES = 1 << 19
"""Bytes of a layer's sessions without its weights. Measured with ONNX Runtime: 0.23 MiB, and twice
that if a layer is two graphs."""

PAGE_BYTES = 4096
"""Bytes of a memory page: the smallest size of any device, and the usual one."""

_BLOCK_TOKENS = 16
"""Tokens of a block of the paged KV cache on a GPU."""

_SPARE_PAGE_BYTES = 2 << 20
"""Bytes of pages for streamed weights that are currently unused."""

_SPARE_STATES = 2
"""Slots beyond those of requests: one to fill up a step, and one for a request that is moving."""

MOST_CALIBRATION_TOKENS = 128
"""Tokens with which each channel's size is known to a few percent."""

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The sizes of a shard on which its buffers depend."""

    hidden_size: int
    parts: tuple[Mixer | FeedForward, ...]
    """Mixers and feed-forwards of its layers in local sizes, each kind once."""
    vocab_rows: int
    """Columns of the logits."""
    is_split: bool
    """Whether other shards have parts of the logits."""
    partial_parts: int = 1
    """Width of sums over shards, in hidden states."""
    loose_layers: int = 0
    """Number of layers with their own graphs, so that their weights may be on disk."""
    cache_token_bytes: int = 0
    """Bytes of one token's keys and values."""
    cache_page_tokens: int = 0
    """Tokens in the smallest unit of memory for keys and values."""
    state_bytes: int = 0
    """Bytes of one request's states, at any length."""
    window_bytes: int = 0
    """Bytes of one request's windows."""
    window_pages: int = 0
    """Arrays of one request's windows, each of which may take a page more."""
    measured_token_bytes: int = 0
    """Bytes of one token's keys and values in float32, if they become codes."""
    observed_bytes: int = 0
    """Bytes of the sums over its matrices' inputs."""
    beside_values: int = 0
    """Values of a row's side inputs: inputs of layers that others need, token inputs, and what is
    added to rows of pictures."""
    in_tiles: frozenset[Attention] = frozenset()
    """Mixers of `parts` that hold no scores over the whole context."""
    kv_bits: int | None = None
    """Bits of a code in the KV cache; None: float32."""

    @classmethod
    def of_shard(
        cls,
        spec: ModelSpec,
        layout: ShardLayout,
        *,
        kv_dtype: KvDtype = "float32",
        observes: bool = False,
        has_tiles: bool = False,
    ) -> Widths:
        """has_tiles: the device lacks no TILED_ATTENTION."""
        parts = tuple(
            part
            for layer in map(layout.layer, layout.first_of_kind)
            for part in (layer.mixer, layer.feed_forward)
            if part is not None
        )
        return cls(
            hidden_size=spec.hidden_size,
            parts=parts,
            kv_bits=kv_bits(kv_dtype),
            in_tiles=frozenset(
                part
                for part in parts
                if has_tiles
                and isinstance(part, Attention)
                and (
                    part.latent is not None
                    or attends_in_tiles(part.packed(spec.norm_epsilon), kv_bits(kv_dtype))
                )
            ),
            vocab_rows=len(layout.vocab),
            is_split=layout.is_split,
            partial_parts=spec.partial_parts,
            loose_layers=len(layout.layers) if layout.streamed_layers else 0,
            cache_token_bytes=cache_token_bytes(layout, kv_dtype),
            cache_page_tokens=page_tokens(spec, kv_dtype),
            state_bytes=state_bytes(layout, kv_dtype),
            measured_token_bytes=(
                0
                if kv_dtype == "float32"
                else sum(_token_bytes(mixer, "float32") for mixer in layout.caches.values())
            ),
            window_bytes=window_bytes(layout, kv_dtype),
            window_pages=2 * sum(each.kept_tokens is not None for each in layout.caches.values()),
            observed_bytes=observed_bytes(layout) if observes else 0,
            beside_values=_beside(spec, layout),
        )


def _beside(spec: ModelSpec, layout: ShardLayout) -> int:
    hidden, before, behind = spec.hidden_size, layout.kept_before, layout.kept_behind
    own = spec.lenders.intersection(layout.layers)
    beside = max(len(before), len(behind))
    handed = (1 + beside) * hidden if beside else 0
    embedded = hidden if layout.token_columns else 0
    of_pictures = len(spec.of_pictures(layout.layers))
    return (
        (len(before) + len(own) + of_pictures) * hidden
        + handed
        + embedded
        + len(layout.token_columns)
    )


def cache_token_bytes(layout: ShardLayout, kv_dtype: KvDtype) -> int:
    """Bytes of one token in a shard's KV cache, without windows."""
    return sum(layer_token_bytes(mixer, kv_dtype) for mixer in layout.caches.values())


def page_tokens(spec: ModelSpec, kv_dtype: KvDtype) -> int:
    """Tokens in the smallest unit of memory for a request's keys and values, on any device.

    The layers with the smallest heads decide, because most of their tokens fit into a page.
    """
    tokens = max((-(-PAGE_BYTES // size) for size in _row_sizes(spec, kv_dtype)), default=0)
    return -(-tokens // _BLOCK_TOKENS) * _BLOCK_TOKENS


def held_tokens(tokens: int, spec: ModelSpec, limits: StepLimits, kv_dtype: KvDtype) -> int:
    """The tokens for which one request of `tokens` tokens takes memory.

    They may be more, because keys and values of each head fill whole pages, but never more than the
    whole context.
    """
    page = page_tokens(spec, kv_dtype)
    if not page:
        return tokens
    is_aligned = not any(
        limits.context_tokens * size % PAGE_BYTES for size in _row_sizes(spec, kv_dtype)
    )
    pages = -(-tokens // page) + (0 if is_aligned else 1)
    return max(tokens, min(limits.context_tokens, pages * page))


def row_bytes(mixer: Attention, kv_dtype: KvDtype) -> int:
    """Bytes of a token's key (or value) of one head."""
    dtype, elements = cache_row(mixer.cached_size, kv_bits(kv_dtype))
    return elements * np.dtype(dtype).itemsize


def _row_sizes(spec: ModelSpec, kv_dtype: KvDtype) -> set[int]:
    mixers = [kind.mixer for kind in spec.kinds if layer_token_bytes(kind.mixer, kv_dtype)]
    return {row_bytes(each, kv_dtype) for each in mixers if isinstance(each, Attention)}


def layer_token_bytes(mixer: Mixer, kv_dtype: KvDtype) -> int:
    """Bytes of a token's keys and values in one layer; 0 if it keeps the newest tokens only."""
    if not isinstance(mixer, Attention) or mixer.kept_tokens is not None:
        return 0
    return _token_bytes(mixer, kv_dtype)


def layer_window_bytes(mixer: Mixer, kv_dtype: KvDtype) -> int:
    """Bytes of one request's keys and values in a layer that keeps the newest tokens only."""
    if not isinstance(mixer, Attention) or mixer.kept_tokens is None:
        return 0
    return mixer.kept_tokens * _token_bytes(mixer, kv_dtype)


def _token_bytes(mixer: Attention, kv_dtype: KvDtype) -> int:
    return 2 * mixer.num_kv_heads * row_bytes(mixer, kv_dtype)


def keeps_windows(spec: ModelSpec) -> bool:
    """Whether layers with a sliding window keep the newest tokens only."""
    mixers = (kind.mixer for kind in spec.kinds)
    return any(isinstance(each, Attention) and each.kept_tokens is not None for each in mixers)


def has_states(spec: ModelSpec, kv_dtype: KvDtype) -> bool:
    """Whether requests have states or windows, so that they cannot be cut at any token."""
    return rewinds(spec, kv_dtype) or keeps_windows(spec)


def rewinds(spec: ModelSpec, kv_dtype: KvDtype) -> bool:
    """Whether requests have states, so that no guess may be written over."""
    return spec.has_states or keeps_unrounded(kv_bits(kv_dtype))


def layer_state_bytes(mixer: Mixer, kv_dtype: KvDtype) -> int:
    """Bytes of one request's states in a layer, at any length, in place of keys and values or in
    addition to them."""
    if not isinstance(mixer, Attention):
        return _FLOAT_BYTES * mixer.state_values
    if not keeps_unrounded(kv_bits(kv_dtype)):
        return 0
    return _FLOAT_BYTES * math.prod(unrounded_shape(mixer.num_kv_heads, mixer.head_size))


def state_bytes(layout: ShardLayout, kv_dtype: KvDtype) -> int:
    """Bytes of one request's states in all layers."""
    mixers = [*layout.states.values(), *layout.caches.values()]
    return sum(layer_state_bytes(mixer, kv_dtype) for mixer in mixers)


def window_bytes(layout: ShardLayout, kv_dtype: KvDtype) -> int:
    """Bytes of one request's windows in all layers."""
    return sum(layer_window_bytes(mixer, kv_dtype) for mixer in layout.caches.values())


def calibration_tokens(limits: StepLimits) -> int:
    """Tokens of the chunk from which scales are chosen.

    All of its keys and values must fit into memory, because scales are chosen after all layers.
    """
    return min(MOST_CALIBRATION_TOKENS, limits.chunk_tokens, limits.cached_tokens)


def passing_bytes(layout: ShardLayout, limits: StepLimits, kv_dtype: KvDtype) -> int:
    """Bytes of the host's buffer for one layer's keys and values of the longest request, between
    disk and a device with its own memory."""
    if not limits.exceeds_memory:
        return 0
    sizes = (layer_token_bytes(mixer, kv_dtype) for mixer in layout.caches.values())
    return limits.context_tokens * max(sizes, default=0)


def most_rows(limits: StepLimits) -> int:
    """Rows of the hidden state in the largest step."""
    return max(limits.chunk_tokens, most_batched(limits))


def most_batched(limits: StepLimits) -> int:
    """Requests in the largest step, with one that fills it up to an even number."""
    return limits.requests + limits.requests % 2 * limits.batch_invariant


def most_logits(widths: Widths, limits: StepLimits) -> int:
    """Most logits that a step may ask of this shard, in values."""
    return max(most_batched(limits) * widths.vocab_rows, _evaluated(widths, limits))


def _evaluated(widths: Widths, limits: StepLimits) -> int:
    """Logits of the largest step of which all rows are sent, in values."""
    return min(limits.chunk_tokens * widths.vocab_rows, LOGIT_CHUNK_BYTES // _FLOAT_BYTES)


def further_limits(limits: StepLimits) -> StepLimits:
    """The limits of a further head's steps: one answer is drafted for at a time."""
    return StepLimits(
        context_tokens=limits.context_tokens,
        chunk_tokens=limits.chunk_tokens,
        requests=1,
        cached_tokens=limits.context_tokens,
    )


def further_bytes(further: FurtherHead, limits: StepLimits) -> int:
    """Bytes that a further head takes beside its weights: its keys and values, and buffers."""
    own = further_limits(limits)
    kept = own.cached_tokens * cache_token_bytes(further.layout, "float32")
    return kept + buffer_bytes(Widths.of_shard(further.spec, further.layout), own)


MOST_WINDOWS_COPIED = 64 << 20
"""Most bytes of a request's windows that go to disk for later sessions; larger ones are kept in
memory only."""


def buffer_bytes(widths: Widths, limits: StepLimits) -> int:
    """Most bytes that a shard takes beside weights and KV cache while it computes any step."""
    values = _made_once(widths, limits) + _logits(widths, limits)
    loose = _loose_bytes(widths) if widths.loose_layers else 0
    return (
        _FLOAT_BYTES * values
        + activation_bytes(widths, limits)
        + widths.loose_layers * _LOOSE_LAYER_BYTES
        + loose
        + _moved_bytes(widths, limits)
        + (1 + limits.batch_invariant) * widths.cache_page_tokens * widths.cache_token_bytes
        + _measured_bytes(widths, limits)
        + _SPARE_STATES * widths.state_bytes
        + (_SPARE_STATES + limits.windows) * widths.window_pages * PAGE_BYTES
        + widths.observed_bytes
    )


def _loose_bytes(widths: Widths) -> int:
    """Further bytes for streamed layers: unused pages, and with streamed experts the values between
    a layer's graphs that kernels would not hold otherwise."""
    experts = [part for part in widths.parts if isinstance(part, Experts)]
    # Each half of a step may have a padding row of every expert.
    padding = 2 * max((len(part.held) + 1 for part in experts), default=0) * widths.hidden_size
    return _SPARE_PAGE_BYTES * (2 if experts else 1) + _FLOAT_BYTES * padding


def _moved_bytes(widths: Widths, limits: StepLimits) -> int:
    """Bytes of the block of a prompt between memory and disk, and of windows behind it, if keys and
    values may go to disk."""
    if not limits.disk_tokens:
        return 0
    windows = min(widths.window_bytes, MOST_WINDOWS_COPIED)
    return limits.chunk_tokens * widths.cache_token_bytes + windows


def _measured_bytes(widths: Widths, limits: StepLimits) -> int:
    """Further bytes of the float32 keys and values from which scales are chosen, over the codes."""
    measured_bytes = calibration_tokens(limits) * widths.measured_token_bytes
    return max(0, measured_bytes - limits.cached_tokens * widths.cache_token_bytes)


def most_results(part: Experts, rows: int) -> int:
    """Most rows of experts' results in a step. An expert with an odd number of rows has a padding
    row, and one row stands for all experts of other shards."""
    uses, held = rows * part.top_k, len(part.held)
    return part.is_part + uses + (min(uses, held) if rows > 1 else 0)


def stacked_experts_fit(part: Experts, hidden_size: int, threads: int) -> bool:
    """Whether a node for all experts fits into the memory for a step's rows.

    Each of its threads has results for all uses of experts, and inputs and outputs of one expert
    for up to all rows. The node's own inputs and results are in addition.
    """
    of_uses = part.top_k * ((2 + threads) * hidden_size + part.num_experts)
    of_expert = threads * (3 * hidden_size + 4 * part.columns)
    return of_uses + of_expert <= part.row_values(0, hidden_size)


def load_bytes(
    layout: ShardLayout, weight_format: WeightFormat, *, stacks_experts: bool = True
) -> int:
    """Bytes beside its weights that a shard takes while it is loaded as a whole.

    Weights are packed one by one from the file, but pages of scales stay until all are packed.
    Streamed layers are packed one by one, in the memory of their window. stacks_experts: a layer's
    experts may be packed as one matrix.
    """
    largest: dict[str, int] = {}
    stay = 0
    for matrix in weight_format.recipe.all_stored(layout.matrices):
        stay += sum(array.nbytes for array in matrix.arrays if array.stays)
        name = matrix.name
        if stacks_experts and expert_number(name) is not None:
            layer, _is_one, own = name.partition(".experts.")
            name = f"{layer}.{own.partition('.')[2]}"
        nbytes = sum(array.nbytes for array in matrix.arrays if not array.stays)
        largest[name] = largest.get(name, 0) + nbytes
    return stay + max(largest.values(), default=0)


def head_load_bytes(layout: ShardLayout, weight_format: WeightFormat) -> int:
    """Bytes beside the head itself that a streaming shard takes to pack it.

    The shard holds no layer and no cache then. The unpacked head stays until packing ends.
    """
    heads = [matrix for matrix in layout.matrices if matrix.name == "head"]
    stored = weight_format.recipe.all_stored(heads)
    return sum(array.nbytes for each in stored for array in each.arrays)


def _made_once(widths: Widths, limits: StepLimits) -> int:
    """Values of buffers made once: two hidden states, two addends, side inputs, rotary tables."""
    rotations = {part.rotary for part in widths.parts if isinstance(part, Attention)}
    table_columns = sum(each.turned_elements for each in rotations)
    states = 2 * (1 + widths.partial_parts) * widths.hidden_size
    return (
        most_rows(limits) * (states + widths.beside_values) + limits.context_tokens * table_columns
    )


def activation_bytes(widths: Widths, limits: StepLimits) -> int:
    """Bytes that are alive at once in a layer of the largest step, with any kernels.

    Counts normed and residual states, mixers and feed-forward blocks. The latter two are not alive
    at once, but the arena keeps the blocks of each kind.
    """
    largest: dict[str, int] = {}
    staged = in_tiles = 0
    rows = most_rows(limits)
    for part in widths.parts:
        keys = limits.context_tokens
        if isinstance(part, Attention) and part in widths.in_tiles:
            keys = 0
            if part.latent is not None:
                half = part.latent_form.half_size
                own = joined_tile_values(part.num_heads, half, rows, limits.context_tokens)
            else:
                own = tile_values(part.packed(0.0), widths.kv_bits, rows, limits.context_tokens)
            in_tiles = max(in_tiles, own)
        if isinstance(part, Attention) and part.kept_tokens is not None:
            # A chunk that would move rows is put behind them in temporary memory.
            kept = part.kept_tokens + limits.chunk_tokens
            keys = min(keys, kept)
            staged = max(staged, 2 * part.num_kv_heads * part.head_size * kept)
        values = part.row_values(keys, widths.hidden_size)
        largest[part.kind] = max(values, largest.get(part.kind, 0))
    by_nodes = [
        part.latent_form.node_values(rows, limits.context_tokens)
        for part in widths.parts
        if isinstance(part, Attention) and part.latent is not None and part not in widths.in_tiles
    ]
    values = rows * (3 * widths.hidden_size + sum(largest.values())) + max(by_nodes, default=0)
    return _FLOAT_BYTES * (values + staged + in_tiles)


def _logits(widths: Widths, limits: StepLimits) -> int:
    """Values of the logits' buffer and message; in a split stage also those of other shards."""
    copies = 3 if widths.is_split else 1
    return copies * most_logits(widths, limits) + _evaluated(widths, limits)
