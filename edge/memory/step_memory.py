"""Memory overhead of a shard over weights and KV cache, to compute and to load. Pure.

Buffers that a program makes once have the sizes given here; temporary memory of its kernels is
bounded by the largest step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge.kernels.kv_cache.cache_size import (
    cache_row,
    keeps_remainders,
    remainder_row_values,
    remainder_shape,
)
from edge.models.attention import Attention
from edge.models.experts import Experts, expert_number
from edge.models.spec import FeedForward, Mixer, ModelSpec
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype, WeightFormat, kv_bits
from edge.weights.layout import ShardLayout
from edge.weights.observation import observed_bytes

LOGIT_CHUNK_BYTES = 4 << 20
"""Bytes of logits per step, when every row travels."""

_LOOSE_LAYER_BYTES = 1 << 19
"""What the sessions of a layer take without its weights: measured 0.23 MiB with ONNX Runtime, and
twice that where a layer is two graphs."""

PAGE_BYTES = 4096
"""What memory is given in: as small as it comes on any device, and nearly everywhere."""

_BLOCK_TOKENS = 16
"""The same on a GPU, of keys and values."""

_SPARE_PAGE_BYTES = 2 << 20
"""Pages that are kept for streamed weights and in use for none of them."""

_SPARE_STATES = 2
"""Slots beyond those of requests: one to fill up a step, and one for a request on its way to a
slot."""

MOST_CALIBRATION_TOKENS = 128
"""Enough that each channel's size is known to a few percent."""

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
    """Other shards have parts of the logits."""
    partial_parts: int = 1
    """Hidden states' widths of what is summed over shards."""
    loose_layers: int = 0
    """With graphs of their own, so that their weights may be on disk."""
    cache_token_bytes: int = 0
    """Bytes of one token's keys and values."""
    cache_page_tokens: int = 0
    """What of them memory is given for at least."""
    state_bytes: int = 0
    """What layers have of one request however long it is."""
    keeps_remainders: bool = False
    """Whether there are remainders in addition to codes of keys and values."""
    measured_token_bytes: int = 0
    """Bytes of one token's keys and values in float32, where codes are made of them."""
    observed_bytes: int = 0
    """Bytes of what is summed up of its matrices' inputs."""
    beside_values: int = 0
    """Values of each row's side inputs: inputs of layers that others need, and of each layer by
    token."""

    @classmethod
    def of_shard(
        cls,
        spec: ModelSpec,
        layout: ShardLayout,
        *,
        kv_dtype: KvDtype = "float32",
        observes: bool = False,
    ) -> Widths:
        return cls(
            hidden_size=spec.hidden_size,
            parts=tuple(
                part
                for layer in map(layout.layer, layout.first_of_kind)
                for part in (layer.mixer, layer.feed_forward)
                if part is not None
            ),
            vocab_rows=len(layout.vocab),
            is_split=layout.is_split,
            partial_parts=spec.partial_parts,
            loose_layers=len(layout.layers) if layout.streamed_layers else 0,
            cache_token_bytes=cache_token_bytes(layout, kv_dtype),
            cache_page_tokens=page_tokens(spec, kv_dtype),
            state_bytes=state_bytes(layout, kv_dtype),
            keeps_remainders=keeps_remainders(kv_bits(kv_dtype)),
            measured_token_bytes=(
                0 if kv_dtype == "float32" else cache_token_bytes(layout, "float32")
            ),
            observed_bytes=observed_bytes(layout) if observes else 0,
            beside_values=_beside(spec, layout),
        )


def _beside(spec: ModelSpec, layout: ShardLayout) -> int:
    hidden, before, behind = spec.hidden_size, layout.kept_before, layout.kept_behind
    own = spec.lenders.intersection(layout.layers)
    beside = max(len(before), len(behind))
    handed = (1 + beside) * hidden if beside else 0
    embedded = hidden if layout.token_columns else 0
    return (len(before) + len(own)) * hidden + handed + embedded + len(layout.token_columns)


def cache_token_bytes(layout: ShardLayout, kv_dtype: KvDtype) -> int:
    """Bytes of one token in a shard's KV cache."""
    return sum(layer_token_bytes(mixer, kv_dtype) for mixer in layout.caches.values())


