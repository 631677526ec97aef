"""What a GPU peer has no kernels for it refuses, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.backends.interface import ShardWeights
from edge.backends.triton.backend import open_backend
from edge.errors import RequestError
from edge.models.families import read_family
from edge.protocol.step import StepLimits
from edge.weights.formats import weight_format
from edge.weights.layout import whole_layout

GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "enable_moe_block": True,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "top_k_experts": 2,
}


def test_experts_of_another_kind() -> None:
    """Although there are kernels for all its kinds of parts."""
    _family, spec = read_family(GEMMA, source="config.json")
    weights = cast(ShardWeights, SimpleNamespace(path=Path("nowhere")))
    limits = StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8)
    missing = r"no kernel for experts with norms of their own, .* --backend ort"
    with pytest.raises(RequestError, match=missing):
        open_backend(threads=1).load(
            spec, whole_layout(spec), weights, weight_format(spec, "float32"), limits=limits
        )
