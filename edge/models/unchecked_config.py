"""The unchecked values of a config.json, for `edge inspect` of any model. Pure.

An invalid value counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST_SIZE = 1 << 40
_LARGEST_NUMBER = 1e38
_LONGEST_TEXT = 100

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The description of rotary positions."""

    theta: float | None
    """The base of the frequencies."""
    scaling: str | None
    """The configuration's name of their scaling; None: not scaled."""
    factor: float | None
    """The factor of the scaling; None: several numbers, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The values of a config.json about a model's size; None: absent."""

    family: str | None
    hidden_size: int | None
    vocab_size: int | None
    context_tokens: int | None
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_size: int | None
    ffn_columns: int | None
    num_experts: int | None
    window: int | None
    tied_embeddings: bool | None
    quantized_by: str | None
    """The method by which published weights were quantized."""
    rope: Rope | None
    note: str = ""
    """Notes for the user; empty for most models."""


def claims_of(config: Mapping[str, Any]) -> Claims:
    """The claims of a config.json; of a multimodal model, those of its text part."""
    part = config.get("text_config")
    if "hidden_size" not in config and isinstance(part, Mapping):
        config = {**config, **part}
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    tied = config.get("tie_word_embeddings")
    return Claims(
        family=_text(config.get("model_type")),
        hidden_size=_size(config.get("hidden_size")),
        vocab_size=_size(config.get("vocab_size")),
        context_tokens=_size(config.get("max_position_embeddings")),
        num_layers=_size(config.get("num_hidden_layers")),
        num_heads=_size(config.get("num_attention_heads")),
        num_kv_heads=_size(config.get("num_key_value_heads")),
        head_size=_size(config.get("head_dim")),
        ffn_columns=_size(config.get("intermediate_size")),
        num_experts=next((n for key in _EXPERTS if (n := _size(config.get(key)))), None),
        window=_size(config.get("sliding_window")),
        tied_embeddings=tied if isinstance(tied, bool) else None,
        quantized_by=_text(method) or ("an unnamed method" if quantization else None),
        rope=_rope(config),
    )


def _rope(config: Mapping[str, Any]) -> Rope | None:
    """The rotary positions: of `rope_parameters` in current files, else `rope_theta` and
    `rope_scaling`."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(part := config.get(key), Mapping):
            found |= part
    theta = _number(found.get("rope_theta", config.get("rope_theta")))
    scaling = _text(found.get("rope_type", found.get("type")))
    if theta is None and scaling is None:
        return None
    return Rope(
        theta=theta,
        scaling=None if scaling == "default" else scaling,
        factor=_number(found.get("factor")),
    )


def _size(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _LARGEST_SIZE else None


def _number(value: object) -> float | None:
    if type(value) not in (int, float) or not abs(value) < _LARGEST_NUMBER:  # type: ignore[arg-type]
        return None
    return float(value)  # type: ignore[arg-type]


def _text(value: object) -> str | None:
    return value[:_LONGEST_TEXT] if isinstance(value, str) and value else None
