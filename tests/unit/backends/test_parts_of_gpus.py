"""What a GPU peer has no kernels for it refuses, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.backends.interface import ShardWeights
from edge.backends.triton.backend import open_backend
from edge.errors import RequestError
from edge.models.families import read_family
from edge.models.spec import by_kind
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


QWEN: dict[str, Any] = {
    **MIXTRAL,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
}


@pytest.mark.parametrize(("config", "part"), [(MIXTRAL, "experts")])
def test_parts_without_kernels(config: dict[str, Any], part: str) -> None:
    _family, spec = read_family(config, source="config.json")
    weights = cast(ShardWeights, SimpleNamespace(path=Path("nowhere")))
    limits = StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8)
    with pytest.raises(RequestError, match=f"no kernel for {part}, .* --backend ort"):
        open_backend(threads=1).load(
            spec, whole_layout(spec), weights, weight_format(spec, "float32"), limits=limits
        )


GPT_OSS: dict[str, Any] = {**MIXTRAL, "model_type": "gpt_oss", "head_dim": 16}


@pytest.mark.parametrize(("config", "layer", "part"), [(GPT_OSS, 0, "attention sinks")])
def test_attention_of_other_kinds(config: dict[str, Any], layer: int, part: str) -> None:
    """Also of a shard that has no other part without a kernel."""
    _family, spec = read_family(config, source="config.json")
    block = read_family(QWEN, source="config.json")[1].layer(0).feed_forward
    alone = replace(spec, **by_kind([replace(spec.layer(layer), feed_forward=block)]))
    weights = cast(ShardWeights, SimpleNamespace(path=Path("nowhere")))
    limits = StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8)
    with pytest.raises(RequestError, match=f"no kernel for {part}, .* --backend ort"):
        open_backend(threads=1).load(
            alone, whole_layout(alone), weights, weight_format(alone, "float32"), limits=limits
        )
