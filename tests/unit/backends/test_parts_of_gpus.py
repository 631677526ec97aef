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

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "num_local_experts": 4,
}


def test_experts() -> None:
    _family, spec = read_family(MIXTRAL, source="config.json")
    weights = cast(ShardWeights, SimpleNamespace(path=Path("nowhere")))
    limits = StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8)
    with pytest.raises(RequestError, match=r"no kernel for experts.* --backend ort"):
        open_backend(threads=1).load(
            spec, whole_layout(spec), weights, weight_format(spec, "float32"), limits=limits
        )
