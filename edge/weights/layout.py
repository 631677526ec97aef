"""The slices of weights that one shard holds, and how they are fused.

Pure: maps a model, a stage and a rank to names and ranges. The coordinator reads by it and the back
end builds by it, so both agree on every shape without messages about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge.models.attention import Attention
from edge.models.experts import Experts
from edge.models.parts import MatrixSlice, Part, VectorSlice, layer_number, whole_vector
from edge.models.rotary import Rotary
from edge.models.spec import FeedForward, Mixer, ModelSpec, WithState
from edge.partition import LayerSlice, Plan, Shard, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayer:
    """A shard's part of a layer, in local sizes; None for a part without units."""

    mixer: Mixer | None
    feed_forward: FeedForward | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """One device's slice of a stage, in local sizes and in slices of the checkpoint."""

    layers: range
    kinds: tuple[int, ...]
    """The kind of each layer, as in ModelSpec."""
    local: tuple[LocalLayer, ...]
    """The shard's part of each kind of layer of the model."""
    hidden_size: int
    vocab: range
    is_first_stage: bool
    is_last_stage: bool
    is_split: bool
    """Whether the stage has other shards, over which results are summed."""
    matrices: tuple[MatrixSlice, ...]
    vectors: tuple[VectorSlice, ...]
    embedding: range
    """Rows of the embedding that this shard has, in the checkpoint's own type."""
    token_tables: tuple[range, ...]
    """Rows of each table of token inputs. The tables stay on disk. A shard with them has the whole
    embedding, too."""
    token_columns: range
    """Columns of these tables for the stage's layers."""
    cache_layers: tuple[int, ...]
    """The layer whose keys and values each layer uses: itself, or an earlier one of the stage."""
    kept_before: tuple[int, ...]
    """Layers of earlier stages whose input this stage or a later one needs."""
    kept_behind: tuple[int, ...]
    """Layers up to this stage whose input a later stage needs."""
    streamed_layers: int
    """Number of layers whose matrices are read from disk for each step."""
    kept_experts: int = 0
    """Number of experts of these layers that stay in memory."""
    of_experts: bool = False
    """Whether the model has layers with experts, here or on other shards."""

    @property
    def num_weights(self) -> int:
        """Weights of the matrices, which a decode step reads."""
        return sum(matrix.num_rows * len(matrix.columns) for matrix in self.matrices)

    @property
    def attentions(self) -> dict[int, Attention]:
        """Attention layers of which the shard has units; each uses a KV cache."""
        local = {layer: self.layer(layer).mixer for layer in self.layers}
        return {layer: each for layer, each in local.items() if isinstance(each, Attention)}

    @property
    def caches(self) -> dict[int, Attention]:
        """Attention layers with their own KV cache, which later layers may use, too."""
        found = self.attentions.items()
        return {layer: each for layer, each in found if self.cache_layer(layer) == layer}

    def cache_layer(self, layer: int) -> int:
        """The layer whose KV cache this layer uses."""
        return self.cache_layers[layer - self.layers.start]

    @property
    def sums_embedding(self) -> bool:
        """Whether shards have parts of the embedding, and sum its rows."""
        return self.is_first_stage and self.is_split and not self.token_columns

    @property
    def states(self) -> dict[int, WithState]:
        """Layers with states in place of a KV cache, of which the shard has units."""
        local = {layer: self.layer(layer).mixer for layer in self.layers}
        return {layer: each for layer, each in local.items() if isinstance(each, WithState)}

    @property
    def first_of_kind(self) -> tuple[int, ...]:
        """The first layer of each kind in the shard, in order."""
        firsts: dict[int, int] = {}
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            firsts.setdefault(kind, layer)
        return tuple(firsts.values())

    @property
    def rotations(self) -> tuple[Rotary, ...]:
        """The different rotary embeddings of the layers, without empty ones."""
        rotations = dict.fromkeys(each.rotary for each in self.attentions.values())
        return tuple(each for each in rotations if each.turned_elements)

    def streaming(self, layers: int) -> ShardLayout:
        """The layout with `layers` layers on disk; see `Shard.streaming`."""
        if layers == self.streamed_layers:
            return self
        return replace(self, streamed_layers=layers, kept_experts=0)

    def kind(self, layer: int) -> int:
        """The kind of a layer, by its number in the model."""
        return self.kinds[layer - self.layers.start]

    def layer(self, layer: int) -> LocalLayer:
        return self.local[self.kind(layer)]

    def matrix(self, name: str) -> MatrixSlice:
        return next(m for m in self.matrices if m.name == name)


