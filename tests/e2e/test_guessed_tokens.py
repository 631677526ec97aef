"""Guesses change the number of steps, and no token; wherever a device stands in a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edge
from edge.demos.bundled import MODEL
from tests.support.checkpoints import make_checkpoint
from tests.support.further_heads import add_further_head
from tests.support.plans import bundled_plan, make_plan

PROMPT = "Where does the cat live? The cat lives in the barn. Where does the cat live?"
NEW_TOKENS = 40
SAMPLED = {"temperature": 0.4, "seed": 3, "repetition_penalty": 1.05}


@pytest.mark.parametrize("layout", ["solo", "pipeline_3", "tensor_3"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_without_guesses(
    five_peers: edge.Cluster, layout: str, sampling: dict[str, Any]
) -> None:
    with five_peers.load(MODEL, dtype="float32", plan=bundled_plan(layout)) as model:

        def reply(prompt: str, **options: Any) -> edge.Reply:
            return model.generate(
                prompt, max_new_tokens=120, ignore_eos=True, logprobs=1, **sampling, **options
            )

        plain = reply(PROMPT, speculate="off")
        assert "drafted_tokens" not in plain.statistics
        guessed = reply(PROMPT, speculate="lookup")
        assert guessed.token_ids == plain.token_ids == reply(PROMPT).token_ids
        figures = guessed.statistics
        assert 0 < figures["accepted_tokens"] < figures["drafted_tokens"]
        assert figures["tokens_per_pass"] > 1
        with pytest.raises(edge.RequestError, match="which was not loaded; load the model with"):
            reply(PROMPT, speculate="mtp")
        # Bits follow from the tokens, and not from how many were guessed at once.
        again = reply(PROMPT, speculate="lookup")
        assert again.logprobs == guessed.logprobs


def test_a_model_without_a_further_head(five_peers: edge.Cluster) -> None:
    with pytest.raises(edge.RequestError, match=r"no further head .* of deepseek_v3, glm4_moe"):
        five_peers.load(MODEL, speculate="mtp")


@pytest.mark.parametrize("layout", ["solo", "pipeline_2", "tensor_3"])
def test_a_further_head_changes_no_token(
    five_peers: edge.Cluster, tmp_path: Path, layout: str
) -> None:
    """Its guesses are as right as those of the same head behind the same states."""
    checkpoint = make_checkpoint(tmp_path / "glm4_moe", "glm4_moe")
    add_further_head(checkpoint, alike=True)
    prompt, long = checkpoint.prompt(30), checkpoint.prompt(333)
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    with five_peers.load(checkpoint.path, dtype="float32", plan=plan, speculate="mtp") as model:
        for tokens in (prompt, long):
            plain = model.generate(tokens, max_new_tokens=NEW_TOKENS, speculate="off")
            guessed = model.generate(tokens, max_new_tokens=NEW_TOKENS)
            assert guessed.token_ids == plain.token_ids
            figures = guessed.statistics
            assert NEW_TOKENS / 4 < figures["accepted_tokens"] < figures["drafted_tokens"]
