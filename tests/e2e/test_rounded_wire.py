"""Rounding activations on the wire costs what docs/guide/wire.md says, within three times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import edge
from edge.demos.bundled import MODEL
from edge.demos.world import QUESTIONS
from edge.partition import ClusterSpec, DeviceSpec
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.proposal import propose
from edge.protocol.wire_rules import Wire, WireRules
from edge.transport import WireRule
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import Dtype
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import DEVICES, bundled_plan, make_plan

BUNDLED_LOSS: dict[Wire, float] = {"float16": 1e-3, "int8": 2e-2}
"""Largest difference of a logit, by the largest logit, with float32 weights."""

RANDOM_LOSS: dict[Wire, float] = {"float16": 3e-3, "int8": 6e-2}

SOME_QUESTIONS = [question for question, _answer in QUESTIONS[:2]]

Answers = tuple[np.ndarray, list[tuple[int, ...]]]


def answers(cluster: edge.Cluster, layout: str, dtype: Dtype, wire: Wire) -> Answers:
    """The logits of all prompts, and the greedy tokens after each."""
    with cluster.load(MODEL, dtype=dtype, plan=bundled_plan(layout), wire=wire) as model:
        prompts = [
            model.tokenizer.encode_chat([{"role": "user", "content": question}])
            for question in SOME_QUESTIONS
        ]
        logits = np.concatenate([model.logits(prompt) for prompt in prompts])
        return logits, [model.generate(prompt, max_new_tokens=12).token_ids for prompt in prompts]


def loss(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(logits - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("layout", ["tensor_3", "pipeline_3"])
def test_the_bundled_model_says_the_same_and_its_logits_hardly_move(
    five_peers: edge.Cluster, layout: str
) -> None:
    exact, exact_tokens = answers(five_peers, layout, "float32", "float32")
    for wire, most in BUNDLED_LOSS.items():
        logits, tokens = answers(five_peers, layout, "float32", wire)
        assert 0 < loss(logits, exact) < most
        assert tokens == exact_tokens


def test_float16_keeps_the_tokens_of_int4_weights(five_peers: edge.Cluster) -> None:
    exact, exact_tokens = answers(five_peers, "tensor_3", "int4", "float32")
    logits, tokens = answers(five_peers, "tensor_3", "int4", "float16")
    assert 0 < loss(logits, exact) < 3e-2
    assert tokens == exact_tokens


@pytest.mark.parametrize("layout", ["pipeline_2", "tensor_3", "mixed_2_then_3"])
def test_a_random_model_loses_no_more_than_stated(
    tiny_checkpoint: Callable[..., TinyCheckpoint], five_peers: edge.Cluster, layout: str
) -> None:
    """Several chunks of a prompt, every stage after the first behind a rounded hop."""
    checkpoint = tiny_checkpoint("llama")
    prompt = checkpoint.prompt(300)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    exact = checkpoint.logits(prompt)
    for wire, most in RANDOM_LOSS.items():
        with five_peers.load(checkpoint.path, dtype="float32", plan=plan, wire=wire) as model:
            logits = model.logits(prompt)
        assert 0 < loss(logits, exact) < most


def test_auto_follows_the_links_of_the_cluster(
    tiny_checkpoint: Callable[..., TinyCheckpoint],
) -> None:
    checkpoint = tiny_checkpoint("llama")
    plan = make_plan(checkpoint.spec, "mixed_2_then_3", model=checkpoint.path.name)
    cluster = ClusterSpec(
        devices=tuple(
            DeviceSpec(id=name, name=name, memory_bytes=1 << 30, threads=1) for name in DEVICES
        )
    )
    options = LoadOptions(plan=plan, dtype="float32", wire="auto")
    with Checkpoint.open(checkpoint.path) as opened:
        sizes = LoadSizes.of(options, opened.spec)
        exact = propose(opened, cluster, options, sizes).wire_rules
        slow = propose(
            opened, cluster, options, sizes, changes=["link local-1-local-3 1ms 10Mbit"]
        ).wire_rules
    assert exact == WireRules(sums=(WireRule(),) * 2, hops=(WireRule(),))
    assert slow.sums == exact.sums
    assert slow.hops[0].format == "float16"
