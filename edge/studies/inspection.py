"""A description of a checkpoint and its memory, from its header alone. Pure.

It has no speeds: `edge plan` measures them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.host.free_memory import format_size
from edge.memory.baseline import USUAL_BASELINE_BYTES
from edge.memory.model_sizes import model_facts
from edge.memory.shard_memory import most_overhead
from edge.memory.windows import with_windows
from edge.models.attention import Attention
from edge.models.linear_attention import LinearAttention
from edge.models.spec import MAX_LAYERS, Mixer, ModelSpec, tensor_shapes
from edge.models.unchecked_config import Claims, Rope
from edge.partition import ModelFacts
from edge.planning.load_options import LoadOptions
from edge.protocol.step import StepLimits
from edge.text.tokenizer_facts import TokenizerFacts
from edge.weights.format_sizes import bytes_per_weight, in_words
from edge.weights.formats import DTYPES, KV_DTYPES, Dtype, KvDtype, weight_format
from edge.weights.header import Form, Header, StoredTensor

MAX_STORED_TYPES = 64
"""Most types of tensors that are listed; files have one to six."""
MAX_TEMPLATES = 32
MAX_TEMPLATE_CHARACTERS = 1 << 20
"""Most characters of a listed template; longer ones are not run either."""
_CODES = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})
"""Number types in safetensors that may pack several weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of one kind. None: the header does not say."""

    layers: tuple[int, ...]
    """The indices of the layers."""
    num_heads: int | None
    """Query heads; for linear attention, value heads."""
    num_kv_heads: int | None
    """For linear attention, key heads."""
    head_size: int | None
    ffn_columns: int | None
    """Width of the feed-forward block."""
    window: int | None
    """The sliding window in tokens; None: full attention."""
    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool | None
    query_key_norm: bool | None
    """Whether each head of query and key is normed."""
    is_linear: bool = False
    """Linear attention or a convolution: a state of fixed size in place of a KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredType:
    """The tensors of one type in the files."""

    type: str
    """The files' name of the type: BF16, Q4_K."""
    tensors: int
    weights: int
    """The count of the tensors' numbers; several weights packed in a number count as one."""
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAs:
    """The weights in one --dtype, all on one device."""

    dtype: Dtype
    """The value of --dtype."""
    format: str
    """The format that it stands for: "auto" is one of the others, or "as stored"."""
    words: str
    """The formats of the weights, in words."""
    bytes_per_weight: float
    """Bytes per weight, as stored and sent, of the matrices that every token is multiplied with,
    scales included."""
    weight_bytes: int
    """Bytes in memory, packed for the kernels of a CPU, with the table of embeddings."""
    total_bytes: int
    """Bytes with the KV cache of the default context, the buffers of a step, and the daemon."""
    fits: bool
    """Whether this machine has the memory now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFacts:
    """The size of the KV cache in one --kv-dtype, for all layers."""

    dtype: KvDtype
    token_bytes: int
    default_bytes: int
    """Bytes for the default context."""
    longest_bytes: int
    """Bytes for the longest context that the model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The facts of a checkpoint by its header. None: the header does not say, or not known."""

    name: str
    path: Path
    form: Form
    problem: str | None
    """Why Edge does not run it, and what to do; None: it runs."""
    family: str | None
    parameters: int | None
    hidden_size: int | None
    vocab_size: int | None
    context_tokens: int | None
    """Most tokens of a prompt and its answer together."""
    default_context_tokens: int | None
    """The default of --context."""
    norm_epsilon: float | None
    tied_embeddings: bool | None
    """Whether the head is the table of embeddings."""
    num_experts: int | None
    quantized_by: str | None
    """The method by which a folder's weights were quantized."""
    rope: Rope | None
    note: str
    """Notes for the user; empty for most models."""
    layers: tuple[LayerKind, ...]
    """The kinds of layers, in order of their first layer."""
    num_files: int
    """The number of files with weights; 0: none could be read."""
    stored: tuple[StoredType, ...]
    """The types of stored tensors, most bytes first."""
    held: tuple[HeldAs, ...]
    """The model in each --dtype; empty: it does not run."""
    kv: tuple[KvFacts, ...]
    tokenizer: TokenizerFacts | None
    tokenizer_problem: str | None
    """Why its tokenizer cannot be used, and what to do."""
    usable_bytes: int
    """The memory that a daemon would offer on this machine now."""

    def __repr__(self) -> str:
        what = self.family or self.form
        return f"<Inspection of {self.name}: {what}, {format_size(self.stored_bytes)} of weights>"

    @property
    def num_layers(self) -> int:
        return sum(len(kind.layers) for kind in self.layers)

    @property
    def stored_bytes(self) -> int:
        return sum(each.nbytes for each in self.stored)

    def to_json(self, *, template: bool = False) -> dict[str, Any]:
        """Built-in types only. With `template`, the texts of chat templates; else their lengths."""
        value = dataclasses.asdict(self)
        value["path"] = str(self.path)
        value["num_layers"] = self.num_layers
        value["stored_bytes"] = self.stored_bytes
        for kind, told in zip(self.layers, value["layers"], strict=True):
            told["layers"] = list(kind.layers)
        for each, told in zip(self.stored, value["stored"], strict=True):
            told["bits_per_weight"] = each.bits_per_weight
        if self.tokenizer is not None:
            tokenizer = value["tokenizer"]
            tokenizer["file"] = str(self.tokenizer.file)
            tokenizer["end_tokens"] = [
                {"id": number, "token": token}
                for number, token in self.tokenizer.end_tokens.items()
            ]
            tokenizer["chat_templates"] = {
                name: text if template else len(text)
                for name, text in self.tokenizer.chat_templates.items()
            }
        return {
            name: list(each) if isinstance(each, tuple) else each for name, each in value.items()
        }


