"""Rotary positions from a `config.json`: all kinds that `transformers` knows.

Frequencies are computed in float32, like the reference implementation's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.models.config import LEAST_FLOAT32, Config
from edge.models.rotary import AXES, Rotary

MAX_HEAD_SIZE = 4096
"""Largest head size, which bounds the time to read a configuration; models have 64 to 512."""

USUAL_THETA = 10000.0

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rope:
    """The inputs of one rotation, for the reader of its kind."""

    config: Config
    """The values of `rope_parameters`."""
    theta: float
    elements: int
    """The rotary elements of a head."""
    head_size: int
    context_tokens: int
    """The context of the model's configuration."""
    trained_tokens: int
    """The longest context before frequencies were scaled."""

    @property
    def exponents(self) -> Array:
        return np.arange(0, self.elements, 2, dtype=np.float32) / np.float32(self.elements)

    @property
    def periods(self) -> Array:
        """The wavelengths of plain rotation: positions per radian."""
        return np.power(np.float32(self.theta), self.exponents).astype(np.float32)

    @property
    def frequencies(self) -> Array:
        """The inverse frequencies of plain rotation."""
        return (np.float32(1.0) / self.periods).astype(np.float32)


def read_rotary(
    config: Config,
    head_size: int,
    *,
    layer_type: str | None = None,
    theta: float = USUAL_THETA,
    partial: float = 1.0,
    is_interleaved: bool = False,
    alternates_axes: bool = False,
) -> Rotary:
    """The rotation of a model's heads, or of its layers of one type if they differ.

    Current files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`. theta, and
    partial (the rotary part of a head): defaults. alternates_axes: axes of pictures take turns from
    pair to pair. Raises CheckpointError for an unknown kind.
    """
    values = {**config.mapping("rope_scaling"), **config.mapping("rope_parameters")}
    source = f"{config.source}: rope_parameters"
    if layer_type is not None and any(isinstance(each, Mapping) for each in values.values()):
        values = dict(Config(values, source=source).mapping(layer_type))
        source = f"{source}.{layer_type}"
    rope = Config(values, source=source)
    for name, value in values.items():
        if isinstance(value, Mapping):
            raise rope.error(f"{name}: rotations that differ between layers are not of this family")
    if head_size % 2 or head_size > MAX_HEAD_SIZE:
        raise config.error(f"head_dim must be even and at most {MAX_HEAD_SIZE}, not {head_size}")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise rope.error(f"rope_type {shown(kind)} is not supported; {', '.join(_KINDS)} are")
    part = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", partial))
    elements = int(head_size * part) if 0 < part <= 1 else 0
    if elements < 2 or elements % 2:
        raise rope.error(
            f"partial_rotary_factor must turn an even number of a head's {head_size} elements, "
            f"not {part} of them"
        )
    context_tokens = config.size("max_position_embeddings", 2048)
    trained = "original_max_position_embeddings"
    described = _Rope(
        config=rope,
        theta=rope.positive("rope_theta", config.number("rope_theta", theta)),
        elements=elements,
        head_size=head_size,
        context_tokens=context_tokens,
        trained_tokens=config.size(trained, rope.size(trained, context_tokens)),
    )
    with np.errstate(all="ignore"):  # Rotary refuses NaN
        found = _KINDS[kind](described)
    return Rotary(
        axes=_axes(rope, elements // 2, alternates=alternates_axes),
        inverse_frequencies=_numbers(found["short"]),
        long_inverse_frequencies=_numbers(found.get("long", ())),
        trained_tokens=found.get("trained_tokens", 0),
        scale=found.get("scale", 1.0),
        is_interleaved=is_interleaved,
    )


def _numbers(frequencies: Any) -> tuple[float, ...]:
    return tuple(float(each) for each in frequencies)


def _axes(rope: Config, pairs: int, *, alternates: bool) -> tuple[int, ...]:
    """The axis of each pair (M-RoPE: Bai et al., Qwen2.5-VL, 2025): in turn, from the first pair
    on, until an axis has as many as `mrope_section` says; or one section after the other."""
    sections = rope.values.get("mrope_section")
    if sections is None:
        return ()
    if (
        not isinstance(sections, list)
        or len(sections) != AXES
        or any(type(each) is not int or not 0 <= each <= pairs for each in sections)
        or sum(sections) != pairs
    ):
        raise rope.error(f"mrope_section must be {AXES} numbers of pairs, {pairs} in all")
    if not rope.flag("mrope_interleaved", alternates):
        return tuple(axis for axis, count in enumerate(sections) for _pair in range(count))
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(pairs, AXES * sections[axis]), AXES):
            axes[pair] = axis
    return tuple(axes)


def _default(rope: _Rope) -> Mapping[str, Any]:
    return {"short": rope.frequencies}


def _linear(rope: _Rope) -> Mapping[str, Any]:
    return {"short": rope.frequencies / np.float32(rope.config.positive("factor"))}


