"""What a GGUF file says of a model, in the words of a Hugging Face checkpoint.

Its metadata become the values of a `config.json`, so families are described in one place. Knows
keys and names of tensors; reads no file.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError

_ROPE_FREQUENCIES = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_FACTORS = (_ROPE_FREQUENCIES, _SHORT, _LONG)
"""Tensors that rotary frequencies are divided by: Llama 3's; Phi's in short and long contexts."""

EMBEDDING = "token_embd.weight"

_HEAD = "output.weight"

_MODEL_ROLES = {"embedding": EMBEDDING, "final_norm": "output_norm.weight", "head": _HEAD}

_LAYER_ROLES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is known of a value of `general.architecture`.

    interleaves: rows of query and key lie as llama.cpp's rotation of neighbours wants them.
    model_type: as a config.json has it, where that is another.
    keys: of further fields. fused: as of a Family, by what a tensor is called in its layer.
    has_window: one of layers that have one, which the family knows.
    finish: adds to the values of the config.json what llama.cpp knows without a key.
    """

    interleaves: bool = False
    model_type: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_window: bool = False
    finish: Callable[[dict[str, Any]], None] = lambda _values: None

    def tensor_name(self, role: str) -> str:
        """The name of a role's tensor; of one that is rows of a fused tensor, a name for those."""
        if role.startswith("layers."):
            _layers, index, part, *suffix = role.split(".")
            for fused, parts in self.fused.items():
                if part in parts:
                    return ".".join(["blk", index, fused, part, *suffix])
        return tensor_name(role)


def _gemma(large: int) -> Callable[[dict[str, Any]], None]:
    """`large`: layers of the model whose scores are scaled otherwise than the others'."""

    def finish(values: dict[str, Any]) -> None:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        size = values.get("head_dim")
        if values["num_hidden_layers"] == large and type(hidden) is type(heads) is int and heads:
            size = hidden // heads
        values["query_pre_attn_scalar"] = size
        # Only layers without a window are scaled, where layers turn in two ways.
        values["rope_scaling"] = values.pop("rope_parameters")

    return finish


def _olmo(values: dict[str, Any]) -> None:
    """OLMo 3 is OLMo 2 with windows."""
    if values["sliding_window"]:
        values["model_type"] = "olmo3"
        values["rope_scaling"] = values.pop("rope_parameters")


_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GATE_UP = {"ffn_up": ("gate", "up")}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma2": Architecture(keys=_CAPS, has_window=True, finish=_gemma(46)),
    "gemma3": Architecture(
        model_type="gemma3_text",
        keys={**_CAPS, "rope_local_base_freq": "rope.freq_base_swa"},
        has_window=True,
        finish=_gemma(62),
    ),
    "glm4": Architecture(fused=_GATE_UP),
    "granite": Architecture(
        interleaves=True,
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "llama": Architecture(interleaves=True),
    "olmo2": Architecture(has_window=True, finish=_olmo),
    "phi3": Architecture(
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        fused={"attn_qkv": ("query", "key", "value"), **_GATE_UP},
        has_window=True,
    ),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "smollm3": Architecture(interleaves=True),
}
"""Mistral is of architecture "llama"."""

_REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}

_PLAIN = {"expert_count": (0,), "attention.causal": (True,), "logit_scale": (0, 1)}
"""What some keys must be, where they are there: anything else is another model than is computed."""


def tensor_name(role: str) -> str:
    """The names in GGUF files, which all architectures share where nothing is fused."""
    if role in _MODEL_ROLES:
        return _MODEL_ROLES[role]
    _layers, index, part, *suffix = role.split(".")
    return ".".join(["blk", index, _LAYER_ROLES[part], *suffix])


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """A model's description: the values of a config.json, and the keys that they come from."""

    architecture: Architecture
    values: Mapping[str, Any]
    keys: Mapping[str, str]

    def interleaved(self, num_layers: int, head_size: int) -> dict[str, int]:
        """Of each tensor whose rows are turned, the head size."""
        if not self.architecture.interleaves:
            return {}
        return {
            self.architecture.tensor_name(f"layers.{layer}.{part}.{kind}"): head_size
            for layer in range(num_layers)
            for part in ("query", "key")
            for kind in ("weight", "bias")
        }


