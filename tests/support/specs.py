"""Models that are nothing but their sizes."""

from __future__ import annotations

from typing import Any

from edge.models.spec import ModelSpec


def plain_spec(**facts: Any) -> ModelSpec:
    """A small Llama, but for these facts; what follows from others is made to fit."""
    values: dict[str, Any] = {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 24,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_size": 8,
        "ffn_columns": 16,
        "vocab_size": 11,
        "context_tokens": 1000,
        "norm_epsilon": 1e-6,
        "activation": "silu",
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "query_key_norm": False,
        "tied_embeddings": False,
        **facts,
    }
    values.setdefault("inverse_frequencies", (1.0,) * (values["head_size"] // 2))
    values.setdefault("windows", (None,) * values["num_layers"])
    return ModelSpec(**values)
