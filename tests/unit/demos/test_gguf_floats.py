"""What is made of a GGUF file's tensors and words, without such a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.demos.bench.gguf_floats import config, pairs_apart, tensor_name, tokenizer
from edge.demos.bench.quality import FormatRow
from edge.models.families import read_family
from edge.studies.logit_statistics import Figures
from edge.text import Tokenizer


def letters() -> list[str]:
    """The characters that stand for the 256 bytes, as GPT-2 writes them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [*map(chr, plain), *(chr(256 + number) for number in range(len(rest)))]


@pytest.fixture
def known() -> dict[str, Any]:
    """The words that are read of a file."""
    tokens = ["<|im_start|>", "<|im_end|>", *letters(), "in", "Ġin", "12"]
    return {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.rope.freq_base": 100000.0,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *([1] * (len(tokens) - 2))],
        "tokenizer.ggml.merges": ["i n", "Ġ in", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def test_rows_that_rotate_together_come_apart() -> None:
    """The converter of llama.cpp puts them side by side, by these two lines."""
    heads, size = 3, 8
    weight = np.random.default_rng(1).standard_normal((heads * size, 5)).astype(np.float32)
    paired = weight.reshape(heads, 2, size // 2, 5).swapaxes(1, 2).reshape(weight.shape)
    assert not np.array_equal(paired, weight)
    np.testing.assert_array_equal(pairs_apart(paired, heads), weight)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.7.attn_output.weight", "model.layers.7.self_attn.o_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_names(theirs: str, ours: str) -> None:
    assert tensor_name(theirs) == ours


def test_the_config_is_one_that_is_read(known: dict[str, Any]) -> None:
    made = config(known, tied=True)
    assert made["rms_norm_eps"] == 1e-5
    _family, spec = read_family(json.loads(json.dumps(made)), source="here")
    assert (spec.hidden_size, len(spec.layers), spec.tied_embeddings) == (64, 2, True)


def test_the_tokenizer_takes_digits_one_by_one(known: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer(known)), encoding="utf-8")
    made = Tokenizer.open(tmp_path)
    tokens = known["tokenizer.ggml.tokens"]
    ids = made.encode("<|im_start|>in in 12é")
    assert [tokens[id] for id in ids] == ["<|im_start|>", "in", "Ġin", "Ġ", "1", "2", "Ã", "©"]
    assert made.decode(ids) == "in in 12é"


def test_another_tokenizer_is_refused(known: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="only the tokenizer of SmolLM"):
        tokenizer(known | {"tokenizer.ggml.pre": "qwen2"})


def test_a_line_of_the_table() -> None:
    found = Figures(perplexity=27.789, mean_kl=0.0049, p99_kl=0.0155, same_top=0.9495)
    row = FormatRow(name="Edge int8", figures=found, bytes_per_weight=1.125, num_weights=10**8)
    assert str(row) == "| Edge int8 | 27.79 | 0.0049 | 0.0155 | 94.95 | 1.125 | 112.5 |"