def looks_up_pictures(layout: ShardLayout, rank: int) -> bool:
    """Whether a shard of this rank gets the rows of pictures: where shards sum their parts of the
    embedding, the first one alone."""
    return layout.is_first_stage and (not rank or not layout.sums_embedding)


def gets_pictures(spec: ModelSpec, layout: ShardLayout, rank: int) -> bool:
    """Whether a shard of this rank is sent the rows of pictures: it looks them up, or adds further
    ones behind its layers."""
    return looks_up_pictures(layout, rank) or bool(spec.of_pictures(layout.layers))


def shard_layout(spec: ModelSpec, plan: Plan, *, stage: int, rank: int) -> ShardLayout:
    """The layout of shard `rank` of stage `stage`."""
    this = plan.stages[stage]
    shard = this.slices[rank]
    first, last = stage == 0, stage == len(plan.stages) - 1
    hidden_size = spec.hidden_size
    cuts = [_cut(this.slices, rank, kind) for kind in range(len(spec.kinds))]
    matrices: list[MatrixSlice] = []
    vectors: list[VectorSlice] = []
    for number in this.layers:
        layer, prefix = spec.layer(number), f"layers.{number}."
        parts: tuple[Part, Part] = (layer.mixer, _held(layer.feed_forward, this, rank, number))
        for part, (units, is_first) in zip(parts, cuts[spec.layers[number]], strict=True):
            matrices += (
                replace(each, grade=_grade(spec, each, usual=layer.grade))
                for each in part.matrices(prefix, hidden_size, units)
            )
            vectors += part.vectors(prefix, hidden_size, units, is_first=is_first)
    is_first_of_tokens = shard.vocab and not any(each.vocab for each in this.slices[:rank])
    if first and spec.learned_positions and is_first_of_tokens:
        rows = (("positions", range(spec.context_tokens)),)
        vectors.append(VectorSlice(name="positions", parts=rows, row_size=hidden_size))
    if first and spec.joins_states:
        vectors += (whole_vector(name, hidden_size) for name in ("embedding_norm", "state_norm"))
        rows = (("input_projection", range(hidden_size)),)
        columns = range(2 * hidden_size)
        matrices.append(MatrixSlice(name="input_projection", parts=rows, columns=columns))
    if last and shard.vocab:
        vectors.append(whole_vector("final_norm", hidden_size))
        if spec.norm_bias:
            vectors.append(whole_vector("final_norm_bias", hidden_size))
        columns = range(hidden_size)
        matrices.append(MatrixSlice(name="head", parts=(("head", shard.vocab),), columns=columns))
    return ShardLayout(
        layers=this.layers,
        kinds=spec.layers[this.layers.start : this.layers.stop],
        local=tuple(
            LocalLayer(
                mixer=kind.mixer.of_units(shard.slice(number).heads),
                feed_forward=_held(kind.feed_forward, this, rank).of_units(
                    shard.slice(number).ffn_columns
                ),
            )
            for number, kind in enumerate(spec.kinds)
        ),
        hidden_size=hidden_size,
        vocab=shard.vocab if last else range(0),
        is_first_stage=first,
        is_last_stage=last,
        is_split=len(this.shards) > 1,
        matrices=tuple(matrices),
        vectors=tuple(vectors),
        embedding=_embedding(spec, shard.vocab if first else range(0)),
        token_tables=_tables(spec, len(this.layers)),
        token_columns=range(
            this.layers.start * spec.token_inputs, this.layers.stop * spec.token_inputs
        ),
        cache_layers=tuple(_cache_layer(spec, this.layers, shard, each) for each in this.layers),
        kept_before=spec.kept(this.layers.start),
        kept_behind=spec.kept(this.layers.stop),
        streamed_layers=shard.streamed_layers,
        kept_experts=shard.kept_experts,
        of_experts=spec.has_experts,
    )


