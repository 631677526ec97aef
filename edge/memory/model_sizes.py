"""A model's sizes for planning, from its description and its weight format. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from edge.memory.step_memory import layer_state_bytes, layer_token_bytes, layer_window_bytes
from edge.memory.windows import with_windows
from edge.models.attention import Attention
from edge.models.experts import SHARED, Experts
from edge.models.parts import Weights
from edge.models.spec import FeedForward, LayerSpec, Mixer, ModelSpec
from edge.partition import LayerFacts, ModelFacts
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import Wire, number_bytes
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.further import further_in

_FLOAT_BYTES = 4


def model_facts(
    spec: ModelSpec,
    weight_format: WeightFormat,
    *,
    name: str,
    embedding_itemsize: int,
    kv_dtype: KvDtype = "float32",
    wire: Wire = "float32",
    expert_uses: tuple[tuple[float, ...], ...] = (),
) -> ModelFacts:
    """Bytes of each part of the model in a peer's memory, packed for its kernels.

    With `wire` "auto", hidden states count as float32, though some links may send fewer bytes.
    """
    hidden = spec.hidden_size

    recipe = weight_format.recipe

    def nbytes(weights: Weights, grade: int = 0) -> int:
        matrix_bytes = sum(
            count * recipe.kind(role, grade).packed_bytes_per_weight
            for role, count in weights.matrices
        )
        matrix_bytes += sum(
            count * recipe.kind(role, grade).transposed.packed_bytes_per_weight
            for role, count in weights.transposed
        )
        return round(matrix_bytes) + _FLOAT_BYTES * weights.vector

    def of_one_expert(block: FeedForward, grade: int) -> int:
        """Bytes of one expert's part of a feed-forward column."""
        if not isinstance(block, Experts):
            return 0
        unit = block.weights(hidden).unit
        own = tuple(each for each in unit.matrices if not each[0].startswith(SHARED))
        return nbytes(Weights(matrices=own, vector=unit.vector), grade) // block.num_experts

    def facts(layer: LayerSpec) -> LayerFacts:
        block = layer.feed_forward
        mixer, feed_forward = layer.mixer.weights(hidden), layer.feed_forward.weights(hidden)
        return LayerFacts(
            num_heads=layer.mixer.num_units,
            num_kv_heads=layer.mixer.num_groups,
            heads_per_unit=attended_heads(layer.mixer),
            ffn_columns=layer.feed_forward.columns,
            query_head_bytes=nbytes(mixer.unit, layer.grade),
            kv_head_bytes=nbytes(mixer.group, layer.grade),
            ffn_column_bytes=nbytes(feed_forward.unit, layer.grade),
            layer_bytes=nbytes(mixer.fixed, layer.grade) + nbytes(feed_forward.fixed, layer.grade),
            kv_bytes_per_token=layer_token_bytes(layer.mixer, kv_dtype) // layer.mixer.num_groups,
            state_bytes=layer_state_bytes(layer.mixer, kv_dtype) // layer.mixer.num_groups,
            window_bytes=layer_window_bytes(layer.mixer, kv_dtype) // layer.mixer.num_groups,
            window_tokens=(layer.mixer.kept_tokens if isinstance(layer.mixer, Attention) else None),
            seen_tokens=layer.mixer.window if isinstance(layer.mixer, Attention) else None,
            num_experts=block.num_experts if isinstance(block, Experts) else 0,
            top_k=block.top_k if isinstance(block, Experts) else 0,
            expert_column_bytes=of_one_expert(block, layer.grade),
            is_grouped=isinstance(block, Experts) and block.groups > 1,
            keys_of=_keys_of(layer.mixer),
        )

    # A further head is beside the head, and is read as often.
    further = further_in(spec, weight_format)
    further_bytes = 0 if further is None else further.weight_bytes
    return ModelFacts(
        name=name,
        hidden_size=hidden,
        vocab_size=spec.vocab_size,
        kinds=tuple(map(facts, spec.kinds)),
        layers=spec.layers,
        tied_embeddings=spec.tied_embeddings,
        column_multiple=recipe.column_multiple(_cut_by_columns(spec)),
        embedding_row_bytes=hidden * embedding_itemsize,
        head_row_bytes=nbytes(Weights(matrices=(("head", hidden),)))
        + -(-further_bytes // spec.vocab_size),
        kept=_kept(spec),
        wire_number_bytes=number_bytes(wire),
        expert_uses=expert_uses,
    )


def facts_with_windows(
    facts: ModelFacts, spec: ModelSpec, limits: StepLimits, kv_dtype: KvDtype
) -> ModelFacts:
    """The facts with what layers with a sliding window keep with these limits."""
    windowed = with_windows(spec, limits)

    def of_kind(number: int, kind: LayerFacts) -> LayerFacts:
        mixer = windowed.layer(facts.layers.index(number)).mixer
        if not isinstance(mixer, Attention) or mixer.kept_tokens is None:
            return kind
        return replace(
            kind,
            kv_bytes_per_token=0,
            window_bytes=layer_window_bytes(mixer, kv_dtype) // mixer.num_groups,
            window_tokens=mixer.kept_tokens,
            keys_of=None,
        )

    return replace(facts, kinds=tuple(of_kind(*each) for each in enumerate(facts.kinds)))


def _keys_of(mixer: Mixer) -> int | None:
    """The layer with whose keys and values those of this layer are kept."""
    if not isinstance(mixer, Attention) or mixer.kept_tokens is not None:
        return None
    return mixer.keys_of


def _kept(spec: ModelSpec) -> tuple[int, ...]:
    """The size of `ModelSpec.kept` for each layer, in one pass, because a file may name thousands
    of layers."""
    last_uses = {
        each.keys_of: number for number, each in spec.attentions.items() if each.keys_of is not None
    }
    changes = [0] * (spec.num_layers + 1)
    for layer, last in last_uses.items():
        changes[layer + 1] += 1
        changes[last + 1] -= 1
    return tuple(accumulate(changes[:-1])) if last_uses else ()


def attended_heads(mixer: Mixer) -> int:
    """Query heads of each unit that attend to earlier tokens; 0 for other mixers."""
    return mixer.num_heads // mixer.num_units if isinstance(mixer, Attention) else 0


def _cut_by_columns(spec: ModelSpec) -> set[str]:
    """Roles of feed-forward matrices that are divided by columns."""
    return {
        role
        for kind in spec.kinds
        for matrix in kind.feed_forward.matrices("", spec.hidden_size, range(1))
        if len(matrix.columns) == 1 < spec.hidden_size
        for role, _rows in matrix.parts
    }
