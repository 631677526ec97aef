"""Samples of a model for measurements: a few layers in their real shape. Pure.

Every size is checked before it is used: the model's description comes from outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from edge.errors import CapacityError
from edge.host.free_memory import format_size
from edge.memory.model_sizes import attended_heads, model_facts
from edge.memory.step_memory import layer_state_bytes, layer_token_bytes
from edge.models.attention import Attention
from edge.models.experts import Experts
from edge.models.rotary import Rotary
from edge.models.spec import LayerSpec, ModelSpec, by_kind
from edge.partition import (
    LayerFacts,
    LayerSlice,
    ModelFacts,
    Plan,
    Shard,
    Stage,
    Workload,
    memory_use,
    whole_shard,
)
from edge.partition.plan.expert_tiers import PLACE_BYTES
from edge.protocol.step import StepLimits
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout, shard_layout

SAMPLE_BYTES = 192 << 20
"""Bytes of weights: more than caches hold, so that a step reads memory as the whole model does."""

CHUNK_ROWS = (256, 128, 64, 32)
"""Rows of the longest measured step; the first that fits into memory."""

REQUESTS = 32
"""Rows of the largest step of several requests."""

CONTEXT_TOKENS = 1024
"""The longer of two contexts, whose difference gives the cost of attention."""


_EXPERT_LAYERS = 4
"""Layers of a sample of experts, if there is room: more layers reduce the weight of a step's
first."""

_FEW_TOKENS, _FEW_ROWS = 32, 8
"""The longest context of that sample, and its longest step."""

_LEAST_HIDDEN = 32
"""Hidden size of samples that compute almost nothing."""

_VOCAB_SIZE = 256
"""Vocabulary size of every sample."""

Width = Literal["whole", "half", "narrow"]

_PARTS = {"half": 2, "narrow": 8}
"""Slices of a layer; two of them separate the costs by bytes from fixed ones."""

_LITTLE_BYTES = 48 << 20
"""With less, a layer of few experts or of a small model does not fit at full width."""

_LOADED = Fraction(5, 3)
"""Bytes of all widths together, relative to the full one: a half, an eighth, and remainders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A middle stage of a small model: without a head, and with an embedding of a few tokens only
    if its layers take inputs of each token; neither is measured."""

    spec: ModelSpec
    num_layers: int
    chunk_rows: int
    is_narrowed: bool
    """Whether not even one layer fitted: it has fewer heads and feed-forward columns, and only the
    experts that one token uses."""
    counted: ModelSpec | None = None
    """The model whose bytes are counted, if it has more experts."""
    context_tokens: int = CONTEXT_TOKENS
    """The longest context that is measured."""
    requests: int = REQUESTS
    """Requests in its largest step of several."""

    @property
    def num_heads(self) -> int:
        """Query heads of all its layers."""
        mixers = [self.spec.layer(number).mixer for number in self._middle]
        return sum(attended_heads(each) * each.num_units for each in mixers)

    @property
    def num_experts(self) -> int:
        """Experts of all its layers."""
        blocks = [self.spec.layer(number).feed_forward for number in self._middle]
        return sum(each.num_experts for each in blocks if isinstance(each, Experts))

    @property
    def num_routed(self) -> int:
        """Experts that one token uses."""
        blocks = [self.spec.layer(number).feed_forward for number in self._middle]
        return sum(each.top_k for each in blocks if isinstance(each, Experts))

    @property
    def _middle(self) -> range:
        return range(1, self.num_layers + 1)

    def facts(self, weight_format: WeightFormat) -> ModelFacts:
        spec = self.counted or self.spec
        return model_facts(spec, weight_format, name="sample", embedding_itemsize=4)

    def plan(self, width: Width, weight_format: WeightFormat) -> Plan:
        """Three stages; the middle one on one device, or a slice of it and the rest on two."""
        facts, last = self.facts(weight_format), self.num_layers + 1
        vocab, nothing = range(facts.vocab_size), range(0)
        if width == "whole":
            middle = [whole_shard("a", facts, vocab=nothing)]
        else:
            cuts = [_cut(kind, _PARTS[width], facts.column_multiple) for kind in facts.kinds]
            middle = [
                Shard.of_slices(device, slices, vocab=nothing)
                for device, slices in zip("ab", zip(*cuts, strict=True), strict=True)
            ]
        first, end = ((whole_shard(device, facts, vocab=vocab),) for device in ("first", "last"))
        return Plan(
            model="sample",
            version=0,
            stages=(
                Stage(layers=range(1), shards=first),
                Stage(layers=self._middle, shards=tuple(middle)),
                Stage(layers=range(last, last + 1), shards=end),
            ),
        )

    def layout(self, width: Width, weight_format: WeightFormat) -> ShardLayout:
        """Layout of the middle stage's first shard."""
        return shard_layout(self.spec, self.plan(width, weight_format), stage=1, rank=0)

    def shard_heads(self, width: Width, weight_format: WeightFormat) -> float:
        """Query heads of the middle stage's first shard, averaged over layers."""
        counted = self._counted(width, weight_format)
        return sum(count * len(part.heads) for part, _, count in counted) / self.num_layers

    def _counted(
        self, width: Width, weight_format: WeightFormat
    ) -> list[tuple[LayerSlice, LayerFacts, int]]:
        shard = self.plan(width, weight_format).stages[1].slices[0]
        return list(shard.counted(self._middle, self.facts(weight_format)))

    def nbytes(self, width: Width, weight_format: WeightFormat) -> int:
        """Bytes of its weights by ModelFacts, to which measured rates refer."""
        plan = self.plan(width, weight_format)
        workload = Workload(prompt_tokens=1, output_tokens=0)
        return memory_use(plan, self.facts(weight_format), workload)["a"].weight_bytes

    def part_bytes(self, width: Width, weight_format: WeightFormat) -> tuple[int, int]:
        """Mean bytes of a layer: attention and feed-forward, with half of norms and biases each."""
        attention = feed_forward = 0
        for part, facts, count in self._counted(width, weight_format):
            columns_bytes = len(part.ffn_columns) * facts.ffn_column_bytes
            first_half = facts.layer_bytes // 2
            attention += count * (part.matrix_bytes(facts) - columns_bytes + first_half)
            feed_forward += count * (columns_bytes + facts.layer_bytes - first_half)
        return attention // self.num_layers, feed_forward // self.num_layers

    @property
    def limits(self) -> StepLimits:
        return StepLimits(
            context_tokens=self.context_tokens,
            chunk_tokens=self.chunk_rows,
            requests=self.requests,
            cached_tokens=self.context_tokens * self.requests,
        )


