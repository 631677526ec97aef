"""Descriptions of Llama-like decoders, whose families share most fields of config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as shown
from typing import Any

from edge.kernels.activation.reference import Activation
from edge.models.attention import Attention
from edge.models.config import Config
from edge.models.families import PICTURE_LAYERS
from edge.models.gated_mlp import GatedMlp
from edge.models.rope import read_rotary
from edge.models.rotary import NO_ROTARY, Rotary
from edge.models.spec import MAX_LAYERS, FeedForward, LayerSpec, Mixer, ModelSpec, by_kind

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations by their names in files."""

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def decoder(
    config: Config,
    *,
    family: str,
    head_size: int | None = None,
    windows: Sequence[int | None] | None = None,
    rotaries: Sequence[Rotary] | None = None,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    mlp_bias: bool | None = None,
    mixer: Mapping[str, Any] | None = None,
    mixers: Sequence[Mixer | None] | None = None,
    feed_forward: Mapping[str, Any] | None = None,
    feed_forwards: Sequence[FeedForward | None] | None = None,
    model: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """A Llama-like decoder.

    head_size: the family's default; None: the hidden size divided by the heads. windows, rotaries:
    of each layer. mixers, feed_forwards: of each layer; None for Llama's part. Biases that are None
    are read from the file. mixer, feed_forward, model: fields that differ from Llama's.
    """
    count = num_layers(config)
    num_heads = config.size("num_attention_heads")
    hidden_size = config.size("hidden_size")
    head_size = head_size_of(config, head_size)
    if rotaries is None:
        rotaries = (read_rotary(config, head_size),) * count
    attention_bias = config.flag("attention_bias", False)
    own_mlp_bias = config.flag("mlp_bias", False)
    facts: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": config.size("num_key_value_heads", num_heads),
        "head_size": head_size,
        "rotary": NO_ROTARY,
        "window": None,
        "qkv_bias": attention_bias if qkv_bias is None else qkv_bias,
        "output_bias": attention_bias if output_bias is None else output_bias,
        "query_key_norm": False,
        **(mixer or {}),
    }
    attention = Attention(**facts)
    facts = {
        "columns": config.size("intermediate_size"),
        "activation": None,
        "bias": own_mlp_bias if mlp_bias is None else mlp_bias,
        **(feed_forward or {}),
    }
    if facts["activation"] is None:
        facts["activation"] = activation(config)
    mlp = GatedMlp(**facts)
    none = (None,) * count
    each = zip(windows or none, rotaries, mixers or none, feed_forwards or none, strict=True)
    layers: dict[tuple[int | None, Rotary, Mixer | None, FeedForward | None], LayerSpec] = {}
    kinds = list(each)
    for window, rotary, other, block in dict.fromkeys(kinds):
        layers[window, rotary, other, block] = LayerSpec(
            mixer=other or replace(attention, window=window, rotary=rotary),
            feed_forward=block or mlp,
        )
    facts = {
        "family": family,
        "hidden_size": hidden_size,
        "vocab_size": config.size("vocab_size"),
        "context_tokens": config.size("max_position_embeddings", 2048),
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "picture_layers": config.values.get(PICTURE_LAYERS, 0),
        **(model or {}),
    }
    return ModelSpec(**facts, **by_kind([layers[kind] for kind in kinds]))


def activation(config: Config, field: str = "hidden_act", usual: str = "silu") -> Activation:
    name = config.values.get(field)
    name = usual if name is None else name
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise config.error(f"{field} {shown(name)} is not supported; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def head_size_of(config: Config, usual: int | None = None) -> int:
    """The size of a head; the default is `usual`, else the hidden size divided by the heads."""
    shared = config.size("hidden_size") // config.size("num_attention_heads")
    return config.size("head_dim", usual or shared)


def num_layers(config: Config) -> int:
    return config.size("num_hidden_layers", most=MAX_LAYERS)


def one_window(config: Config) -> Sequence[int | None] | None:
    """The windows of families with the same one for every layer, or none."""
    if config.values.get("sliding_window") is None:
        return None
    return (config.integer("sliding_window"),) * num_layers(config)


def layer_kinds(config: Config, *, usual: Sequence[str]) -> Sequence[str]:
    """LOCAL or GLOBAL for each layer; `usual` without `layer_types` in the file."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return usual
    known = (GLOBAL, LOCAL)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers(config)
        or any(not isinstance(kind, str) or kind not in known for kind in kinds)
    ):
        raise config.error(f"layer_types must name one of {list(known)} for each layer")
    return kinds


def layer_windows(
    config: Config, kinds: Sequence[str], *, usual: int | None = None
) -> Sequence[int | None]:
    """The windows of layers of these kinds; `usual` is the default length."""
    if LOCAL not in kinds:
        return (None,) * len(kinds)
    window = (
        config.integer("sliding_window")
        if usual is None
        else config.integer("sliding_window", usual)
    )
    return tuple(window if kind == LOCAL else None for kind in kinds)


def switched_windows(config: Config) -> Sequence[int | None]:
    """The windows of families with a switch for them and a first layer with one."""
    count = num_layers(config)
    if not config.flag("use_sliding_window", False):
        return (None,) * count
    first = count
    if config.values.get("layer_types") is None:
        first = config.integer("max_window_layers", count)
    usual = [LOCAL if number >= first else GLOBAL for number in range(count)]
    return layer_windows(config, layer_kinds(config, usual=usual))
