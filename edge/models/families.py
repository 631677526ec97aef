"""The families Edge runs: for each, how its `config.json` and tensor names become data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

from edge.errors import CheckpointError
from edge.models.config import Config
from edge.models.spec import ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Each is a module of this package, named as `model_type` in `config.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """describe(config) → ModelSpec; tensor_name(role) → the name in the checkpoint."""

    describe: Callable[[Config], ModelSpec]
    tensor_name: Callable[[str], str]


def read_family(
    values: Mapping[str, Any], *, source: str, names: Mapping[str, str] | None = None
) -> tuple[Family, ModelSpec]:
    """The family a configuration belongs to, and the model it describes.

    `names`: what fields are called where they come from, if that is no config.json.
    Raises CheckpointError for an unknown family or values that make no model.
    """
    name = values.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(
            f"{source}: model_type {shown(name)} is not a family Edge runs; it runs "
            f"{', '.join(FAMILIES)}"
        )
    family: Family = importlib.import_module(f"edge.models.{name}").FAMILY
    config = Config(values, source=source, names=names)
    try:
        return family, family.describe(config)
    except ValueError as error:
        raise config.error(str(error)) from error


_LAYER_ROLES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}

_MODEL_ROLES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def llama_tensor_name(role: str) -> str:
    """The names Llama checkpoints use, and most families after it."""
    if role in _MODEL_ROLES:
        return _MODEL_ROLES[role]
    _layers, index, part, *suffix = role.split(".")
    return ".".join(["model.layers", index, _LAYER_ROLES[part], *suffix])
