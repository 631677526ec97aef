"""GPT-2: learned positions, norms with biases, and feed-forward blocks without gates.

Matrices are [inputs, outputs] in the files; query, key and value are fused. Some files have the
names of the model without its head.
"""

from __future__ import annotations

import math

from edge.models.attention import Attention
from edge.models.config import Config
from edge.models.decoder import activation, decoder, num_layers
from edge.models.families import Family
from edge.models.plain_mlp import PlainMlp
from edge.models.rotary import NO_ROTARY
from edge.models.spec import ModelSpec

_FIELDS = {
    "hidden_size": ("n_embd", 768),
    "num_hidden_layers": ("n_layer", 12),
    "num_attention_heads": ("n_head", 12),
    "max_position_embeddings": ("n_positions", 1024),
    "intermediate_size": ("n_inner", None),
    "vocab_size": ("vocab_size", 50_257),
}
"""The usual names of fields, by its own ones, and their defaults."""


def describe(config: Config) -> ModelSpec:
    config = _with_usual_names(config)
    if config.flag("add_cross_attention", False):
        raise config.error("add_cross_attention: such a model has an encoder, which Edge has not")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise config.error(f"n_embd ({hidden}) must be a multiple of n_head ({heads})")
    count = num_layers(config)
    block = PlainMlp(
        columns=config.size("intermediate_size", 4 * hidden),
        activation=activation(config, "activation_function", "gelu_new"),
        bias=True,
        norm_bias=True,
    )
    return decoder(
        config,
        family="gpt2",
        rotaries=(NO_ROTARY,) * count,
        mixers=[_attention(config, number) for number in range(count)],
        feed_forwards=(block,) * count,
        model={
            "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
            "tied_embeddings": config.flag("tie_word_embeddings", True),
            "learned_positions": True,
            "norm_bias": True,
        },
    )


def _with_usual_names(config: Config) -> Config:
    values = dict(config.values)
    for name, (own, usual) in _FIELDS.items():
        found = values.get(own)
        values[name] = usual if found is None else found
    if values["intermediate_size"] is None and type(values["hidden_size"]) is int:
        values["intermediate_size"] = 4 * values["hidden_size"]
    names = {name: own for name, (own, _usual) in _FIELDS.items()}
    return Config(values, source=config.source, names=names)


def _attention(config: Config, layer: int) -> Attention:
    heads = config.size("num_attention_heads")
    size = config.size("hidden_size") // heads
    scale = 1 / math.sqrt(size) if config.flag("scale_attn_weights", True) else 1.0
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=size,
        rotary=NO_ROTARY,
        window=None,
        qkv_bias=True,
        output_bias=True,
        query_key_norm=False,
        norm_bias=True,
        score_scale=scale,
    )


_OF_MODEL = {
    "embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "final_norm": "transformer.ln_f.weight",
    "final_norm_bias": "transformer.ln_f.bias",
    "head": "lm_head.weight",
}
_OF_LAYER = {
    "query": "attn.q_proj",
    "key": "attn.k_proj",
    "value": "attn.v_proj",
    "output": "attn.o_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "ln_1.weight",
    "attention_norm_bias": "ln_1.bias",
    "mlp_norm": "ln_2.weight",
    "mlp_norm_bias": "ln_2.bias",
}
"""Names for the parts of the matrices in `turned`, which no file has."""


def tensor_name(role: str) -> str:
    if role in _OF_MODEL:
        return _OF_MODEL[role]
    _layers, number, part, *suffix = role.split(".")
    return ".".join(["transformer.h", number, _OF_LAYER[part], *suffix])


FAMILY = Family(
    describe=describe,
    tensor_name=tensor_name,
    turned={
        "attn.c_attn": ("query", "key", "value"),
        "attn.c_proj": ("output",),
        "mlp.c_fc": ("up",),
        "mlp.c_proj": ("down",),
    },
)