def describe(header: Header, *, usable_bytes: int, packs_blocks: bool = False) -> Inspection:
    """Describes a header, for a machine with `usable_bytes` of memory for a daemon. packs_blocks:
    it lacks kernels for the blocks of files."""
    claims, spec = header.claims, header.spec
    options = LoadOptions(packs_blocks=packs_blocks)
    default_context = None if spec is None else options.limits(spec).context_tokens
    longest = claims.context_tokens if spec is None else spec.context_tokens
    return Inspection(
        name=header.name,
        path=header.path,
        form=header.form,
        problem=header.problem,
        family=claims.family if spec is None else spec.family,
        parameters=_parameters(header),
        hidden_size=claims.hidden_size if spec is None else spec.hidden_size,
        vocab_size=claims.vocab_size if spec is None else spec.vocab_size,
        context_tokens=longest,
        default_context_tokens=default_context,
        norm_epsilon=None if spec is None else spec.norm_epsilon,
        tied_embeddings=claims.tied_embeddings if spec is None else spec.tied_embeddings,
        num_experts=claims.num_experts,
        quantized_by=claims.quantized_by,
        rope=claims.rope,
        note=claims.note,
        layers=_claimed_layers(claims) if spec is None else _layers(spec),
        num_files=header.num_files,
        stored=_stored(header.tensors),
        held=_held(header, options, usable_bytes),
        kv=() if spec is None else tuple(_kv(spec, each, options) for each in _kv_dtypes(spec)),
        tokenizer=_tokenizer(header.tokenizer),
        tokenizer_problem=_tokenizer_problem(header),
        usable_bytes=usable_bytes,
    )


def _parameters(header: Header) -> int | None:
    """The number of parameters, of the model or else of the files' numbers."""
    if header.spec is not None:
        shapes = dict(tensor_shapes(header.spec))
        if header.spec.tied_embeddings:
            del shapes["head"]
        return sum(map(math.prod, shapes.values()))
    types = {each.type for each in header.tensors}
    if not types or types & _CODES:
        return None
    return sum(each.num_weights for each in header.tensors)


def _layers(spec: ModelSpec) -> tuple[LayerKind, ...]:
    found: list[list[int]] = [[] for _ in spec.kinds]
    for number, kind in enumerate(spec.layers):
        found[kind].append(number)
    return tuple(
        LayerKind(
            layers=tuple(numbers),
            ffn_columns=kind.feed_forward.columns,
            mlp_bias=kind.feed_forward.bias,
            **_mixer_facts(kind.mixer),
        )
        for kind, numbers in zip(spec.kinds, found, strict=True)
    )


def _mixer_facts(mixer: Mixer) -> dict[str, Any]:
    if isinstance(mixer, Attention):
        names = ("num_heads", "num_kv_heads", "head_size", "window", "qkv_bias", "output_bias")
        return {name: getattr(mixer, name) for name in (*names, "query_key_norm")}
    if isinstance(mixer, LinearAttention):
        heads, kv_heads, size = mixer.num_value_heads, mixer.num_key_heads, mixer.value_size
        window = None
    else:
        heads = kv_heads = mixer.num_units
        size, window = mixer.unit_channels, mixer.convolution
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": size,
        "window": window,
        "qkv_bias": False,
        "output_bias": False,
        "query_key_norm": False,
        "is_linear": True,
    }


def _claimed_layers(claims: Claims) -> tuple[LayerKind, ...]:
    """Layers of one kind, from an unchecked header."""
    if claims.num_layers is None:
        return ()
    return (
        LayerKind(
            layers=tuple(range(min(claims.num_layers, MAX_LAYERS))),
            num_heads=claims.num_heads,
            num_kv_heads=claims.num_kv_heads,
            head_size=claims.head_size,
            ffn_columns=claims.ffn_columns,
            window=claims.window,
            qkv_bias=None,
            output_bias=None,
            mlp_bias=None,
            query_key_norm=None,
        ),
    )