def sample_budget_bytes(memory_bytes: int) -> int:
    """Budget of a measurement for this free memory: a quarter, or half of a small one, since narrow
    samples tell little about whole layers."""
    return max(memory_bytes // 4, min(memory_bytes // 2, _LITTLE_BYTES))


def weights_sample(spec: ModelSpec, weight_format: WeightFormat, budget_bytes: int) -> Sample:
    """As many layers as exceed the caches, at least one, at most the model's.

    If one layer exceeds `budget_bytes`, it is narrowed. CapacityError if that does not help. A
    narrowed layer also has only as many experts as one token uses, which takes a token as long as
    all of them. Many rows would use more, so for those it is too fast.
    """
    spec = _divisible(spec)
    facts = model_facts(spec, weight_format, name="sample", embedding_itemsize=4)
    chunk_rows = _chunk_rows(spec, budget_bytes)
    # All widths are loaded at once, so that they can be measured in turn.
    room_bytes = int((budget_bytes - _work_bytes(spec, chunk_rows)) / _LOADED)
    whole_bytes = sum(facts.kinds[kind].weight_bytes for kind in facts.layers)
    layer_bytes = -(-whole_bytes // facts.num_layers)
    if layer_bytes <= room_bytes:
        wanted = -(-SAMPLE_BYTES // layer_bytes)
        layers = max(1, min(wanted, room_bytes // layer_bytes, spec.num_layers))
        picked = [spec.layer(i * spec.num_layers // layers) for i in range(layers)]
        return Sample(
            spec=_resized(spec, picked),
            num_layers=layers,
            chunk_rows=chunk_rows,
            is_narrowed=False,
        )
    _bytes, layer = max(
        zip(facts.kinds, spec.kinds, strict=True), key=lambda pair: pair[0].weight_bytes
    )
    narrow = _narrowed(spec, _with_few_experts(layer), weight_format, room_bytes)
    columns = narrow.feed_forward.columns
    counted = dataclasses.replace(narrow, feed_forward=layer.feed_forward.with_columns(columns))
    return Sample(
        spec=_resized(spec, [narrow]),
        num_layers=1,
        chunk_rows=chunk_rows,
        is_narrowed=True,
        counted=_resized(spec, [counted]),
    )


def expert_sample(spec: ModelSpec, weight_format: WeightFormat, budget_bytes: int) -> Sample | None:
    """A few layers with as many experts as one token uses, twice in the budget. None without
    experts, and if they do not fit."""
    spec = _divisible(spec)
    sparse = [each for each in spec.kinds if isinstance(each.feed_forward, Experts)]
    if not sparse:
        return None
    work_bytes = _work_bytes(spec, _FEW_ROWS, context_tokens=_FEW_TOKENS)
    room_bytes = budget_bytes // 2 - work_bytes
    try:
        layer = _narrowed(spec, _with_few_experts(sparse[0]), weight_format, room_bytes)
    except CapacityError:
        return None
    (facts,) = model_facts(
        _resized(spec, [layer]), weight_format, name="few", embedding_itemsize=4
    ).kinds
    placed_bytes = facts.weight_bytes + facts.num_experts * PLACE_BYTES
    count = max(1, min(_EXPERT_LAYERS, spec.num_layers, room_bytes // placed_bytes))
    return Sample(
        spec=_resized(spec, [layer] * count),
        num_layers=count,
        chunk_rows=_FEW_ROWS,
        is_narrowed=True,
        context_tokens=_FEW_TOKENS,
        requests=1,
    )


def _narrowed(
    spec: ModelSpec, layer: LayerSpec, weight_format: WeightFormat, room_bytes: int
) -> LayerSpec:
    """The layer with as many of its heads and columns as fit. Raises CapacityError."""
    facts = model_facts(_resized(spec, [layer]), weight_format, name="few", embedding_itemsize=4)
    (largest,) = facts.kinds
    groups, most = largest.num_kv_heads, largest.ffn_columns
    blocks = -(-most // facts.column_multiple)
    share = max(0.0, min(1.0, room_bytes / largest.weight_bytes))
    while True:
        kv_heads = max(1, int(groups * share))
        columns = min(most, max(1, int(blocks * share)) * facts.column_multiple)
        if _layer_bytes(largest, kv_heads, columns) <= room_bytes:
            break
        if kv_heads == 1 and columns <= facts.column_multiple:
            raise _too_large(_layer_bytes(largest, kv_heads, columns), room_bytes)
        share *= 0.9
    mixer = layer.mixer.of_units(range(kv_heads * (largest.num_heads // groups)))
    assert mixer is not None
    return LayerSpec(mixer=mixer, feed_forward=layer.feed_forward.with_columns(columns))


def attention_sample(spec: ModelSpec, weight_format: WeightFormat, budget_bytes: int) -> Sample:
    """The model's attention with almost no other weights, to measure its cost.

    Without windows: the cost of an attended token counts.
    """
    spec = _divisible(spec)
    hidden = max(_LEAST_HIDDEN, _multiple(weight_format))
    layer = LayerSpec(
        mixer=dataclasses.replace(spec.attention, window=None),
        feed_forward=spec.kinds[0].feed_forward.with_columns(hidden),
    )
    narrow = dataclasses.replace(_resized(spec, [layer] * 2), hidden_size=hidden)
    chunk_rows = _chunk_rows(narrow, budget_bytes)
    return Sample(spec=narrow, num_layers=2, chunk_rows=chunk_rows, is_narrowed=True)


def step_sample(spec: ModelSpec, weight_format: WeightFormat) -> ModelSpec:
    """A whole model so small that a step has fixed costs only."""
    spec = _divisible(spec)
    hidden = max(_LEAST_HIDDEN, _multiple(weight_format))
    layer = LayerSpec(
        mixer=dataclasses.replace(
            spec.attention,
            num_heads=1,
            num_kv_heads=1,
            head_size=16,
            rotary=Rotary(inverse_frequencies=(1.0,) * 8),
            latent=None,
            window=None,
        ),
        feed_forward=spec.kinds[0].feed_forward.with_columns(hidden),
    )
    return dataclasses.replace(
        spec,
        hidden_size=hidden,
        vocab_size=_VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
        **by_kind([layer]),
    )


def _with_few_experts(layer: LayerSpec) -> LayerSpec:
    block = layer.feed_forward
    if not isinstance(block, Experts) or block.groups > 1:
        return layer
    few = dataclasses.replace(block, num_experts=block.top_k)
    return dataclasses.replace(layer, feed_forward=few)


def _divisible(spec: ModelSpec) -> ModelSpec:
    """The model with heads that can be divided, to measure parts of them. Sampled layers may lack
    others that they share keys with, so each has its own."""
    layers = [spec.layer(number) for number in range(spec.num_layers)]
    return dataclasses.replace(
        spec,
        **by_kind(
            [
                dataclasses.replace(
                    layer,
                    mixer=dataclasses.replace(layer.mixer, joint_norm=False, keys_of=None),
                )
                if isinstance(layer.mixer, Attention)
                else layer
                for layer in layers
            ]
        ),
    )


def _resized(spec: ModelSpec, layers: Sequence[LayerSpec]) -> ModelSpec:
    """The model with these layers between a first and a last one."""
    whole = by_kind([layers[0], *layers, layers[-1]])
    return dataclasses.replace(spec, vocab_size=_VOCAB_SIZE, context_tokens=CONTEXT_TOKENS, **whole)


def _cut(layer: LayerFacts, parts: int, column_multiple: int) -> tuple[LayerSlice, LayerSlice]:
    """One of `parts` parts of a layer, rounded up, and the rest."""
    heads, columns = range(layer.num_heads), range(layer.ffn_columns)
    head = -(-len(heads) // parts)
    column = -(-len(columns) // (parts * column_multiple)) * column_multiple
    return (
        LayerSlice(heads=heads[:head], ffn_columns=columns[:column]),
        LayerSlice(heads=heads[head:], ffn_columns=columns[column:]),
    )


def _layer_bytes(layer: LayerFacts, kv_heads: int, columns: int) -> int:
    heads = kv_heads * (layer.num_heads // layer.num_kv_heads)
    return (
        heads * layer.query_head_bytes
        + kv_heads * layer.kv_head_bytes
        + columns * layer.ffn_column_bytes
        + layer.layer_bytes
    )


def _work_bytes(spec: ModelSpec, rows: int, *, context_tokens: int = CONTEXT_TOKENS) -> int:
    """Memory of a step of `rows` rows beside weights: activations, rotary tables, KV cache."""
    return max(
        _layer_work_bytes(spec.hidden_size, kind, rows, context_tokens) for kind in spec.kinds
    )


def _layer_work_bytes(hidden_size: int, layer: LayerSpec, rows: int, context_tokens: int) -> int:
    mixer = layer.mixer
    values = layer.feed_forward.row_values(context_tokens, hidden_size)
    if isinstance(mixer, Attention) and mixer.latent is None:
        heads = mixer.num_heads * (1 + mixer.output_gate) + 2 * mixer.num_kv_heads
        values += 2 * heads * mixer.head_size + context_tokens * mixer.head_size // rows
    else:
        values += mixer.row_values(context_tokens, hidden_size)
    kept_bytes = 2 * context_tokens * layer_token_bytes(mixer, "float32")
    kept_bytes += REQUESTS * layer_state_bytes(mixer, "float32")
    return 4 * rows * (4 * hidden_size + values) + kept_bytes


def _chunk_rows(spec: ModelSpec, budget_bytes: int) -> int:
    """The longest step that leaves three quarters of the budget to weights, or the shortest if that
    leaves a third. Raises CapacityError."""
    for rows in CHUNK_ROWS:
        if _work_bytes(spec, rows) <= budget_bytes // 4:
            return rows
    least_bytes = _work_bytes(spec, CHUNK_ROWS[-1]) * 3 // 2
    if least_bytes <= budget_bytes:
        return CHUNK_ROWS[-1]
    raise _too_large(least_bytes, budget_bytes)


def _too_large(need_bytes: int, budget_bytes: int) -> CapacityError:
    return CapacityError(
        f"measuring this model takes {format_size(need_bytes)} at least, and only "
        f"{format_size(max(0, budget_bytes))} of the free memory may be used for it",
        remedy="give the peer more --memory",
    )


def _multiple(weight_format: WeightFormat) -> int:
    return max(kind.column_multiple for kind in weight_format.recipe.kinds)
