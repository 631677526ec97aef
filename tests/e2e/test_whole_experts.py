"""Whole experts on different devices give what `transformers` gives, in memory and from disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

import edge
from edge.planning.load_options import LoadOptions
from edge.weights.formats import weight_format
from edge.weights.observation import ObservedExperts
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan, streaming, with_whole_experts
from tests.support.reference_model import ReferenceModel, uses_by_transformers
from tests.support.slow_cases import repeats_are_slow, shown_in_parts

Array = NDArray[np.float32]
BY_COLUMNS = shown_in_parts("e2e/test_more_families.py", "contract/test_streamed_experts.py")
"""The family by columns of each expert, and another family by experts as wholes."""

Checkpoints = Callable[..., TinyCheckpoint]

LARGEST_DIFFERENCE = 1e-4
LARGEST_ERROR_OF_CODES = 1e-3
"""Of the logits' norm, with accuracy "high"."""

NEW_TOKENS = 12
PROMPT_TOKENS = 24


def whole_plan(checkpoint: TinyCheckpoint, layout: str, dtype: edge.Dtype = "float32") -> edge.Plan:
    held = weight_format(checkpoint.spec, dtype)
    multiple = 1 if dtype == "float32" else held.recipe.column_multiple({"down.weight"})
    spec = checkpoint.spec
    name = checkpoint.path.name
    whole = make_plan(spec, f"whole {layout}", model=name, column_multiple=multiple)
    assert any(shard.experts for stage in whole.stages for shard in stage.slices)
    return whole


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", "tensor_3"),
        ("qwen2_moe", "tensor_2"),  # a shared expert with a gate
        pytest.param("qwen3_5_moe", "mixed_2_then_3", marks=BY_COLUMNS),
        ("gpt_oss", "tensor_5"),  # biases
        # layers without experts, and a correction
        pytest.param("lfm2_moe", "tensor_2", marks=BY_COLUMNS),
        # a shared expert apart, and a number of each
        pytest.param("gemma4_moe", "tensor_3", marks=BY_COLUMNS),
    ],
)
def test_logits_and_greedy_tokens_equal_transformers(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, family: str, layout: str
) -> None:
    """A prompt, tokens one by one, and three answers at once, which share steps."""
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    plan = whole_plan(checkpoint, layout)
    with five_peers.load(checkpoint.path, dtype="float32", plan=plan, concurrency=3) as model:
        logits = model.logits(prompt)
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS)
        replies = model.generate([prompt, prompt[:5], prompt[:11]], max_new_tokens=NEW_TOKENS)
    assert np.abs(logits - checkpoint.logits(prompt)).max() <= LARGEST_DIFFERENCE
    checkpoint.check_greedy(prompt, reply.token_ids, NEW_TOKENS)
    for own, each in zip((prompt, prompt[:5], prompt[:11]), replies, strict=True):
        checkpoint.check_greedy(own, each.token_ids, NEW_TOKENS)


@pytest.mark.parametrize(
    ("family", "dtype"), [("mixtral", "int4"), ("qwen2_moe", "int8"), ("gpt_oss", "int4-pure")]
)
def test_codes_are_computed_with_as_they_stand(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, family: str, dtype: edge.Dtype
) -> None:
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    plan = whole_plan(checkpoint, "tensor_2", dtype)
    with five_peers.load(checkpoint.path, dtype=dtype, accuracy="high", plan=plan) as model:
        found = model.logits(prompt)
    expected = ReferenceModel(checkpoint, dtype=dtype).logits(prompt)
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert error <= LARGEST_ERROR_OF_CODES


@pytest.mark.parametrize(
    "family",
    ["mixtral", *(pytest.param(each, marks=BY_COLUMNS) for each in ("gpt_oss", "qwen2_moe"))],
)
@pytest.mark.linux_ways
def test_from_disk_they_give_the_same_bits(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, family: str
) -> None:
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    found = []
    for plan in (whole := whole_plan(checkpoint, "tensor_3"), streaming(whole, 4)):
        with five_peers.load(checkpoint.path, dtype="float32", plan=plan, concurrency=2) as model:
            replies = model.generate([prompt, prompt[:7]], max_new_tokens=8)
            found.append((model.logits(prompt), [each.token_ids for each in replies]))
    (expected, tokens), (logits, streamed) = found
    assert np.array_equal(logits, expected)
    assert streamed == tokens


@pytest.mark.parametrize(
    ("is_whole", "streamed"), repeats_are_slow([(False, 0), (True, 4), (False, 4), (True, 0)])
)
@pytest.mark.linux_ways
def test_it_is_counted_how_often_each_is_used(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, is_whole: bool, streamed: int
) -> None:
    """By the model's own numbers, wherever its experts are: in chunks, and one token at a time."""
    checkpoint = tiny_checkpoint("mixtral")
    plan = make_plan(checkpoint.spec, "mixed_2_then_3", model=checkpoint.path.name)
    if is_whole:
        plan = with_whole_experts(plan, checkpoint.spec)
    options = LoadOptions(
        dtype="float32", plan=streaming(plan, streamed), observes=True, concurrency=2
    )
    prompts = [checkpoint.prompt(PROMPT_TOKENS), checkpoint.prompt(7)]

    async def observe() -> tuple[list[list[int]], dict[int, Array]]:
        async with (
            await edge.AsyncCluster.connect(five_peers.peers) as cluster,
            await cluster.load(checkpoint.path, options) as model,
        ):
            replies = await model.generate(prompts, max_new_tokens=6)
            counts: dict[int, Array] = {}
            async for each, uses in model._observed(checkpoint.spec):
                assert isinstance(each, ObservedExperts)
                counts[each.layer] = uses
        return [list(reply.token_ids) for reply in replies], counts

    answers, counts = asyncio.run(observe())
    # Nothing follows the last token of a reply, so it is not computed with.
    texts = [[*own, *answer[:-1]] for own, answer in zip(prompts, answers, strict=True)]
    assert list(counts) == list(range(checkpoint.spec.num_layers))
    for layer, uses in counts.items():
        assert uses.tolist() == uses_by_transformers(checkpoint, texts, layer)
