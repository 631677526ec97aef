"""A text tells how often each expert is used, and plans go by it: in Python, and as a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import edge
from edge.cli.main import cli
from edge.host.cache_paths import CACHE_VARIABLE
from edge.models.experts import Experts
from edge.studies.observe import EXPERT_WINDOW_TOKENS
from edge.weights.expert_uses import expert_uses
from tests.support.checkpoints import TinyCheckpoint
from tests.support.reference_model import uses_by_transformers

Checkpoints = Callable[..., TinyCheckpoint]

WINDOWS = 2
TEXT = "".join(chr(0x21 + 31 * place * place % 94) for place in range(600))
"""Of a token for each character: two windows, and what is left over."""


@pytest.fixture
def checkpoint(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TinyCheckpoint:
    """Of which this device knows nothing."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tiny_checkpoint("qwen2_moe")


def test_plans_go_by_what_a_text_told(five_peers: edge.Cluster, checkpoint: TinyCheckpoint) -> None:
    """And whole experts that were placed by it give the same tokens."""
    options = edge.LoadOptions(dtype="float32", plan="tensor")
    assert five_peers.propose(checkpoint.path, options).model.expert_uses == ()
    counted = five_peers.count_experts(checkpoint.path, options, text=TEXT)
    assert counted.tokens == WINDOWS * EXPERT_WINDOW_TOKENS
    blocks = [
        checkpoint.spec.layer(layer).feed_forward for layer in range(checkpoint.spec.num_layers)
    ]
    sparse = [layer for layer, block in enumerate(blocks) if isinstance(block, Experts)]
    assert counted.layers == len(sparse) < len(blocks)
    assert 0.25 < counted.busiest_quarter < 1

    found = five_peers.propose(checkpoint.path, options)
    tokens = [ord(character) - 0x20 for character in TEXT]
    texts = [
        tokens[begin : begin + EXPERT_WINDOW_TOKENS]
        for begin in range(0, counted.tokens, EXPERT_WINDOW_TOKENS)
    ]
    counts = {
        layer: np.asarray(uses_by_transformers(checkpoint, texts, layer), np.float32)
        for layer in sparse
    }
    expected = expert_uses(checkpoint.spec, counts)
    for own, wanted in zip(found.model.expert_uses, expected, strict=True):
        assert own == pytest.approx(wanted)

    prompt = checkpoint.prompt(24)
    with five_peers.load(checkpoint.path, dtype="float32", plan="tensor", experts="whole") as model:
        (stage,) = model.plan.stages
        placed = [shard.experts for shard in stage.slices if shard.experts]
        reply = model.generate(prompt, max_new_tokens=16)
    assert len(placed) == 5
    experts = sorted(number for each in placed for number in each[0])
    assert experts == list(range(len(placed[0][0]) * 5))
    checkpoint.check_greedy(prompt, reply.token_ids, 16)


def test_a_command_counts_and_says_how_uneven_they_are(
    checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(TEXT)
    words = ["plan", checkpoint.path, "--parallel", "tensor", "--experts", "whole"]
    words += ["--local", 2, "--threads", 1]
    words += ["--calibrate", tmp_path / "text"]
    told = CliRunner().invoke(cli, [*map(str, words)])
    assert told.exit_code == 0, told.output
    assert "experts" in told.output
    assert "the busiest quarter of a layer's experts had" in " ".join(told.output.split())
    value = json.loads(CliRunner().invoke(cli, [*map(str, words), "--json"]).stdout)
    assert value["counted"]["tokens"] == WINDOWS * EXPERT_WINDOW_TOKENS
    plan = edge.Plan.from_json(value["plan"])
    assert all(shard.experts for shard in plan.stages[0].slices)
    assert [row["kinds"][0]["whole_experts"] for row in value["devices"]] == [
        shard.whole_experts for shard in plan.stages[0].slices
    ]


def test_what_has_no_experts_is_told(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    path = tiny_checkpoint("llama").path
    with pytest.raises(edge.RequestError, match="has no experts to count"):
        five_peers.count_experts(path, text=TEXT)
    with pytest.raises(edge.PlanError, match="no layer with experts"):
        five_peers.propose(path, edge.LoadOptions(plan="tensor", experts="whole"))


def test_a_text_that_is_too_short_is_told(
    five_peers: edge.Cluster, checkpoint: TinyCheckpoint
) -> None:
    with pytest.raises(edge.RequestError, match="the text has 5 tokens"):
        five_peers.count_experts(checkpoint.path, text="short")
