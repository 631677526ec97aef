"""Every kind of rotary positions is the one of `transformers`, frequency by frequency."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edge.models.config import Config
from edge.models.rope import read_rotary
from edge.models.rotary import NO_ROTARY, Rotary

HEAD = 32
CONTEXT = 4096
TRAINED = 64

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": TRAINED}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.03 * i for i in range(HEAD // 2)],
    "long_factor": [2.0 + 0.7 * i for i in range(HEAD // 2)],
    "original_max_position_embeddings": TRAINED,
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear of a part": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "yarn": YARN,
    "yarn of a part": {**YARN, "partial_rotary_factor": 0.25},
    "yarn with betas": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5},
    "yarn that is not truncated": {**YARN, "truncate": False},
    "yarn with mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn with attention_factor": {**YARN, "attention_factor": 1.7},
    "longrope": LONG,
    "longrope with factor": {**LONG, "factor": 7.0},
    "longrope with attention_factor": {**LONG, "attention_factor": 1.3},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional by a factor": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_that_of_transformers(name: str) -> None:
    rope = {"rope_theta": 5000.0, **KINDS[name]}
    reference: Any = transformers.LlamaConfig(
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters=dict(rope),
    )
    config = Config(
        {"max_position_embeddings": CONTEXT, "rope_parameters": rope}, source="config.json"
    )
    found = read_rotary(config, HEAD)
    for tokens in (TRAINED, CONTEXT):
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
            reference, torch.device("cpu"), seq_len=tokens
        )
        np.testing.assert_allclose(found.frequencies(tokens), frequencies.numpy(), rtol=1e-6)
        assert found.scale == pytest.approx(scale, rel=1e-12)
    turned = rope.get("partial_rotary_factor", 1.0) if rope["rope_type"] != "proportional" else 1.0
    assert found.turned_elements == HEAD * turned


def test_tables_are_scaled_angles() -> None:
    rotary = Rotary(inverse_frequencies=(1.0, 0.5), scale=2.0)
    cos, sin = rotary.tables(4)
    np.testing.assert_allclose(cos[3], 2 * np.cos([3, 1.5]), rtol=1e-6)
    np.testing.assert_allclose(sin[3], 2 * np.sin([3, 1.5]), rtol=1e-6)
    assert [table.shape for table in NO_ROTARY.tables(4)] == [(4, 0), (4, 0)]


def test_long_frequencies_are_those_of_sessions_with_a_longer_context() -> None:
    rotary = Rotary(inverse_frequencies=(1.0,), long_inverse_frequencies=(0.5,), trained_tokens=100)
    assert rotary.frequencies(100) == (1.0,)
    assert rotary.frequencies(101) == (0.5,)
    np.testing.assert_allclose(rotary.tables(101)[0][1], np.cos([0.5]), rtol=1e-6)


def test_what_the_model_says_outside_counts_where_the_rope_says_nothing() -> None:
    """As older files have it, and `original_max_position_embeddings` first of all."""
    values = {"max_position_embeddings": CONTEXT, "partial_rotary_factor": 0.5, "rope_theta": 50.0}
    plain = read_rotary(Config(values, source="here"), HEAD)
    assert plain.turned_elements == HEAD // 2
    assert plain.inverse_frequencies[1] == pytest.approx(50.0 ** (-2 / (HEAD / 2)))
    long = {"rope_scaling": LONG, "original_max_position_embeddings": 128}
    rotary = read_rotary(Config({"max_position_embeddings": CONTEXT, **long}, source="here"), HEAD)
    assert rotary.trained_tokens == 128
