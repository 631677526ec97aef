"""What is kept of how often experts are used: what comes back, and what counts as not there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge.errors import CapacityError
from edge.models.experts import Experts
from edge.models.spec import LayerSpec
from edge.weights.expert_uses import (
    expert_uses,
    keep_expert_uses,
    known_expert_uses,
)
from tests.support.specs import plain_layer, spec_of

_DENSE = plain_layer(num_heads=2, num_kv_heads=1, head_size=4)
_SPARSE = LayerSpec(
    mixer=_DENSE.mixer,
    feed_forward=Experts(num_experts=4, top_k=2, columns=8, activation="silu", renormalized=True),
)
SPEC = spec_of([_SPARSE, _DENSE, _SPARSE], hidden_size=8, vocab_size=10)
COUNTS = {
    0: np.asarray([100, 100, 0, 0], np.float32),
    2: np.asarray([70, 60, 50, 20], np.float32),
}


def test_what_was_counted_is_known_for_the_same_files(tmp_path: Path) -> None:
    keep_expert_uses(tmp_path, "this", COUNTS)
    assert known_expert_uses(tmp_path, "this", SPEC) == expert_uses(SPEC, COUNTS)
    assert known_expert_uses(tmp_path, "other", SPEC) == ()


def test_uses_are_as_many_as_a_token_has_and_none_is_sure() -> None:
    of_first, of_dense, of_last = expert_uses(SPEC, COUNTS)
    assert of_dense == ()
    assert sum(of_first) == pytest.approx(2)
    assert of_last == pytest.approx([2 * (each + 0.5) / 202 for each in (70, 60, 50, 20)])
    assert min(of_first) > 0
    assert max(of_first) < 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        json.dumps({"version": 1}),
        json.dumps({"version": 2, "counts": {"0": [1] * 4, "2": [1] * 4}}),
        json.dumps({"version": 1, "counts": {"0": [1] * 4}}),
        json.dumps({"version": 1, "counts": {"0": [1] * 3, "2": [1] * 4}}),
        json.dumps({"version": 1, "counts": {"0": [0] * 4, "2": [1] * 4}}),
        json.dumps({"version": 1, "counts": {"0": [9, 2, 1, 1], "2": [1] * 4}}),
        json.dumps({"version": 1, "counts": {"0": [-1, 2, 1, 1], "2": [1] * 4}}),
        json.dumps({"version": 1, "counts": {"0": ["1"] * 4, "2": ["a"] * 4}}),
        json.dumps({"version": 1, "counts": {"0": [[1], [2], [3], [4]], "2": [1] * 4}}),
        json.dumps({"version": 1, "counts": [[1] * 4]}),
        '{"version": 1, "counts": {"0": [1e400, 1, 1, 1], "2": [1, 1, 1, 1]}}',
        '{"version": 1, "counts": {"0": [1e39, 1, 1, 1], "2": [1, 1, 1, 1]}}',
    ],
)
def test_what_cannot_be_read_is_not_there(tmp_path: Path, content: str) -> None:
    keep_expert_uses(tmp_path, "this", COUNTS)
    (file,) = tmp_path.rglob("this.json")
    file.write_text(content)
    assert known_expert_uses(tmp_path, "this", SPEC) == ()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CapacityError, match="set EDGE_CACHE to another folder"):
        keep_expert_uses(tmp_path / "file", "this", COUNTS)