def page_tokens(spec: ModelSpec, kv_dtype: KvDtype) -> int:
    """One request is given memory for this many tokens at once, on a GPU, too.

    Of the layers whose heads are smallest, which have most of them in a page.
    """
    tokens = max(-(-PAGE_BYTES // size) for size in _row_sizes(spec, kv_dtype))
    return -(-tokens // _BLOCK_TOKENS) * _BLOCK_TOKENS


def held_tokens(tokens: int, spec: ModelSpec, limits: StepLimits, kv_dtype: KvDtype) -> int:
    """The tokens of memory that `tokens` tokens of one request take.

    They may be more, because the keys of each head, and its values, fill whole pages. A request
    with the whole context takes no more.
    """
    page = page_tokens(spec, kv_dtype)
    is_aligned = not any(
        limits.context_tokens * size % PAGE_BYTES for size in _row_sizes(spec, kv_dtype)
    )
    pages = -(-tokens // page) + (0 if is_aligned else 1)
    return max(tokens, min(limits.context_tokens, pages * page))


def row_bytes(mixer: Attention, kv_dtype: KvDtype) -> int:
    """Bytes of one token's key, or value, of one head."""
    dtype, elements = cache_row(mixer.head_size, kv_bits(kv_dtype))
    return elements * np.dtype(dtype).itemsize


def _row_sizes(spec: ModelSpec, kv_dtype: KvDtype) -> set[int]:
    mixers = [kind.mixer for kind in spec.kinds]
    return {row_bytes(each, kv_dtype) for each in mixers if isinstance(each, Attention)}


def layer_token_bytes(mixer: Mixer, kv_dtype: KvDtype) -> int:
    """Keys and values of one token."""
    if not isinstance(mixer, Attention):
        return 0
    return 2 * mixer.num_kv_heads * row_bytes(mixer, kv_dtype)


def has_states(spec: ModelSpec, kv_dtype: KvDtype) -> bool:
    """Requests have states, and so cannot be cut at any of their tokens."""
    return spec.has_states or keeps_remainders(kv_bits(kv_dtype))


def layer_state_bytes(mixer: Mixer, kv_dtype: KvDtype) -> int:
    """Bytes that a layer has of one request in place of keys and values, or in addition to them,
    however long it is."""
    if not isinstance(mixer, Attention):
        return _FLOAT_BYTES * mixer.state_values
    if not keeps_remainders(kv_bits(kv_dtype)):
        return 0
    has_soft_cap = mixer.soft_cap is not None
    shape = remainder_shape(mixer.num_kv_heads, mixer.head_size, has_soft_cap=has_soft_cap)
    return _FLOAT_BYTES * math.prod(shape)


def state_bytes(layout: ShardLayout, kv_dtype: KvDtype) -> int:
    """The same of all layers."""
    mixers = [*layout.states.values(), *layout.caches.values()]
    return sum(layer_state_bytes(mixer, kv_dtype) for mixer in mixers)


def calibration_tokens(limits: StepLimits) -> int:
    """Tokens of the chunk by which scales are chosen.

    No more than memory is kept for: all layers are looked at when it is computed.
    """
    return min(MOST_CALIBRATION_TOKENS, limits.chunk_tokens, limits.cached_tokens)


def passing_bytes(layout: ShardLayout, limits: StepLimits, kv_dtype: KvDtype) -> int:
    """Keys and values of one layer of a request longer than memory, the largest: its host's buffer
    on their way to a device with memory of its own."""
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
    """Values of the most logits that a step may want of this shard."""
    return max(most_batched(limits) * widths.vocab_rows, _evaluated(widths, limits))


def _evaluated(widths: Widths, limits: StepLimits) -> int:
    """The same of a step whose rows all travel."""
    return min(limits.chunk_tokens * widths.vocab_rows, LOGIT_CHUNK_BYTES // _FLOAT_BYTES)


def buffer_bytes(widths: Widths, limits: StepLimits) -> int:
    """The most that a shard takes over weights and KV cache while it computes any step."""
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
        + widths.observed_bytes
    )


def _loose_bytes(widths: Widths) -> int:
    """Over what layers in memory take: pages that no weights are in just now, and where experts
    are brought in what goes between a layer's graphs, as far as no kernel has it else."""
    experts = [part for part in widths.parts if isinstance(part, Experts)]
    # Each half of a step may have a row for nothing of every expert.
    nothing = 2 * max((len(part.held) + 1 for part in experts), default=0) * widths.hidden_size
    return _SPARE_PAGE_BYTES * (2 if experts else 1) + _FLOAT_BYTES * nothing


def _moved_bytes(widths: Widths, limits: StepLimits) -> int:
    """Where there is a disk for keys and values: the block of a prompt that is on its way."""
    return limits.chunk_tokens * widths.cache_token_bytes if limits.disk_tokens else 0


def _measured_bytes(widths: Widths, limits: StepLimits) -> int:
    """What keys and values take that scales are chosen by, more than the codes do later on."""
    measured_bytes = calibration_tokens(limits) * widths.measured_token_bytes
    return max(0, measured_bytes - limits.cached_tokens * widths.cache_token_bytes)


def most_results(part: Experts, rows: int) -> int:
    """Rows of results that experts may have in a step, those for nothing among them: an expert has
    one of these where the number of its others is odd. One stands for all experts that are
    elsewhere."""
    uses, held = rows * part.top_k, len(part.held)
    return part.is_part + uses + (min(uses, held) if rows > 1 else 0)


def stacked_experts_fit(part: Experts, hidden_size: int, threads: int) -> bool:
    """Whether a node of all experts takes no more than is kept for a step's rows.

    Each thread of it has results of its own for all uses of experts, and what one expert is given
    and makes, which all rows may go through; the inputs and the results are in addition to these.
    """
    of_uses = part.top_k * ((2 + threads) * hidden_size + part.num_experts)
    of_expert = threads * (3 * hidden_size + 4 * part.columns)
    return of_uses + of_expert <= part.row_values(0, hidden_size)


def load_bytes(
    layout: ShardLayout, weight_format: WeightFormat, *, stacks_experts: bool = True
) -> int:
    """More than its weights that a shard takes while it is loaded as a whole.

    Weights are packed one by one, out of the file; but the pages of scales that were read stay
    until all are packed. Layers that may be read from disk are packed one by one, in the room that
    is kept for their window. `stacks_experts`: the matrices of a layer's experts may be packed as
    one.
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
    """More than the head itself that a shard whose layers may be on disk takes to pack it.

    At that time it holds no layer and no cache. What the head is packed from stays until it is.
    """
    heads = [matrix for matrix in layout.matrices if matrix.name == "head"]
    stored = weight_format.recipe.all_stored(heads)
    return sum(array.nbytes for each in stored for array in each.arrays)


def _made_once(widths: Widths, limits: StepLimits) -> int:
    """A pair of hidden states, one of what is added to them, rotary tables."""
    rotations = {part.rotary for part in widths.parts if isinstance(part, Attention)}
    table_columns = sum(each.turned_elements for each in rotations)
    states = 2 * (1 + widths.partial_parts) * widths.hidden_size
    return (
        most_rows(limits) * (states + widths.beside_values) + limits.context_tokens * table_columns
    )


def activation_bytes(widths: Widths, limits: StepLimits) -> int:
    """What is alive at once in a layer in the largest step, however its kernels keep it.

    Normed and residual states, and what mixers and feed-forward blocks have. Those are never alive
    at once, but the arena keeps the blocks of every kind.
    """
    largest: dict[str, int] = {}
    for part in widths.parts:
        values = part.row_values(limits.context_tokens, widths.hidden_size)
        if widths.keeps_remainders and isinstance(part, Attention):
            values += remainder_row_values(
                part.num_heads, limits.context_tokens, limits.chunk_tokens
            )
        largest[part.kind] = max(values, largest.get(part.kind, 0))
    values = most_rows(limits) * (3 * widths.hidden_size + sum(largest.values()))
    return _FLOAT_BYTES * values


def _logits(widths: Widths, limits: StepLimits) -> int:
    """The buffer and a message; at a split stage's sampler also those of the other shards."""
    copies = 3 if widths.is_split else 1
    return copies * most_logits(widths, limits) + _evaluated(widths, limits)