def _stored(tensors: Sequence[StoredTensor]) -> tuple[StoredType, ...]:
    count: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for each in tensors:
        count[each.type] += 1
        weights[each.type] += each.num_weights
        nbytes[each.type] += each.nbytes
    return tuple(
        StoredType(type=name, tensors=count[name], weights=weights[name], nbytes=size)
        for name, size in nbytes.most_common(MAX_STORED_TYPES)
    )


def _held(header: Header, options: LoadOptions, usable_bytes: int) -> tuple[HeldAs, ...]:
    spec, itemsize = header.spec, header.embedding_itemsize
    if spec is None or itemsize is None or header.problem is not None:
        return ()
    limits = options.limits(spec)
    beside_bytes = most_overhead(
        spec,
        limits,
        may_split=False,
        stream=False,
        kv_dtype=options.kv_dtype,
        has_tiles=not options.packs_blocks,  # one library has kernels for both
    )
    found: list[HeldAs] = []
    own = header.own_encoding
    for dtype in DTYPES:
        made = weight_format(spec, dtype, own=own, packs_blocks=options.packs_blocks)
        alike = next((each for each in found if each.format == made.name), None)
        if alike is not None:  # the format of "auto"
            found.append(dataclasses.replace(alike, dtype=dtype))
            continue
        facts = model_facts(
            with_windows(made.graded(spec), limits),
            made,
            name="model",
            embedding_itemsize=itemsize,
            kv_dtype=options.kv_dtype,
        )
        kv_bytes = _kv_bytes(facts, limits)
        total_bytes = _weight_bytes(facts) + kv_bytes + beside_bytes + USUAL_BASELINE_BYTES
        found.append(
            HeldAs(
                dtype=dtype,
                format=made.name,
                words=in_words(spec, made),
                bytes_per_weight=bytes_per_weight(spec, made),
                weight_bytes=_weight_bytes(facts),
                total_bytes=total_bytes,
                fits=total_bytes <= usable_bytes,
            )
        )
    return tuple(found)


def _weight_bytes(facts: ModelFacts) -> int:
    """Bytes of weights on a device that has all of them."""
    layers = sum(facts.kinds[kind].weight_bytes for kind in facts.layers)
    return layers + facts.vocab_size * (facts.embedding_row_bytes + facts.head_row_bytes)


def _token_bytes(facts: ModelFacts) -> int:
    return sum(facts.kinds[kind].token_bytes for kind in facts.layers)


def _kv_dtypes(spec: ModelSpec) -> tuple[KvDtype, ...]:
    return ("float32",) if spec.is_latent else KV_DTYPES


def _kv_bytes(facts: ModelFacts, limits: StepLimits) -> int:
    """Bytes of all keys and values on a device that has all layers."""
    kinds = [facts.kinds[kind] for kind in facts.layers]
    windows = sum(kind.num_kv_heads * kind.window_bytes for kind in kinds)
    return limits.cached_tokens * _token_bytes(facts) + limits.windows * windows


def _kv(spec: ModelSpec, dtype: KvDtype, options: LoadOptions) -> KvFacts:
    made = weight_format(spec, "float32")  # without the KV cache

    def nbytes(context_tokens: int | None) -> int:
        one = dataclasses.replace(
            options, context_tokens=context_tokens, concurrency=1, kv_dtype=dtype
        )
        limits = one.limits(spec)
        return _kv_bytes(facts_of(with_windows(spec, limits)), limits)

    def facts_of(spec: ModelSpec) -> ModelFacts:
        return model_facts(spec, made, name="model", embedding_itemsize=0, kv_dtype=dtype)

    return KvFacts(
        dtype=dtype,
        token_bytes=_token_bytes(facts_of(spec)),
        default_bytes=nbytes(options.context_tokens),
        longest_bytes=nbytes(spec.context_tokens),
    )


def _tokenizer(facts: TokenizerFacts | None) -> TokenizerFacts | None:
    """The facts with at most the listed number and length of templates."""
    if facts is None:
        return None
    templates: Mapping[str, str] = {
        name[:100]: text[:MAX_TEMPLATE_CHARACTERS]
        for name, text in list(facts.chat_templates.items())[:MAX_TEMPLATES]
    }
    return dataclasses.replace(facts, chat_templates=templates)


def _tokenizer_problem(header: Header) -> str | None:
    tokenizer, spec = header.tokenizer, header.spec
    if tokenizer is None or spec is None or tokenizer.vocab_size <= spec.vocab_size:
        return header.tokenizer_problem
    return (
        f"{tokenizer.file} has {tokenizer.vocab_size} tokens but the model only "
        f"{spec.vocab_size}: they belong to different checkpoints"
    )
