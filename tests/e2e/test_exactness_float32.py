"""float32 over real daemons and real TCP gives what `transformers` gives, however it is split."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.family_sizes import FAMILIES
from tests.support.plans import LAYOUTS, make_plan
from tests.support.slow_cases import every_pair, repeats_are_slow
from tests.support.specs import shape

LARGEST_DIFFERENCE = 1e-4
NEW_TOKENS = 20
PROMPT_TOKENS = 24
"""More than the sliding windows of the families that have one."""

LONG_PROMPT_TOKENS = 333
"""More than one chunk of a prompt, and no multiple of anything."""

OF_EVERY_FAMILY = ("tensor_5", "mixed_2_then_3")
"""Layouts that cut layers, and stages, in every way; one family meets the others, too."""

OF_OTHERS = ("solo", "pipeline_3", "tensor_3")
"""Each of which one or two more families meet."""

Checkpoints = Callable[..., TinyCheckpoint]


def assert_exact(
    cluster: edge.Cluster,
    checkpoint: TinyCheckpoint,
    layout: str,
    *,
    prompt: list[int],
    new_tokens: int,
) -> None:
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
        logits = model.logits(prompt)
        mean = model.embed(prompt, normalize=False)
        last = model.embed([prompt[:5], prompt], pooling="last", normalize=False)
        reply = model.generate(prompt, max_new_tokens=new_tokens)
    states = checkpoint.states(prompt)
    assert np.abs(mean - states.mean(axis=0)).max() <= LARGEST_DIFFERENCE
    assert np.abs(last - states[[4, -1]]).max() <= LARGEST_DIFFERENCE
    expected = checkpoint.logits(prompt)
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= LARGEST_DIFFERENCE
    checkpoint.check_greedy(prompt, reply.token_ids, new_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoints_put_something_to_the_test(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    """Tokens vary, no choice is a near tie that the last bits decide, windows are left behind."""
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    tokens = checkpoint.greedy(prompt, NEW_TOKENS)
    assert len(set(tokens)) >= 8
    ranked = np.sort(checkpoint.logits(prompt + tokens), axis=-1)
    assert (ranked[:, -1] - ranked[:, -2]).min() > 5 * LARGEST_DIFFERENCE
    assert all(
        window is None or window < PROMPT_TOKENS for window in shape(checkpoint.spec).windows
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    repeats_are_slow(
        [
            *(("llama", layout) for layout in LAYOUTS if layout not in OF_EVERY_FAMILY),
            *product(FAMILIES, OF_EVERY_FAMILY),
            *zip([*FAMILIES][1:], cycle(OF_OTHERS)),
        ]
    ),
)
def test_logits_and_greedy_tokens_equal_transformers(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, family: str, layout: str
) -> None:
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    assert_exact(five_peers, checkpoint, layout, prompt=prompt, new_tokens=NEW_TOKENS)


@pytest.mark.parametrize(
    ("family", "layout"),
    repeats_are_slow(product(["llama", "mistral", "qwen2"], ["pipeline_3", "tensor_3"])),
)
def test_a_prompt_of_several_chunks_is_exact(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, family: str, layout: str
) -> None:
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(LONG_PROMPT_TOKENS)
    assert_exact(five_peers, checkpoint, layout, prompt=prompt, new_tokens=16)


@pytest.mark.parametrize(
    ("variant", "family", "layout"),
    repeats_are_slow(
        every_pair(
            [{"stored_type": "bfloat16"}, {"stored_type": "float16"}, {"file_size": "200KB"}],
            ["llama_with_biases", "qwen3"],
            ["pipeline_2", "tensor_3"],
        )
    ),
)
def test_stored_types_and_several_files_are_exact(
    five_peers: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    family: str,
    variant: dict[str, Any],
    layout: str,
) -> None:
    checkpoint = tiny_checkpoint(family, **variant)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    assert_exact(five_peers, checkpoint, layout, prompt=prompt, new_tokens=16)


@pytest.mark.parametrize("layout", ["solo", "tensor_5"])
def test_a_full_context_is_exact_to_its_last_token(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, layout: str
) -> None:
    """Chunk borders, the window and the end of the KV cache, with a context that is not round."""
    checkpoint = tiny_checkpoint("qwen2")
    prompt = checkpoint.prompt(301)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    with five_peers.load(checkpoint.path, dtype="float32", plan=plan, context_tokens=319) as model:
        reply = model.generate(prompt, max_new_tokens=100)
    assert reply.finish_reason == "length"
    assert list(reply.token_ids) == checkpoint.greedy(prompt, 319 - 301)
