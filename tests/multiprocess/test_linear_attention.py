"""Models with states, or with layers whose heads differ: what a request has so far is right
wherever it was, or is computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import edge
from edge.memory.step_memory import cache_token_bytes, state_bytes
from edge.planning.load_options import STATES_AT_ONCE
from edge.weights.layout import shard_layout
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.replies import replies_at_once
from tests.support.slow_cases import repeats_are_slow

NEW_TOKENS = 72
"""More than a request computes at once while another waits."""


@pytest.mark.parametrize(
    ("has", "family"),
    repeats_are_slow(
        [
            ("linear attention", "qwen3_5"),
            ("windows", "gemma4"),
            ("inputs of layers", "gemma4_small"),
            ("latent heads", "deepseek_v3"),
            ("convolutions", "lfm2"),
            ("latent heads", "glm4_moe_lite"),
            ("windows", "gpt_oss"),
            ("linear attention", "qwen3_5_moe"),
        ],
        of=[0],
    ),
)
def test_requests_take_turns_and_a_chat_goes_on(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path, has: str, family: str
) -> None:
    """More requests than memory has tokens for, and then one that begins with an old one's all."""
    checkpoint = tiny_checkpoint(family)
    prompts = [checkpoint.prompt(40 + 7 * index) for index in range(4)]
    longest = 40 + 7 * 3 + NEW_TOKENS + 20
    plan = make_plan(checkpoint.spec, "tensor_2", model=checkpoint.path.name)
    layouts = [shard_layout(checkpoint.spec, plan, stage=0, rank=rank) for rank in range(2)]
    states = (
        2 * STATES_AT_ONCE * max(state_bytes(layout, "float32") for layout in layouts)
    )  # of gemma4 none
    tokens = 2 * longest * max(cache_token_bytes(layout, "float32") for layout in layouts)
    with (
        edge.Cluster.local(
            peers=2, threads=1, kv_memory=states + tokens, kv_disk=f"{tmp_path}:{10 << 20}"
        ) as cluster,
        cluster.load(
            checkpoint.path, dtype="float32", plan=plan, context_tokens=longest, concurrency=2
        ) as model,
    ):
        replies = replies_at_once(model, prompts, [NEW_TOKENS] * len(prompts))
        moved = [times.kv_written_bytes for times in model.measure()]
        first = replies[0]
        assert isinstance(first, list)
        turns = [[*prompts[0], *first, *checkpoint.prompt(9)], [*prompts[0][:30], *prompts[1][:9]]]
        following = [model.generate(turn, max_new_tokens=20).token_ids for turn in turns]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert isinstance(reply, list)
        checkpoint.check_greedy(prompt, reply, NEW_TOKENS)
    assert all(moved), f"some requests of a model with {has} left memory"
    for turn, answer in zip(turns, following, strict=True):
        checkpoint.check_greedy(turn, answer, 20)
