"""Conversion of GGUF metadata to the values of a `config.json`.

So families are described in one place. Knows keys and names of tensors; reads no file.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.models.gguf_architectures import ARCHITECTURES, EMBEDDING, HEAD, Architecture
from edge.models.rotary import AXES
from edge.models.spec import MAX_LAYERS

_ROPE_FREQUENCIES = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_FACTORS = (_ROPE_FREQUENCIES, _SHORT, _LONG)
"""Tensors of divisors of rotary frequencies: Llama 3's; Phi's for short and long contexts."""

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

_FURTHER_LAYERS = "nextn_predict_layers"
"""The layers for multi-token prediction, counted with the others and not computed."""

_PLAIN: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "logit_scale": (0, 1),
}
"""The only supported values of some keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """A model's description: the values of a config.json, and the GGUF keys that they come from."""

    architecture: Architecture
    values: Mapping[str, Any]
    keys: Mapping[str, str]

    def interleaved(self, num_layers: int, head_size: int) -> dict[str, int]:
        """The head size of each tensor with permuted rows, by its name."""
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
    """The description from metadata, shapes of tensors, and values of those in ROPE_FACTORS.

    Raises CheckpointError for an unknown architecture, missing keys and unsupported values.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{source}: architecture {shown(name)} is not one that Edge runs from GGUF",
            remedy=f"it runs {', '.join(ARCHITECTURES)}",
        )
    architecture = ARCHITECTURES[name]
    needed = {**_REQUIRED, **architecture.needed}
    wanted = {**needed, **_OPTIONAL, **architecture.keys}
    if architecture.by_layer:
        of_layers = architecture.by_layer.values()
        wanted = {each: key for each, key in wanted.items() if key not in of_layers}
    keys = {each: f"{name}.{key}" for each, key in wanted.items()}
    for each in [name for name in needed if name in keys]:
        if keys[each] not in metadata and each not in architecture.may_lack:
            raise CheckpointError(
                f"{source}: {keys[each]} is missing", remedy="download the file again"
            )
    for key, plain in {**_PLAIN, **architecture.plain}.items():
        if key in wanted.values():
            continue
        if (value := _of(metadata, f"{name}.{key}", plain[0], source)) not in plain:
            raise CheckpointError(
                f"{source}: {name}.{key} is {shown(value)}, and such models are not computed here",
                remedy=f"use one of a plain {name}",
            )
    values = {
        each: _value(metadata[key], key, source) for each, key in keys.items() if key in metadata
    }
    for each, key in architecture.by_layer.items():
        keys[each] = f"{name}.{key}"
        values[each] = _of_layers(metadata, keys[each], values["num_hidden_layers"], source)
    further = _of(metadata, f"{name}.{_FURTHER_LAYERS}", 0, source)
    if type(further) is type(values["num_hidden_layers"]) is int:
        values["num_hidden_layers"] -= max(0, further)
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if "head_dim" not in values and type(hidden) is type(heads) is int and heads > 0:
        values["head_dim"] = hidden // heads
    if "vocab_size" not in values:
        tokens = metadata.get("tokenizer.ggml.tokens")
        counted = len(tokens) if isinstance(tokens, tuple) else 0
        values["vocab_size"] = counted or shapes.get(EMBEDDING, (0,))[0]
        keys["vocab_size"] = "the number of tokens"
    if type(head_size := values.get("global_head_dim", values.get("head_dim"))) is int:
        turned = _turned(metadata, name, head_size, source)
        if turned != head_size:
            values["partial_rotary_factor"] = turned / head_size
    values["model_type"] = architecture.model_type or name
    window = values.pop("sliding_window", 0)
    if architecture.has_window:
        values["sliding_window"] = window or None
    values["tie_word_embeddings"] = HEAD not in shapes
    values["attention_bias"] = "blk.0.attn_q.bias" in shapes
    values["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    values["rope_parameters"] = rope = _rope(metadata, name, rope_factors, source)
    if (sections := metadata.get(f"{name}.rope.dimension_sections")) is not None:
        rope["mrope_section"] = _sections(sections)
    try:
        architecture.finish(values, shapes)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error
    return GgufModel(architecture=architecture, values=values, keys=keys)


def _sections(value: object) -> object:
    """The pairs of each axis of a picture's positions: files have a fourth axis of none."""
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer):
        return value
    found = [int(each) for each in value]
    return found[:AXES] if found[AXES:] == [0] else found


