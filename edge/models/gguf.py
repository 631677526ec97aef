"""What a GGUF file says of a model, in the words of a Hugging Face checkpoint.

Its metadata become the values of a `config.json`, so families are described in one place. Knows
keys and names of tensors; reads no file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that Llama 3's rotary frequencies are divided by, if there is one."""

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
    "mlp_norm": "ffn_norm.weight",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is known of a value of `general.architecture`.

    interleaves: rows of query and key lie as llama.cpp's rotation of neighbours wants them.
    """

    interleaves: bool


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(interleaves=True),
    "qwen2": Architecture(interleaves=False),
    "qwen3": Architecture(interleaves=False),
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
    """The names in GGUF files, which all architectures share."""
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
            tensor_name(f"layers.{layer}.{part}.{kind}"): head_size
            for layer in range(num_layers)
            for part in ("query", "key")
            for kind in ("weight", "bias")
        }


def describe_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_factors: NDArray[np.float32] | None,
    source: str,
) -> GgufModel:
    """From the metadata, the shapes of the tensors and the values of ROPE_FACTORS.

    Raises CheckpointError for an architecture that is not known, naming those that are, for keys
    that are missing, and for what is not computed here.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{source}: architecture {shown(name)} is not one that Edge runs from GGUF; it runs "
            f"{', '.join(ARCHITECTURES)}"
        )
    keys = {field: f"{name}.{key}" for field, key in {**_REQUIRED, **_OPTIONAL}.items()}
    for field in _REQUIRED:
        if keys[field] not in metadata:
            raise CheckpointError(f"{source}: {keys[field]} is missing; download the file again")
    for key, plain in _PLAIN.items():
        if (value := _of(metadata, f"{name}.{key}", plain[0], source)) not in plain:
            raise CheckpointError(
                f"{source}: {name}.{key} is {shown(value)}, and such models are not computed here; "
                f"use one of a plain {name}"
            )
    values = {
        field: _value(metadata[key], key, source) for field, key in keys.items() if key in metadata
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
        _check_heads(metadata, name, head_size, source)
    values["model_type"] = name
    window = values.pop("sliding_window", 0)
    if name == "llama" and window:
        values |= {"model_type": "mistral", "sliding_window": window}
    values["tie_word_embeddings"] = _HEAD not in shapes
    values["attention_bias"] = "blk.0.attn_q.bias" in shapes
    values["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    values["rope_parameters"] = _rope(metadata, name, rope_factors, source)
    return GgufModel(architecture=ARCHITECTURES[name], values=values, keys=keys)


def claimed_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, source: str
) -> dict[str, Any]:
    """As far as there are any, the values of a config.json, of whatever architecture; unchecked."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return {}
    values: dict[str, Any] = {"model_type": name}
    for field, key in {**_REQUIRED, **_OPTIONAL, "num_experts": "expert_count"}.items():
        with contextlib.suppress(CheckpointError):  # differs from layer to layer
            values[field] = _of(metadata, f"{name}.{key}", None, source)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if values.get("vocab_size") is None and isinstance(tokens, tuple):
        values["vocab_size"] = len(tokens)
    if shapes:
        values["tie_word_embeddings"] = _HEAD not in shapes
    with contextlib.suppress(CheckpointError):
        values["rope_parameters"] = _rope(metadata, name, None, source)
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


def _check_heads(metadata: Mapping[str, Any], name: str, head_size: int, source: str) -> None:
    for key, what in (
        ("attention.value_length", "values of another size than keys"),
        ("rope.dimension_count", "a rotation of a part of each head"),
    ):
        if (found := _of(metadata, f"{name}.{key}", head_size, source)) != head_size:
            raise CheckpointError(
                f"{source}: {name}.{key} is {shown(found)} where a head has {head_size}; "
                f"{what} is not computed here, use another model"
            )


def _rope(
    metadata: Mapping[str, Any], name: str, factors: NDArray[np.float32] | None, source: str
) -> dict[str, Any]:
    """`rope_parameters` without the base, which is a value of its own."""
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
            f"{ROPE_FACTORS}, which is not computed here; use another model"
        )
    return {"rope_type": kind, "factor": factor}
