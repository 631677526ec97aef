"""A real GPU and processors of its host in one plan: as tests/gpu is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers.utils import logging

import edge
from edge.weights.checkpoint import Checkpoint
from tests.gpu.test_whole_shards import NOT_RUN
from tests.support.plans import make_plan

logging.disable_progress_bar()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NOT_RUN), reason=NOT_RUN)]

GPU, FIRST, SECOND = "local-1", "local-2", "local-3"
LAYOUTS = {
    "solo": [GPU],
    "pipeline_2": [FIRST, GPU],
    "pipeline_3": [FIRST, GPU, SECOND],
    "tensor_2": [GPU, FIRST],
    "tensor_3": [FIRST, SECOND, GPU],
}
NEW_TOKENS = 32
PROMPTS = [np.random.default_rng(n).integers(3, 4000, n).tolist() for n in (5, 24, 67)]


@pytest.fixture(scope="module")
def cluster(nothing_left_running_by_the_module: None) -> Iterator[edge.Cluster]:
    backends = ["triton", "ort", "ort"]
    with edge.Cluster.local(len(backends), backend=backends, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and what float32 `transformers` answers to the prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        num_hidden_layers=8, hidden_size=1024, intermediate_size=2816, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=4000, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:  # so that no two tokens are nearly as likely
                std = 1.0 if "embed" in name else weight.shape[1] ** -0.5
                weight.normal_(std=3 * std if "lm_head" in name else std)
        expected = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
    folder = tmp_path_factory.mktemp("llama") / "model"
    model.save_pretrained(folder)
    return folder, expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_transformers(
    layout: str, cluster: edge.Cluster, llama: tuple[Path, list[list[int]]]
) -> None:
    """In float32: one by one, and together in batches."""
    folder, expected = llama
    with Checkpoint.open(folder) as checkpoint:
        plan = make_plan(
            checkpoint.spec, layout, model=folder.name, devices=LAYOUTS[layout]
        )  # fmt: skip
    with cluster.load(
        folder, dtype="float32", accuracy="high", plan=plan, context_tokens=128, progress=False
    ) as model:
        replies = [model.generate(each, max_new_tokens=NEW_TOKENS) for each in PROMPTS]
        together = model.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [list(each.token_ids) for each in replies] == expected
    assert [list(each.token_ids) for each in together] == expected