def claimed_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, source: str
) -> dict[str, Any]:
    """The unchecked values of a config.json, for any architecture, as far as there are any."""
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
        values["tie_word_embeddings"] = HEAD not in shapes
    with contextlib.suppress(CheckpointError):
        values["rope_parameters"] = _rope(metadata, name, {}, source)
    return values


def unknown_tensors(names: Iterable[str], known: Collection[str], num_layers: int) -> list[str]:
    """The tensors of layers that Edge does not know; a model that has them needs them."""
    return sorted(
        name
        for name in names
        if name not in known
        and (layer := re.match(r"blk\.(\d{1,9})\.", name))
        and int(layer[1]) < num_layers
        and "attn_rot_embd" not in name
    )


def _of(metadata: Mapping[str, Any], key: str, default: object, source: str) -> object:
    return _value(metadata[key], key, source) if key in metadata else default


def _value(value: object, key: str, source: str) -> object:
    """A number as it was before it became float32; of a list for layers, the common value."""
    if isinstance(value, np.ndarray):
        if not value.size or (value != value[0]).any():
            raise CheckpointError(
                f"{source}: {key} differs from layer to layer, which is not computed here",
                remedy="use a model whose layers are alike",
            )
        value = value[0].item()
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            short = np.float32(value)
        return float(str(short)) if float(short) == value else value
    return value


def _of_layers(metadata: Mapping[str, Any], key: str, num_layers: object, source: str) -> list[int]:
    """A number for each layer, from a list or a common number."""
    found = metadata.get(key)
    if type(found) is int and type(num_layers) is int and num_layers <= MAX_LAYERS:
        return [found] * num_layers
    if (
        not isinstance(found, np.ndarray)
        or not (np.issubdtype(found.dtype, np.integer) or found.dtype == np.bool_)
        or len(found) != num_layers
    ):
        raise CheckpointError(
            f"{source}: {key} must have a whole number for each layer",
            remedy="download the file again",
        )
    return [int(each) for each in found]


def _turned(metadata: Mapping[str, Any], name: str, head_size: int, source: str) -> int:
    """The number of a head's rotary elements."""
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
        is_whole_head = type(found) is int and found == head_size  # a float may be equal, too
        if not is_whole_head and not is_computed:
            raise CheckpointError(
                f"{source}: {name}.{key} is {shown(found)} where a head has {head_size}",
                remedy=f"{what} is not computed here, use another model",
            )
    assert isinstance(turned, int)
    return turned


def _rope(
    metadata: Mapping[str, Any],
    name: str,
    rope_factors: Mapping[str, NDArray[np.float32]],
    source: str,
) -> dict[str, Any]:
    """`rope_parameters` without the base, which is a separate value."""
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
            f"{_ROPE_FREQUENCIES}, which is not computed here",
            remedy="use another model",
        )
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        trained = _of(metadata, f"{scaling}.original_context_length", None, source)
        found["beta_fast"] = _of(metadata, f"{scaling}.yarn_beta_fast", None, source)
        found["beta_slow"] = _of(metadata, f"{scaling}.yarn_beta_slow", None, source)
        whole = _of(metadata, f"{scaling}.yarn_log_multiplier", 0.0, source)
        if isinstance(whole, float) and whole:
            found["mscale"], found["mscale_all_dim"] = 1.0, whole
        elif isinstance(gain, float) and isinstance(factor, float) and factor > 1:
            found["attention_factor"] = gain * (1.0 + 0.1 * math.log(factor))
        found["original_max_position_embeddings"] = trained
    return found
