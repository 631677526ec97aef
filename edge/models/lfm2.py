"""LFM2: short gated convolutions in most layers, attention in the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edge.models.config import Config
from edge.models.decoder import GLOBAL, activation, decoder, head_size_of, num_layers
from edge.models.families import Family, llama_tensor_name
from edge.models.parts import MAX_SIZE
from edge.models.rope import read_rotary
from edge.models.short_convolution import ShortConvolution
from edge.models.spec import FeedForward, ModelSpec

_CONVOLUTION = "conv"
_MULTIPLIER = "block_ffn_dim_multiplier"
_USUAL = {"max_position_embeddings": 128_000, "num_key_value_heads": 8, "intermediate_size": 12288}
_NAMES = {
    "output": "self_attn.out_proj",
    "query_norm": "self_attn.q_layernorm.weight",
    "key_norm": "self_attn.k_layernorm.weight",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "attention_norm": "operator_norm.weight",
    "mlp_norm": "ffn_norm.weight",
}


def describe(config: Config) -> ModelSpec:
    config = config.filled(_USUAL)
    return convolution_decoder(config, family="lfm2", columns=_columns(config))


def convolution_decoder(
    config: Config,
    *,
    family: str,
    columns: int,
    feed_forwards: Sequence[FeedForward | None] | None = None,
) -> ModelSpec:
    """LFM2's decoder. columns: of plain feed-forward blocks. feed_forwards: as for `decoder`."""
    if activation(config) != "silu":
        raise config.error("hidden_act must be silu: blocks of this family have no other")
    count = num_layers(config)
    hidden = config.size("hidden_size")
    # A convolution may be split at any channels; it has as many units as attention has heads.
    units = math.gcd(hidden, config.size("num_attention_heads"))
    mixer = ShortConvolution(
        num_units=units,
        unit_channels=hidden // units,
        convolution=config.size("conv_L_cache", 3),
        bias=config.flag("conv_bias", False),
    )
    rotary = read_rotary(config, head_size_of(config), theta=1_000_000.0)
    is_tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    return decoder(
        config,
        family=family,
        rotaries=(rotary,) * count,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        mixer={"query_key_norm": True},
        mixers=[mixer if kind == _CONVOLUTION else None for kind in _kinds(config)],
        feed_forward={"columns": columns, "activation": "silu"},
        feed_forwards=feed_forwards,
        model={"norm_epsilon": config.number("norm_eps", 1e-5), "tied_embeddings": is_tied},
    )


def _kinds(config: Config) -> Sequence[str]:
    """The kind of each layer."""
    count, kinds = num_layers(config), config.values.get("layer_types")
    if kinds is None:
        numbers = config.values.get("full_attn_idxs")
        numbers = range(count) if numbers is None else numbers
        if not isinstance(numbers, list | range) or any(type(each) is not int for each in numbers):
            raise config.error("full_attn_idxs must be a list of numbers of layers")
        return [GLOBAL if number in numbers else _CONVOLUTION for number in range(count)]
    known = (_CONVOLUTION, GLOBAL)
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in known for k in kinds):
        raise config.error(f"layer_types must name one of {list(known)} for each layer")
    return kinds


def _columns(config: Config) -> int:
    """The columns of the feed-forward blocks: two thirds of the file's size, times a factor,
    rounded up to a multiple."""
    columns = config.size("block_ff_dim", config.size("intermediate_size"))
    if not config.flag("block_auto_adjust_ff_dim", True):
        return columns
    columns = int(2 * columns / 3)
    scaled = config.positive(_MULTIPLIER, 1.0) * columns
    multiple = config.size("block_multiple_of", 256)
    if not scaled <= MAX_SIZE:
        raise config.error(f"{_MULTIPLIER} makes more than {MAX_SIZE} columns")
    return multiple * -(-int(scaled) // multiple)


def tensor_name(role: str) -> str:
    if role == "final_norm":
        return "model.embedding_norm.weight"
    match role.split("."):
        case ["layers", index, part, *suffix] if part in _NAMES:
            return ".".join(["model.layers", index, _NAMES[part], *suffix])
    return llama_tensor_name(role)


FAMILY = Family(
    describe=describe,
    tensor_name=tensor_name,
    fused={"conv.in_proj": ("short_before", "short_after", "short_value")},
)
