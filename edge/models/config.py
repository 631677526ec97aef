"""Reads `config.json` values with the checks and the sentences that every family shares."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as shown
from typing import Any

import numpy as np

from edge.errors import CheckpointError
from edge.models.attention import Attention
from edge.models.gated_mlp import GatedMlp
from edge.models.parts import MAX_SIZE
from edge.models.spec import MAX_LAYERS, LayerSpec, ModelSpec, by_kind

MAX_HEAD_SIZE = 4096
"""Reading a configuration takes as long as this is; models have 64 to 512."""

_MISSING = object()
_LEAST_FLOAT32 = float(np.finfo(np.float32).tiny)
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Config:
    """The values of one `config.json`; every getter names the field in its error.

    `names` has other names of fields, for errors: those of the file that the values come from.
    """

    def __init__(
        self, values: Mapping[str, Any], *, source: str, names: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.source = source
        self._names = names or {}

    def integer(self, name: str, default: Any = _MISSING) -> int:
        value = self._get(name, default)
        if type(value) is not int:
            raise self.error(f"{self._shown(name)} must be an integer, not {shown(value)}")
        return value

    def size(self, name: str, default: Any = _MISSING, *, most: int = MAX_SIZE) -> int:
        """An integer that something may be allocated by."""
        value = self.integer(name, default)
        if not 1 <= value <= most:
            raise self.error(f"{self._shown(name)} must lie in 1..{most}, not {shown(value)}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{self._shown(name)} must be a number, not {shown(value)}")
        if not abs(value) <= sys.float_info.max:  # also NaN, and integers too large for a float
            raise self.error(f"{self._shown(name)} must be a finite number")
        return float(value)

    def positive(self, name: str, default: Any = _MISSING) -> float:
        """A number that float32 computes with."""
        value = self.number(name, default)
        if not value > 0:
            raise self.error(f"{self._shown(name)} must be positive, not {value}")
        if not _LEAST_FLOAT32 <= value <= _LARGEST_FLOAT32:
            raise self.error(f"{self._shown(name)} must be a number that 32 bits hold, not {value}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{self._shown(name)} must be true or false, not {shown(value)}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(f"{self._shown(name)} must be an object, not {shown(value)}")
        return value

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {problem}")

    def _shown(self, name: str) -> str:
        return self._names.get(name, name)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.error(f"{self._shown(name)} is missing")
        return default


def decoder(
    config: Config,
    *,
    family: str,
    head_size: int | None = None,
    windows: Sequence[int | None] | None = None,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    mlp_bias: bool | None = None,
    query_key_norm: bool = False,
) -> ModelSpec:
    """A decoder of the Llama shape, whose families write nearly everything the same way.

    `head_size` is the family's where the file names none; None shares out the hidden size.
    `windows` are those of each layer. A bias that is None is what the file says.
    """
    activation = config.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.error(f"hidden_act {shown(activation)} is not supported; silu is")
    num_heads = config.size("num_attention_heads")
    hidden_size = config.size("hidden_size")
    head_size = config.size("head_dim", head_size or hidden_size // num_heads)
    attention_bias = config.flag("attention_bias", False)
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_heads),
        head_size=head_size,
        inverse_frequencies=inverse_frequencies(config, head_size),
        window=None,
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        output_bias=attention_bias if output_bias is None else output_bias,
        query_key_norm=query_key_norm,
    )
    own_mlp_bias = config.flag("mlp_bias", False)
    feed_forward = GatedMlp(
        columns=config.size("intermediate_size"),
        activation="silu",
        bias=own_mlp_bias if mlp_bias is None else mlp_bias,
    )
    of_window = {
        window: LayerSpec(mixer=replace(attention, window=window), feed_forward=feed_forward)
        for window in windows or (None,)
    }
    return ModelSpec(
        family=family,
        hidden_size=hidden_size,
        vocab_size=config.size("vocab_size"),
        context_tokens=config.size("max_position_embeddings", 2048),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        **by_kind([of_window[each] for each in windows or (None,) * num_layers(config)]),
    )


def num_layers(config: Config) -> int:
    return config.size("num_hidden_layers", most=MAX_LAYERS)


def inverse_frequencies(config: Config, head_size: int) -> tuple[float, ...]:
    """Rotary frequencies, with the scaling the configuration asks for.

    `rope_parameters` is what current files hold, `rope_theta` and `rope_scaling` older ones.
    Formed in float32 because the reference implementation does; llama3 scaling after Meta's
    published rule (long wavelengths divided by the factor, short ones kept, a ramp between).
    """
    scaling = Config(
        {**config.mapping("rope_scaling"), **config.mapping("rope_parameters")},
        source=f"{config.source}: rope_parameters",
    )
    theta = scaling.positive("rope_theta", config.number("rope_theta", 10000.0))
    if head_size % 2 or head_size > MAX_HEAD_SIZE:
        raise config.error(f"head_dim must be even and at most {MAX_HEAD_SIZE}, not {head_size}")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.error("partial_rotary_factor other than 1 is not supported")
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequencies = (np.float32(1.0) / np.power(np.float32(theta), exponents)).astype(np.float32)
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "linear":
        frequencies = frequencies / np.float32(scaling.positive("factor"))
    elif kind == "llama3":
        frequencies = _llama3(scaling, frequencies)
    elif kind == "factors":
        frequencies = _divided(scaling, frequencies)
    elif kind != "default":
        raise config.error(
            f"rope scaling {shown(kind)} is not supported; default, linear and llama3 are"
        )
    return tuple(float(f) for f in frequencies)


def _llama3(scaling: Config, frequencies: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    factor = scaling.positive("factor")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    trained = scaling.size("original_max_position_embeddings")
    if not low < high:
        raise scaling.error("llama3 scaling needs low_freq_factor < high_freq_factor")
    wavelengths = np.float32(2 * math.pi) / frequencies
    ramp = (np.float32(trained) / wavelengths - np.float32(low)) / np.float32(high - low)
    slow = frequencies / np.float32(factor)
    mixed = (1 - ramp) * slow + ramp * frequencies
    scaled = np.where(wavelengths > trained / low, slow, frequencies)
    between = (wavelengths <= trained / low) & (wavelengths >= trained / high)
    return np.where(between, mixed, scaled).astype(np.float32)


def _divided(scaling: Config, frequencies: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    """By a factor for each: how GGUF files keep what llama3 scaling comes to."""
    factors = scaling.values.get("factors")
    if (
        not isinstance(factors, list)
        or len(factors) != len(frequencies)
        or not all(type(each) is float and each >= _LEAST_FLOAT32 for each in factors)
    ):
        raise scaling.error(f"factors must be {len(frequencies)} positive numbers, one for each")
    with np.errstate(over="ignore"):  # an infinite frequency is refused where the layer is made
        return frequencies / np.array(factors, np.float32)


def layer_windows(config: Config) -> tuple[int | None, ...]:
    """Windows of families that name a kind for each layer (`layer_types`) or a first layer."""
    count = num_layers(config)
    if not config.flag("use_sliding_window", False):
        return (None,) * count
    window = config.integer("sliding_window")
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", count)
        return tuple(window if layer >= first else None for layer in range(count))
    known = {"sliding_attention": window, "full_attention": None}
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or any(not isinstance(kind, str) or kind not in known for kind in kinds)
    ):
        raise config.error(f"layer_types must name one of {sorted(known)} for each layer")
    return tuple(known[kind] for kind in kinds)
