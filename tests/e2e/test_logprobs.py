"""How likely tokens were is what `transformers` finds, however the model is split."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan

LARGEST_DIFFERENCE = 1e-4
NEW_TOKENS = 6


@pytest.mark.parametrize("layout", ["solo", "pipeline_2", "tensor_3", "mixed_2_then_3"])
def test_they_are_the_log_softmax_of_transformers(
    five_peers: edge.Cluster, tiny_checkpoint: Callable[..., TinyCheckpoint], layout: str
) -> None:
    """Of raw logits, whatever chooses the tokens, and of requests that run at once."""
    checkpoint = tiny_checkpoint("many_words")
    prompts = [checkpoint.prompt(length) for length in (9, 5, 7)]
    choices = [
        {},
        {"temperature": 1.3, "top_p": 0.9, "seed": 4},
        {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.4, "seed": 5},
    ]
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    with five_peers.load(checkpoint.path, dtype="float32", plan=plan, concurrency=3) as model:
        plain = model.generate(prompts[0], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        streams = [
            model.stream(
                prompt,
                max_new_tokens=NEW_TOKENS,
                ignore_eos=True,
                logprobs=number,
                **choice,  # type: ignore[arg-type]
            )
            for number, (prompt, choice) in enumerate(zip(prompts, choices, strict=True))
        ]
        tokens = [list(stream) for stream in streams]
        replies = [stream.reply() for stream in streams]
        own = model.tokenizer.decode
        assert not plain.logprobs
        assert not plain.top_logprobs
        assert plain.token_ids == replies[0].token_ids
        for count, (prompt, reply, told) in enumerate(zip(prompts, replies, tokens, strict=True)):
            logits = checkpoint.logits([*prompt, *reply.token_ids])[len(prompt) - 1 : -1]
            expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
            for row, token, kept, top in zip(
                expected, told, reply.logprobs, reply.top_logprobs, strict=True
            ):
                assert token.logprob == kept.logprob
                assert (token.top_logprobs, token.token_id) == (top, kept.token_id)
                assert kept.logprob == pytest.approx(row[kept.token_id], abs=LARGEST_DIFFERENCE)
                values = [each.logprob for each in top]
                np.testing.assert_allclose(
                    values, np.sort(row)[::-1][:count], atol=LARGEST_DIFFERENCE
                )
                for each in top:
                    assert each.logprob == pytest.approx(row[each.token_id], abs=LARGEST_DIFFERENCE)
                    assert each.text.strip() == own([each.token_id], False).strip()
