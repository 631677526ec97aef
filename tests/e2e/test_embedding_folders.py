"""Models for embeddings as sentence-transformers keeps them: without a head, pooled as they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan

LARGEST_DIFFERENCE = 1e-4


@pytest.mark.parametrize(
    ("mode", "layout"), [("lasttoken", "tensor_2"), ("mean_tokens", "mixed_2x2")]
)
def test_their_embeddings_are_those_of_transformers(
    five_peers: edge.Cluster,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    mode: str,
    layout: str,
) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    # Of the model under the head alone: its tensors are called otherwise.
    base: Any = checkpoint.model.base_model
    base.save_pretrained(tmp_path)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling")])
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    prompt = checkpoint.prompt(9)
    plan = make_plan(checkpoint.spec, layout, model=tmp_path.name)
    with five_peers.load(tmp_path, dtype="float32", plan=plan) as model:
        found = model.embed(prompt, normalize=False)
    states = checkpoint.states(prompt)
    expected = states[-1] if mode == "lasttoken" else states.mean(axis=0)
    assert np.abs(found - expected).max() <= LARGEST_DIFFERENCE