def token_table(number: int) -> str:
    """Name of one of the `token_tables` in a shard's file."""
    return f"token_table.{number}"


_MOST_NUMBERS_OF_A_TABLE = 1 << 24
"""Most values of a token table, to limit memory for reading or sending one: 32 MiB in 16 bits."""


def _tables(spec: ModelSpec, layers: int) -> tuple[range, ...]:
    columns = layers * spec.token_inputs
    if not columns:
        return ()
    step, count = max(1, _MOST_NUMBERS_OF_A_TABLE // columns), spec.vocab_size
    return tuple(range(start, min(start + step, count)) for start in range(0, count, step))


def _embedding(spec: ModelSpec, rows: range) -> range:
    """Rows of the embedding for a shard with this part: all if the model has token inputs."""
    return range(spec.vocab_size) if spec.token_inputs else rows


def _grade(spec: ModelSpec, matrix: MatrixSlice, *, usual: int) -> int:
    """Grade of the layer to which a matrix belongs, which may not be the layer that uses it."""
    role = matrix.parts[0][0]
    return spec.layer(layer_number(role)).grade if role.startswith("layers.") else usual


def _cache_layer(spec: ModelSpec, stage: range, shard: Shard, layer: int) -> int:
    """The first layer of the stage with the same keys and values of the same heads. A layer that
    keeps the newest tokens only has its own, because each computation moves the rows."""

    own = spec.layer(layer).mixer
    if not isinstance(own, Attention) or own.keys_of is None or own.kept_tokens is not None:
        return layer

    def heads(number: int) -> range:
        return shard.slice(spec.layers[number]).heads

    for each in range(stage.start, layer):
        mixer = spec.layer(each).mixer
        others = mixer.keys_of if isinstance(mixer, Attention) else None
        if own.keys_of in (each, others) and heads(each) == heads(layer):
            return each
    return layer


def whole_layout(spec: ModelSpec) -> ShardLayout:
    """Layout of one device with the whole model."""
    slices = [
        LayerSlice(heads=range(kind.mixer.num_units), ffn_columns=range(kind.feed_forward.columns))
        for kind in spec.kinds
    ]
    shard = Shard.of_slices("a", slices, vocab=range(spec.vocab_size))
    stage = Stage(layers=range(spec.num_layers), shards=(shard,))
    plan = Plan(model="whole", version=0, stages=(stage,))
    return shard_layout(spec, plan, stage=0, rank=0)


def _held(part: FeedForward, stage: Stage, rank: int, layer: int | None = None) -> FeedForward:
    """The shard's feed-forward block, if experts are whole: in the order of the stage's shards.
    Without a layer only sizes are right, which are equal in all layers."""
    shard = stage.slices[rank]
    if not isinstance(part, Experts) or not shard.whole_experts:
        return part
    first = sum(each.whole_experts for each in stage.slices[:rank])
    order: list[int] = []
    if layer is not None:
        index = layer - stage.layers.start
        order += (number for each in stage.slices if each.experts for number in each.experts[index])
    return part.whole(range(first, first + shard.whole_experts), order)


_Units = tuple[range, bool]
"""A shard's units of a part, and whether it is the first shard of its stage with any."""


def _cut(shards: Sequence[Shard], rank: int, kind: int) -> tuple[_Units, _Units]:
    """The shard's units of mixer and feed-forward block in layers of this kind."""
    slices = [shard.slice(kind) for shard in shards]
    own, before = slices[rank], slices[:rank]
    return (
        (own.heads, not any(each.heads for each in before)),
        (own.ffn_columns, not any(each.ffn_columns for each in before)),
    )