def _dynamic(rope: _Rope) -> Mapping[str, Any]:
    """Plain frequencies: dynamic scaling begins past max_position_embeddings, which no request
    exceeds here."""
    rope.config.positive("factor")
    return {"short": rope.frequencies}


def _proportional(rope: _Rope) -> Mapping[str, Any]:
    """Pairs over the whole head, of which the last ones do not rotate."""
    factor = np.float32(rope.config.positive("factor", 1.0))
    exponents = np.arange(0, rope.elements, 2, dtype=np.float32) / np.float32(rope.head_size)
    turning = np.float32(1.0) / np.power(np.float32(rope.theta), exponents)
    still = np.zeros((rope.head_size - rope.elements) // 2, np.float32)
    return {"short": np.concatenate([turning, still]) / factor}


def _llama3(rope: _Rope) -> Mapping[str, Any]:
    """Meta's published rule: long wavelengths divided by the factor, short ones kept, a ramp
    between."""
    config, frequencies = rope.config, rope.frequencies
    factor = config.positive("factor")
    low, high = config.positive("low_freq_factor"), config.positive("high_freq_factor")
    trained = rope.trained_tokens
    if not low < high:
        raise config.error("llama3 scaling needs low_freq_factor < high_freq_factor")
    wavelengths = np.float32(2 * math.pi) / frequencies
    ramp = (np.float32(trained) / wavelengths - np.float32(low)) / np.float32(high - low)
    slow = frequencies / np.float32(factor)
    mixed = (1 - ramp) * slow + ramp * frequencies
    scaled = np.where(wavelengths > trained / low, slow, frequencies)
    between = (wavelengths <= trained / low) & (wavelengths >= trained / high)
    return {"short": np.where(between, mixed, scaled).astype(np.float32)}


def _yarn(rope: _Rope) -> Mapping[str, Any]:
    """Peng et al., YaRN, 2023: pairs with many turns in the trained context keep their frequency,
    those with less than one are slowed, a ramp between."""
    config = rope.config
    factor = _factor(rope)
    fast = config.positive("beta_fast", 32.0)
    slow = config.positive("beta_slow", 1.0)

    def pair(turns: float) -> float:
        """The index of the pair with this number of turns in the trained context."""
        log = math.log(rope.trained_tokens / (turns * 2 * math.pi))
        return rope.elements * log / (2 * math.log(rope.theta))

    if rope.theta == 1.0:
        raise config.error("yarn scaling needs a rope_theta other than 1")
    low, high = pair(fast), pair(slow)
    if config.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.elements - 1)
    high = high if high != low else high + 0.001
    ramp = (np.arange(rope.elements // 2, dtype=np.float32) - np.float32(low)) / np.float32(
        high - low
    )
    kept = 1 - np.clip(ramp, 0, 1)
    slowed = np.float32(1.0) / (np.float32(factor) * rope.periods)
    frequencies = slowed * (1 - kept) + rope.frequencies * kept
    return {"short": frequencies.astype(np.float32), "scale": _yarn_scale(config, factor)}


def _yarn_scale(config: Config, factor: float) -> float:
    if config.values.get("attention_factor") is not None:
        return config.positive("attention_factor")

    def gain(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    share, whole = config.number("mscale", 0.0), config.number("mscale_all_dim", 0.0)
    return gain(share) / gain(whole) if share and whole else gain(1.0)


def _longrope(rope: _Rope) -> Mapping[str, Any]:
    """Ding et al., LongRoPE, 2024: a divisor per frequency, different for long contexts."""
    config = rope.config
    factor, trained = _factor(rope), rope.trained_tokens
    scale = 1.0
    if factor > 1:
        if trained < 2:
            raise config.error("original_max_position_embeddings must be at least 2")
        scale = math.sqrt(1 + math.log(factor) / math.log(trained))
    return {
        "short": _divided(rope, "short_factor"),
        "long": _divided(rope, "long_factor"),
        "trained_tokens": trained,
        "scale": config.positive("attention_factor", scale),
    }


def _factors(rope: _Rope) -> Mapping[str, Any]:
    """Divisors of frequencies, the form of llama3 scaling in GGUF files."""
    return {"short": _divided(rope, "factors")}


def _factor(rope: _Rope) -> float:
    return rope.config.positive("factor", rope.context_tokens / rope.trained_tokens)


def _divided(rope: _Rope, name: str) -> Array:
    """Plain frequencies, each divided by a number of its own."""
    factors, count = rope.config.values.get(name), rope.elements // 2
    if (
        not isinstance(factors, list)
        or len(factors) != count
        or not all(type(each) in (int, float) and LEAST_FLOAT32 <= each <= 1e38 for each in factors)
    ):
        raise rope.config.error(f"{name} must be {count} positive numbers, one for each frequency")
    divided: Array = np.float32(1.0) / (np.array(factors, np.float32) * rope.periods)
    return divided


_KINDS: Mapping[str, Callable[[_Rope], Mapping[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "factors": _factors,
}
