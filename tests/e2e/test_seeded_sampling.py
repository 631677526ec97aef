"""A seed gives the same tokens on every plan: those drawn from the logits of `transformers`,
by one request alone and by several with other settings at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import edge
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.reference import sample
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.slow_cases import repeats_are_slow

NEW_TOKENS = 16
PROMPT_TOKENS = 10
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 0.9, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.4},
    "said_and_biased": {
        "temperature": 0.8,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.5,
        "logit_bias": {7: 2.0, 30: -5.0},
    },
    "greedy_penalty": {"repetition_penalty": 1.4},
    "all": {
        "temperature": 1.1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
    },
}

Checkpoints = Callable[..., TinyCheckpoint]


def expected_tokens(
    checkpoint: TinyCheckpoint, prompt: list[int], settings: dict[str, Any], seed: int
) -> list[int]:
    parameters = SamplingParameters(**settings, seed=seed)
    history = list(prompt)
    for position in range(len(prompt), len(prompt) + NEW_TOKENS):
        logits = checkpoint.logits(history)[-1]
        history.append(
            sample(
                logits,
                history=history,
                prompt_tokens=len(prompt),
                parameters=parameters,
                position=position,
            )
        )
    return history[len(prompt) :]


@pytest.mark.parametrize(
    ("family", "layout"),
    # Shards of one stage choose a token in `tests/contract/test_token_choice.py`, however many.
    repeats_are_slow(
        [
            *itertools.product(["llama"], ["tensor_5", "solo", "pipeline_3", "mixed_2_then_3"]),
            *itertools.product(["qwen3"], ["pipeline_3", "solo", "tensor_5", "mixed_2_then_3"]),
            *itertools.product(["many_words"], ["mixed_2_then_3", "solo", "tensor_2", "tensor_3"]),
        ],
        of=(0,),
    ),
)
def test_a_seed_gives_the_same_tokens_on_every_plan(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints, family: str, layout: str
) -> None:
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    expected = {
        name: expected_tokens(checkpoint, prompt, settings, 7)
        for name, settings in SETTINGS.items()
    }
    with five_peers.load(
        checkpoint.path, dtype="float32", plan=plan, concurrency=len(SETTINGS)
    ) as model:
        draw = partial(model.stream, prompt, max_new_tokens=NEW_TOKENS, seed=7)
        streams = {name: draw(**settings) for name, settings in SETTINGS.items()}
        drawn = {name: [token.token_id for token in stream] for name, stream in streams.items()}
        alone = [token.token_id for token in draw(**SETTINGS["all"])]
    assert drawn == expected
    assert alone == expected["all"]


def test_another_seed_draws_other_tokens(
    five_peers: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    checkpoint = tiny_checkpoint("llama")
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    plan = make_plan(checkpoint.spec, "tensor_2", model=checkpoint.path.name)
    with five_peers.load(checkpoint.path, dtype="float32", plan=plan) as model:

        def draw(seed: int | None) -> edge.Reply:
            return model.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=seed)

        first, again, other = draw(1), draw(1), draw(2)
        unseeded = draw(None)
        repeated = draw(int(unseeded.statistics["seed"]))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids
    assert repeated.token_ids == unseeded.token_ids