def describe_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_factors: Mapping[str, NDArray[np.float32]],
    source: str,
) -> GgufModel:
    """From the metadata, the shapes of the tensors and the values of those in ROPE_FACTORS.

    Raises CheckpointError for an architecture that is not known, naming those that are, for keys
    that are missing, and for what is not computed here.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{source}: architecture {shown(name)} is not one that Edge runs from GGUF; it runs "
            f"{', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    wanted = {**_REQUIRED, **_OPTIONAL, **architecture.keys}
    keys = {each: f"{name}.{key}" for each, key in wanted.items()}
    for each in _REQUIRED:
        if keys[each] not in metadata:
            raise CheckpointError(f"{source}: {keys[each]} is missing; download the file again")
    for key, plain in _PLAIN.items():
        if key in wanted.values():
            continue
        if (value := _of(metadata, f"{name}.{key}", plain[0], source)) not in plain:
            raise CheckpointError(
                f"{source}: {name}.{key} is {shown(value)}, and such models are not computed here; "
                f"use one of a plain {name}"
            )
    values = {
        each: _value(metadata[key], key, source) for each, key in keys.items() if key in metadata
    }
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if "head_dim" not in values and type(hidden) is type(heads) is int and heads > 0:
        values["head_dim"] = hidden // heads
    if "vocab_size" not in values:
        tokens = metadata.get("tokenizer.ggml.tokens")
        counted = len(tokens) if isinstance(tokens, tuple) else 0
        values["vocab_size"] = counted or shapes.get(EMBEDDING, (0,))[0]
        keys["vocab_size"] = "the number of tokens"
    if type(head_size := values.get("head_dim")) is int:
        turned = _turned(metadata, name, head_size, source)
        if turned != head_size:
            values["partial_rotary_factor"] = turned / head_size
    values["model_type"] = architecture.model_type or name
    window = values.pop("sliding_window", 0)
    if architecture.has_window:
        values["sliding_window"] = window or None
    elif name == "llama" and window:
        values |= {"model_type": "mistral", "sliding_window": window}
    values["tie_word_embeddings"] = _HEAD not in shapes
    values["attention_bias"] = "blk.0.attn_q.bias" in shapes
    values["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    values["rope_parameters"] = _rope(metadata, name, rope_factors, source)
    architecture.finish(values)
    return GgufModel(architecture=architecture, values=values, keys=keys)


def claimed_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, source: str
) -> dict[str, Any]:
    """As far as there are any, the values of a config.json, of whatever architecture; unchecked."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return {}
    values: dict[str, Any] = {"model_type": name}
    for each, key in {**_REQUIRED, **_OPTIONAL, "num_experts": "expert_count"}.items():
        with contextlib.suppress(CheckpointError):  # differs from layer to layer
            values[each] = _of(metadata, f"{name}.{key}", None, source)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if values.get("vocab_size") is None and isinstance(tokens, tuple):
        values["vocab_size"] = len(tokens)
    if shapes:
        values["tie_word_embeddings"] = _HEAD not in shapes
    with contextlib.suppress(CheckpointError):
        values["rope_parameters"] = _rope(metadata, name, {}, source)
    return values


def unknown_tensors(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Tensors of layers that no formula here uses; a model that has them needs them."""
    return sorted(
        name
        for name in names
        if name not in known and re.match(r"blk\.", name) and "attn_rot_embd" not in name
    )


def _of(metadata: Mapping[str, Any], key: str, default: object, source: str) -> object:
    return _value(metadata[key], key, source) if key in metadata else default


def _value(value: object, key: str, source: str) -> object:
    """A number as it was before it was float32; of numbers for each layer, the one they all are."""
    if isinstance(value, np.ndarray):
        if not value.size or (value != value[0]).any():
            raise CheckpointError(
                f"{source}: {key} differs from layer to layer, which is not computed here; use a "
                "model whose layers are alike"
            )
        value = value[0].item()
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            short = np.float32(value)
        return float(str(short)) if float(short) == value else value
    return value


def _turned(metadata: Mapping[str, Any], name: str, head_size: int, source: str) -> int:
    """How many elements of a head turn."""
    turned = _of(metadata, f"{name}.rope.dimension_count", head_size, source)
    values = _of(metadata, f"{name}.attention.value_length", head_size, source)
    is_partial = type(turned) is int and 0 < turned <= head_size
    for key, found, what, is_computed in (
        ("attention.value_length", values, "values of another size than keys", False),
        (
            "rope.dimension_count",
            turned,
            "a rotation of a part of each head, in this order of rows,",
            is_partial and not ARCHITECTURES[name].interleaves,
        ),
    ):
        if found != head_size and not is_computed:
            raise CheckpointError(
                f"{source}: {name}.{key} is {shown(found)} where a head has {head_size}; "
                f"{what} is not computed here, use another model"
            )
    assert isinstance(turned, int)
    return turned


def _rope(
    metadata: Mapping[str, Any],
    name: str,
    rope_factors: Mapping[str, NDArray[np.float32]],
    source: str,
) -> dict[str, Any]:
    """`rope_parameters` without the base, which is a value of its own."""
    scaling = f"{name}.rope.scaling"
    gain = _of(metadata, f"{scaling}.attn_factor", 1.0, source)
    if _SHORT in rope_factors and _LONG in rope_factors:
        return {
            "rope_type": "longrope",
            "short_factor": rope_factors[_SHORT].tolist(),
            "long_factor": rope_factors[_LONG].tolist(),
            "attention_factor": gain,
        }
    factors = rope_factors.get(_ROPE_FREQUENCIES)
    factor = _of(metadata, f"{name}.rope.scale_linear", 0.0, source)
    factor = _of(metadata, f"{name}.rope.scaling.factor", factor, source)
    kind = _of(metadata, f"{name}.rope.scaling.type", "linear", source)
    if kind == "linear" and factor in (0.0, 1.0):
        kind = "none"
    if kind == "none":
        if factors is None:
            return {}
        return {"rope_type": "factors", "factors": factors.tolist()}
    if factors is not None:
        raise CheckpointError(
            f"{source}: rotary frequencies are scaled both by {name}.rope.scaling.type and by "
            f"{_ROPE_FREQUENCIES}, which is not computed here; use another model"
        )
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        trained = _of(metadata, f"{scaling}.original_context_length", None, source)
        found["beta_fast"] = _of(metadata, f"{scaling}.yarn_beta_fast", None, source)
        found["beta_slow"] = _of(metadata, f"{scaling}.yarn_beta_slow", None, source)
        if isinstance(gain, float) and isinstance(factor, float) and factor > 1:
            found["attention_factor"] = gain * (1.0 + 0.1 * math.log(factor))
        found["original_max_position_embeddings"] = trained
    return found
