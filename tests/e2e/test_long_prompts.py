"""Prompts of many chunks give on several devices what they give on one, and in `transformers`.

Windows end long before, states are carried far, positions are late. The test asks for 700 tokens;
more take a core a minute or longer: python -m tests.e2e.test_long_prompts gemma3 --tokens 32768
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hub
from numpy.typing import NDArray

import edge
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.plans import make_plan

_NEW_TOKENS = 16
_CHUNK_TOKENS = 512
"""What `transformers` computes at once, where its masks are of every pair of tokens."""

_FAMILIES = {"gemma3": "eager", "gpt_oss": "eager", "qwen3_5": "sdpa"}
"""Windows, sinks and states; and how `transformers` attends. States it carries over one pass only,
whose attention must make no array of all pairs."""

_LARGEST_DIFFERENCE = 1e-4


def _check_long_prompt(cluster: edge.Cluster, folder: Path, family: str, tokens: int) -> None:
    """Asserts that greedy answers are the same, and as likely."""
    checkpoint = make_checkpoint(folder / family, family, context_tokens=tokens + 2 * _NEW_TOKENS)
    prompt = checkpoint.prompt(tokens)
    replies = []
    for layout in ("solo", "mixed_2x2"):
        plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
        with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
            replies.append(model.generate(prompt, max_new_tokens=_NEW_TOKENS, logprobs=0))
    answer = list(replies[0].token_ids)
    assert len(set(answer)) > 1
    logits = _last_logits(checkpoint, family, [*prompt, *answer[:-1]])
    likely = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    assert likely.argmax(axis=-1).tolist() == answer
    ranked = np.sort(likely, axis=-1)
    assert (ranked[:, -1] - ranked[:, -2]).min() > 3 * _LARGEST_DIFFERENCE
    for reply in replies:
        assert list(reply.token_ids) == answer
        found = np.asarray([each.logprob for each in reply.logprobs])
        assert np.abs(found - likely.max(axis=-1)).max() <= _LARGEST_DIFFERENCE


def _last_logits(checkpoint: TinyCheckpoint, family: str, tokens: list[int]) -> NDArray[np.float32]:
    """[_NEW_TOKENS, vocab], of the last tokens."""
    attention = _FAMILIES[family]
    model = hub.AutoModelForCausalLM.from_pretrained(
        checkpoint.path,
        dtype=torch.float32,
        attn_implementation=attention,
        experts_implementation="eager",
    ).eval()
    step = len(tokens) if attention == "sdpa" else _CHUNK_TOKENS
    cache = hub.DynamicCache(config=model.config)
    rows: list[NDArray[np.float32]] = []
    with torch.inference_mode():
        for start in range(0, len(tokens), step):
            ids = torch.tensor([tokens[start : start + step]])
            output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=_NEW_TOKENS)
            rows.append(output.logits[0].numpy())
    return np.concatenate(rows)[-_NEW_TOKENS:]


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=list(_FAMILIES), metavar="FAMILY")
    parser.add_argument("--tokens", type=int, default=32_768)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, edge.Cluster.local(peers=5, threads=1) as cluster:
        for family in wanted.families:
            _check_long_prompt(cluster, Path(folder), family, wanted.tokens)
            print(f"{family}: the same after {wanted.tokens:,} tokens", flush=True)


@pytest.mark.parametrize("family", _FAMILIES)
def test_answers_to_long_prompts_are_the_same_everywhere(
    five_peers: edge.Cluster, tmp_path: Path, family: str
) -> None:
    _check_long_prompt(five_peers, tmp_path, family, 700)


if __name__ == "__main__":
    _main()
