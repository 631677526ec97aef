"""A model as data: the operators and sizes of its layers.

Knows no file names, no split and no back end. It is sent to peers as JSON, so peers know operators,
but no families.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edge.errors import shown
from edge.models.attention import Attention
from edge.models.experts import Experts
from edge.models.gated_mlp import GatedMlp
from edge.models.linear_attention import LinearAttention
from edge.models.parts import check_flags, check_sizes, exact_fields, finite
from edge.models.plain_mlp import PlainMlp
from edge.models.short_convolution import ShortConvolution

MAX_LAYERS = 4096
MAX_KV_HEADS = 1 << 16
"""Most KV heads in all layers: a layout has slices of each. 126 layers of 128 are 16 thousand."""
MAX_EXPERTS_IN_ALL = 1 << 16
"""Most experts in all layers: each is listed with its own weights. 60 layers of 512 are 31
thousand."""
MAX_PICTURE_LAYERS = 16
_LONGEST_FAMILY = 100
MAX_KINDS = 64
"""Most kinds of layers in one model."""

WithState = LinearAttention | ShortConvolution
"""The mixers with a state per request in place of a KV cache."""
Mixer = Attention | WithState
"""The half of a layer that reads other tokens. A further kind is a class with the methods of
`Part`, named here."""
FeedForward = GatedMlp | PlainMlp | Experts
"""The half of a layer that does not read other tokens."""

_MIXERS: Mapping[str, type[Mixer]] = {
    kind.kind: kind for kind in (Attention, LinearAttention, ShortConvolution)
}
_FEED_FORWARDS: Mapping[str, type[FeedForward]] = {
    kind.kind: kind for kind in (GatedMlp, PlainMlp, Experts)
}

_OF_ATTENTION = {
    "gates of attention": "output_gate",
    "attention sinks": "has_sinks",
    "norms of values": "value_norm",
    "norms with biases": "norm_bias",
    "latent attention": "latent",
}
_SCALED = "scaled layers"
_OWN_INPUTS = "inputs of each layer by token"
_SHARED_KEYS = "keys of another layer"
_POSITIONS = "learned positions"
_APART = "experts with norms of their own"
FURTHER_HEAD = "a further head"
ALL_NEEDS = frozenset(
    (
        *(*_MIXERS, *_FEED_FORWARDS, *_OF_ATTENTION),
        *(_SCALED, _POSITIONS, _OWN_INPUTS, _SHARED_KEYS, _APART, FURTHER_HEAD),
    )
)
"""All possible names in `ModelSpec.needs`."""

WEIGHTS_ON_DISK = "weights on disk"
"""What a device lacks that computes only from memory. No model needs it: a plan may."""

WINDOWED_KV = "windowed keys and values"
"""What a device lacks that keeps the keys and values of the whole context in layers with a sliding
window. No model needs it: a load may."""

PLACED_PICTURES = "pictures in their places"
"""What a device lacks that computes no rotary positions of several axes, and no rows that see each
other. No model needs it: the pictures of some do."""

ROUNDED_KV = "rounded keys and values"
"""What a device lacks that keeps them in float32 only. No model needs it: a load may."""

NIBBLE_KV = "keys and values in 4 bits"
"""What a device lacks that keeps them in float32 or 8 bits only. No model needs it: a load may."""

FILE_BLOCKS = "blocks of files"
"""What a device lacks that packs the weights of GGUF files for its own kernels. No model needs it:
a weight format may."""

TILED_ATTENTION = "attention in tiles"
"""What a device lacks that holds the scores of a step's attention over the whole context. No model
needs it."""

WINDOW_READS = "reads of windows alone"
"""What a device lacks that reads all tokens it keeps in layers with a window. No model needs
it."""

TABLES = frozenset(("embedding", "token_table"))
"""The roles of lookup tables, which are not multiplied."""

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A layer: two parts that in turn read the hidden state and add to it."""

    mixer: Mixer
    feed_forward: FeedForward
    grade: int = 0
    """The grade of its weight format. A format may be finer in some layers; plans then count and
    split layers by grade."""

    def __post_init__(self) -> None:
        if type(self.grade) is not int or not 0 <= self.grade < MAX_KINDS:
            raise ValueError(f"a layer's grade must be 0 to {MAX_KINDS - 1}")

    @property
    def parts(self) -> tuple[Mixer, FeedForward]:
        return self.mixer, self.feed_forward

    def to_json(self) -> dict[str, Any]:
        parts = (("mixer", self.mixer), ("feed_forward", self.feed_forward))
        told = {name: {"kind": part.kind, **dataclasses.asdict(part)} for name, part in parts}
        return {**told, "grade": self.grade}

    @classmethod
    def from_json(cls, value: object) -> LayerSpec:
        fields = exact_fields(cls, value)
        return cls(
            mixer=_part(_MIXERS, fields["mixer"]),
            feed_forward=_part(_FEED_FORWARDS, fields["feed_forward"]),
            grade=fields["grade"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder. Most models have one kind of layer, some a few."""

    family: str
    hidden_size: int
    vocab_size: int
    context_tokens: int
    """The longest context that the model was trained for."""
    norm_epsilon: float
    tied_embeddings: bool
    embedding_scale: float = 1.0
    """The scale of the embedding's rows."""
    learned_positions: bool = False
    """Learned positions: a row per position is added to the token's."""
    norm_bias: bool = False
    """The last norm is a LayerNorm with a bias."""
    logit_scale: float = 1.0
    """The scale of logits."""
    logit_soft_cap: float | None = None
    """Logits x then become soft_cap · tanh(x / soft_cap); None: unchanged."""
    has_further_head: bool = False
    """The sampler computes a further head, too, to guess tokens: see `further_head.py`."""
    picture_layers: int = 0
    """Behind each of the first N layers, the hidden state of a picture's row gets a further row of
    the tower added (DeepStack: Meng et al., 2024)."""
    joins_states: bool = False
    """It is a further head: the input of its first layer is a product with the embedding's row and
    a hidden state from outside, each normed, side by side."""
    kinds: tuple[LayerSpec, ...]
    """The different kinds of layers, in order of their first layer; `by_kind` makes them."""
    layers: tuple[int, ...]
    """The index of each layer's kind."""

    def __post_init__(self) -> None:
        check_sizes(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            context_tokens=self.context_tokens,
        )
        check_flags(
            tied_embeddings=self.tied_embeddings,
            learned_positions=self.learned_positions,
            norm_bias=self.norm_bias,
            has_further_head=self.has_further_head,
            joins_states=self.joins_states,
        )
        if not isinstance(self.family, str) or not 0 < len(self.family) <= _LONGEST_FAMILY:
            raise ValueError(f"a family must have a short name, not {shown(self.family)}")
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"a model has 1 to {MAX_LAYERS} layers, not {len(self.layers)}")
        if not 0 < len(self.kinds) <= MAX_KINDS:
            raise ValueError(f"a model has 1 to {MAX_KINDS} kinds of layers")
        if any(type(kind) is not int for kind in self.layers) or list(
            dict.fromkeys(self.layers)
        ) != list(range(len(self.kinds))):
            raise ValueError("layers must name every kind, in the order of the kinds at first")
        if len(set(self.kinds)) != len(self.kinds):
            raise ValueError("two kinds of layers are the same")
        if not any(isinstance(kind.mixer, Attention) for kind in self.kinds):
            raise ValueError("a model without attention in any layer is not computed")
        if type(self.picture_layers) is not int or not (
            0 <= self.picture_layers <= min(self.num_layers, MAX_PICTURE_LAYERS)
        ):
            raise ValueError(f"picture_layers must be 0 to {MAX_PICTURE_LAYERS} of the layers")
        if type(self.norm_epsilon) is not float or not 0.0 <= self.norm_epsilon < 1.0:
            raise ValueError(f"norm_epsilon must lie in 0..1, not {shown(self.norm_epsilon)}")
        for name in ("embedding_scale", "logit_scale", "logit_soft_cap"):
            value = getattr(self, name)
            if (value is not None or name != "logit_soft_cap") and not finite(value) > 0:
                raise ValueError(f"{name} must be above 0, not {shown(value)}")
        if sum(each.num_kv_heads for each in self.attentions.values()) > MAX_KV_HEADS:
            raise ValueError(f"a model has at most {MAX_KV_HEADS} KV heads in all its layers")
        self._check_keys()
        blocks = [self.layer(number).feed_forward for number in range(self.num_layers)]
        if (
            len({block.token_inputs if isinstance(block, GatedMlp) else None for block in blocks})
            > 1
        ):
            raise ValueError("layers must have as many inputs of each token as each other")
        experts = sum(block.num_experts for block in blocks if isinstance(block, Experts))
        if experts > MAX_EXPERTS_IN_ALL:
            raise ValueError(f"a model has at most {MAX_EXPERTS_IN_ALL} experts in all its layers")

    def _check_keys(self) -> None:
        """Raises ValueError if a layer cannot share the keys of the layer that it names."""
        attentions = self.attentions
        for number, each in attentions.items():
            if each.keys_of is None:
                continue
            other = attentions.get(each.keys_of)
            if other is None or each.keys_of >= number or other.keys_of is not None:
                raise ValueError(f"layer {number} has keys of layer {each.keys_of}")
            if not other.has_norm or other.norm_bias or other.qkv_bias or other.latent is not None:
                raise ValueError(f"layer {number} has keys that cannot be made once more")
            for name in (
                *("num_heads", "num_kv_heads", "head_size", "rotary"),
                *("window", "kept_tokens"),
            ):
                if getattr(each, name) != getattr(other, name):
                    raise ValueError(f"layer {number} has keys of a layer with another {name}")
            for name in ("query_key_norm", "value_norm", "keys_are_values"):
                if getattr(each, name) != getattr(other, name):
                    raise ValueError(f"layer {number} has keys of a layer with another {name}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def token_inputs(self) -> int:
        """The size of the inputs per layer and token; 0: none."""
        block = self.kinds[0].feed_forward
        return (block.token_inputs or 0) if isinstance(block, GatedMlp) else 0

    def of_pictures(self, layers: range) -> range:
        """Those of these layers behind which something is added to rows of pictures."""
        return range(layers.start, max(layers.start, min(layers.stop, self.picture_layers)))

    def kept(self, layer: int) -> tuple[int, ...]:
        """The earlier layers whose input this or a later layer needs again, in order."""
        found = {
            each.keys_of
            for number, each in self.attentions.items()
            if number >= layer and each.keys_of is not None and each.keys_of < layer
        }
        return tuple(sorted(found))

    @property
    def lenders(self) -> frozenset[int]:
        """The layers whose input later ones need again."""
        mixers = (kind.mixer for kind in self.kinds)
        found = (each.keys_of for each in mixers if isinstance(each, Attention))
        return frozenset(each for each in found if each is not None)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(kind.feed_forward, Experts) for kind in self.kinds)

    @property
    def partial_parts(self) -> int:
        """The width of the widest sum over a stage's shards, in hidden states."""
        blocks = (kind.feed_forward for kind in self.kinds)
        return 1 + any(isinstance(each, Experts) and each.is_apart for each in blocks)

    @property
    def attentions(self) -> dict[int, Attention]:
        """The experts by layer, for layers that have some."""
        mixers = {number: self.layer(number).mixer for number in range(self.num_layers)}
        return {number: each for number, each in mixers.items() if isinstance(each, Attention)}

    @property
    def attention(self) -> Attention:
        """The experts of the first layer that has some."""
        return next(iter(self.attentions.values()))

    @property
    def is_latent(self) -> bool:
        """Whether layers have latent attention, whose rows are kept in float32 only."""
        return any(each.latent is not None for each in self.attentions.values())

    @property
    def needs(self) -> tuple[str, ...]:
        """The features that a back end must have kernels for: kinds of parts, and variants."""
        attentions = self.attentions.values()
        found = [
            name
            for name, has in _OF_ATTENTION.items()
            if any(getattr(each, has) for each in attentions)
        ]
        blocks = [kind.feed_forward for kind in self.kinds]
        if any(isinstance(each, GatedMlp | Experts) and each.has_scale for each in blocks):
            found.append(_SCALED)
        if any(isinstance(each, Experts) and each.is_apart for each in blocks):
            found.append(_APART)
        if self.learned_positions:
            found.append(_POSITIONS)
        if self.token_inputs:
            found.append(_OWN_INPUTS)
        if any(each.keys_of is not None for each in attentions):
            found.append(_SHARED_KEYS)
        if self.has_further_head:
            found.append(FURTHER_HEAD)
        return *sorted({part.kind for kind in self.kinds for part in kind.parts}), *found

    @property
    def has_states(self) -> bool:
        """Whether requests have states, which cannot be cut at any token like a KV cache."""
        return any(isinstance(kind.mixer, WithState) for kind in self.kinds)

    def layer(self, number: int) -> LayerSpec:
        return self.kinds[self.layers[number]]

    def to_json(self) -> dict[str, Any]:
        """The model as JSON, each kind of layer once."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "kinds": [kind.to_json() for kind in self.kinds]}

    @classmethod
    def from_json(cls, value: object) -> ModelSpec:
        """A model from JSON. Raises ValueError for a value that `to_json` cannot write."""
        fields = dict(exact_fields(cls, value))
        for name, most in (("kinds", MAX_KINDS), ("layers", MAX_LAYERS)):
            if not isinstance(fields[name], list | tuple) or len(fields[name]) > most:
                raise ValueError(f"{name} of a model must be a list of at most {most}")
        fields["norm_epsilon"] = finite(fields["norm_epsilon"])
        kinds = tuple(map(LayerSpec.from_json, fields.pop("kinds")))
        return cls(**{**fields, "layers": tuple(fields["layers"])}, kinds=kinds)


def by_kind(layers: Sequence[LayerSpec]) -> dict[str, Any]:
    """`kinds` and `layers` of a ModelSpec with these layers."""
    numbers: dict[LayerSpec, int] = {}
    for layer in layers:
        numbers.setdefault(layer, len(numbers))
    return {"kinds": tuple(numbers), "layers": tuple(numbers[layer] for layer in layers)}


def graded(spec: ModelSpec, grades: Sequence[int]) -> ModelSpec:
    """The model with these grades of its layers."""
    layers = [
        dataclasses.replace(spec.layer(number), grade=grade) for number, grade in enumerate(grades)
    ]
    return dataclasses.replace(spec, **by_kind(layers))


def keeping_windows(spec: ModelSpec, kept: Callable[[Attention], int | None]) -> ModelSpec:
    """The model whose layers with a sliding window keep so many tokens; None: all."""

    def of_kind(kind: LayerSpec) -> LayerSpec:
        mixer = kind.mixer
        if not isinstance(mixer, Attention) or mixer.window is None:
            return kind
        return dataclasses.replace(kind, mixer=dataclasses.replace(mixer, kept_tokens=kept(mixer)))

    return dataclasses.replace(spec, kinds=tuple(map(of_kind, spec.kinds)))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight of the model by role, with its shape; matrices are [outputs, inputs].

    Roles are `embedding`, `positions`, `token_table`, `token_projection`, `token_norm`,
    `embedding_norm`, `state_norm`, `input_projection`, `final_norm`, `final_norm_bias`, `head`, and
    `layers.N.` followed by those of the layer's mixer and feed-forward block.
    """
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, spec.hidden_size)}
    of_kind = [
        kind.mixer.shapes(spec.hidden_size) | kind.feed_forward.shapes(spec.hidden_size)
        for kind in spec.kinds
    ]
    for number, kind in enumerate(spec.layers):
        shapes |= {f"layers.{number}.{role}": shape for role, shape in of_kind[kind].items()}
    if spec.learned_positions:
        shapes["positions"] = (spec.context_tokens, spec.hidden_size)
    if spec.token_inputs:
        columns = spec.num_layers * spec.token_inputs
        shapes["token_table"] = (spec.vocab_size, columns)
        shapes["token_projection"] = (columns, spec.hidden_size)
        shapes["token_norm"] = (spec.token_inputs,)
    if spec.joins_states:
        shapes["embedding_norm"] = shapes["state_norm"] = (spec.hidden_size,)
        shapes["input_projection"] = (spec.hidden_size, 2 * spec.hidden_size)
    shapes["final_norm"] = (spec.hidden_size,)
    if spec.norm_bias:
        shapes["final_norm_bias"] = (spec.hidden_size,)
    shapes["head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _part(kinds: Mapping[str, type[_Kind]], value: object) -> _Kind:
    name = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"a layer has a part of kind {shown(name)}; known are {', '.join(kinds)}")
    fields = dict(exact_fields(kinds[name], value, "kind"))
    del fields["kind"]
    return kinds[name](**fields)
