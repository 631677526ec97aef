"""Families that are not quite Llama's shape give what `transformers` gives, however they are split.

Each on few plans: what a layer of it computes is the same on all of them, and other tests go
through the plans; stages of several shards, with these families, `test_exactness_quantized.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.family_sizes import MORE_FAMILIES, WITH_PICTURES
from tests.support.plans import make_plan
from tests.support.slow_cases import repeats_are_slow, shown_in_parts

LARGEST_DIFFERENCE = 1e-4
NEW_TOKENS = 32
PROMPT_TOKENS = 24
"""More than every window, and than the context that one was trained in."""

LONG_PROMPT_TOKENS = 277
"""More than one chunk of a prompt."""

PLANS = ("tensor_3", "pipeline_2")

WITH_THEIR_PICTURES = shown_in_parts("multiprocess/test_pictures.py")
"""Their answers to prompts with pictures are those of `transformers`."""

Checkpoints = Callable[..., TinyCheckpoint]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *repeats_are_slow((family, layout) for family in MORE_FAMILIES for layout in PLANS),
        *(pytest.param(name, "tensor_3", marks=WITH_THEIR_PICTURES) for name in WITH_PICTURES),
    ],
)
def test_logits_and_greedy_tokens_equal_transformers(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, family: str, layout: str
) -> None:
    """Of a prompt, of one of several chunks, and of two requests at once.

    The checkpoints put something to the test: tokens vary, no choice is a near tie that the last
    bits decide, windows are left behind.
    """
    checkpoint = tiny_checkpoint(family)
    prompt, long = checkpoint.prompt(PROMPT_TOKENS), checkpoint.prompt(LONG_PROMPT_TOKENS)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    with five_peers.load(checkpoint.path, dtype="float32", plan=plan) as model:
        logits = model.logits(prompt)
        long_logits = model.logits(long)
        replies = model.generate([prompt, prompt[3:]], max_new_tokens=NEW_TOKENS)
    for found, tokens in ((logits, prompt), (long_logits, long)):
        expected = checkpoint.logits(tokens)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= LARGEST_DIFFERENCE
    for reply, tokens in zip(replies, (prompt, prompt[3:]), strict=True):
        checkpoint.check_greedy(tokens, reply.token_ids, NEW_TOKENS)
    assert len({token for reply in replies for token in reply.token_ids}) >= 5
    ranked = np.sort(checkpoint.logits([*prompt, *replies[0].token_ids[:-1]]), axis=-1)
    assert (ranked[:, -1] - ranked[:, -2]).min() > 3 * LARGEST_DIFFERENCE
    windows = [each.window for each in checkpoint.spec.attentions.values()]
    assert all(window is None or window < PROMPT_TOKENS for window in windows)
