"""Models in GGUF over real daemons give what `transformers` gives for the weights in the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edge
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Type, write_gguf
from tests.support.plans import make_plan
from tests.support.processes import edge as run_edge
from tests.support.small_tokenizers import CHAT_TEMPLATE, byte_level

LARGEST_DIFFERENCE = 1e-4
NEW_TOKENS = 12
PROMPT_TOKENS = 24

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    [
        ("llama", Type.Q4_0, "tensor_3"),
        ("llama_with_biases", Type.F16, "tensor_5"),
        ("llama_in_blocks", Type.Q4_K, "pipeline_2"),
        ("llama_in_blocks", Type.Q6_K, "tensor_3"),
        ("mistral", Type.BF16, "tensor_3"),
        ("qwen2_in_blocks", Type.Q5_1, "tensor_3"),
        ("qwen3_in_blocks", Type.Q8_0, "pipeline_3"),
    ],
)
def test_logits_and_greedy_tokens_equal_transformers(
    five_peers: edge.Cluster, tmp_path: Path, name: str, kind: int, layout: str
) -> None:
    made = make_checkpoint(tmp_path / "made", name)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, made.path, kind=kind)
    prompt = meant.prompt(PROMPT_TOKENS)
    plan = make_plan(meant.spec, layout, model=path.name)
    with five_peers.load(path, dtype="float32", plan=plan) as model:
        logits = model.logits(prompt)
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS)
    expected = meant.logits(prompt)
    assert np.abs(logits - expected).max() <= LARGEST_DIFFERENCE
    assert list(reply.token_ids) == meant.greedy(prompt, NEW_TOKENS)


def test_int4_gives_what_the_same_weights_give_from_a_folder(
    five_peers: edge.Cluster, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "made", "llama_in_blocks")
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, made.path, kind=Type.Q4_1)
    prompt = meant.prompt(PROMPT_TOKENS)
    found = []
    for place in (path, meant.path):
        with five_peers.load(place, dtype="int4") as model:
            found.append(model.logits(prompt))
    np.testing.assert_array_equal(found[0], found[1])


def test_commands_take_a_file(tmp_path: Path) -> None:
    """`run` and `chat`, with the chat template of the file, and `plan`; also a folder of it."""
    made = make_checkpoint(tmp_path / "made", "larger_llama")
    byte_level().save(str(made.path / "tokenizer.json"))
    folder = tmp_path / "downloads"
    folder.mkdir()
    path = folder / "small.gguf"
    settings = {
        "chat_template": CHAT_TEMPLATE,
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "ggml.add_bos_token": True,
    }
    write_gguf(path, made.path, kind=Type.Q8_0, tokenizer_settings=settings)
    planned = run_edge("plan", path, "--local", "1")
    assert planned.code == 0, planned.err
    assert "small.gguf" in planned.out
    replies = [
        run_edge("run", place, "-p", "The quick", *more, "--local", "1", "-n", "4")
        for place, more in ((path, ()), (folder, ()), (path, ("--chat",)))
    ]
    assert [reply.code for reply in replies] == [0, 0, 0], replies[-1].err
    assert replies[0].out == replies[1].out
    assert replies[0].out.strip()
    talk = run_edge("chat", path, "--local", "1", "-n", "4", stdin="Hello\n")
    assert talk.code == 0, talk.err
    assert talk.out.strip()
