"""What a tokenizer is said to be without building it is what the built one is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.errors import CheckpointError
from edge.text import Tokenizer, read_end_ids, read_tokenizer_files
from edge.text.tokenizer_facts import MAX_NAMED, describe_tokenizer
from tests.support.small_tokenizers import CHAT_TEMPLATE, KINDS, byte_level, write_checkpoint

DEMO = Path(__file__).parents[3] / "demos" / "model"

WORDS = {
    "byte_level": "BPE, byte level",
    "byte_fallback": "BPE, byte fallback",
    "few_bytes": "BPE, byte fallback",
    "unigram": "Unigram",
    "words": "WordLevel",
    "far_reaching": "BPE, byte fallback",
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_each_kind(name: str, tmp_path: Path) -> None:
    settings = {"eos_token": "</end>", "pad_token": "<pad>", "additional_special_tokens": ["<x>"]}
    write_checkpoint(tmp_path, KINDS[name](), {**settings, "chat_template": CHAT_TEMPLATE})
    built = Tokenizer.open(tmp_path)
    end = built.token_id("</end>")
    assert end is not None
    found = describe_tokenizer(read_tokenizer_files(tmp_path), (0, 10**6))
    assert found.file == tmp_path / "tokenizer.json"
    assert found.kind == WORDS[name]
    assert found.vocab_size == built.vocab_size
    assert found.special_tokens == built.special_tokens
    assert found.chat_templates == {"default": CHAT_TEMPLATE}
    assert found.end_tokens[10**6] is None
    first = found.end_tokens[0]
    assert first is not None
    assert built.token_id(first) == 0


def test_the_bundled_model() -> None:
    built = Tokenizer.open(DEMO)
    ends = read_end_ids(DEMO)
    found = describe_tokenizer(read_tokenizer_files(DEMO), ends)
    assert found.vocab_size == built.vocab_size
    assert found.special_tokens == built.special_tokens
    assert found.end_tokens == {2: "<|end|>"}


def test_tokens_that_are_spelt_like_the_merges(tmp_path: Path) -> None:
    """The merges are left out where they are the file's end; nothing else is."""
    write_checkpoint(tmp_path, byte_level())
    path = tmp_path / "tokenizer.json"
    value = json.loads(path.read_text())
    vocabulary = value["model"]["vocab"]
    for odd in ('"merges": [', '\\"merges": [', "merges"):
        vocabulary[odd] = len(vocabulary) + 1
    path.write_text(json.dumps(value))
    files = read_tokenizer_files(tmp_path)
    count = len(vocabulary) + 1  # one more is added
    assert describe_tokenizer(files, ()).vocab_size == count
    model = value.pop("model")
    path.write_text(json.dumps({"model": {"merges": model.pop("merges"), **model}, **value}))
    assert describe_tokenizer(read_tokenizer_files(tmp_path), ()).vocab_size == count


def test_no_more_is_told_than_people_read(tmp_path: Path) -> None:
    settings = {f"odd{number}_token": "x" * 500 for number in range(100)}
    write_checkpoint(tmp_path, byte_level(), settings)
    found = describe_tokenizer(read_tokenizer_files(tmp_path), range(500))
    assert len(found.special_tokens) == len(found.end_tokens) == MAX_NAMED
    assert max(map(len, found.special_tokens.values())) == 100


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"model": {"vocab": 3}}', '{"model": 1}'])
def test_what_is_no_tokenizer(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json .*download it again"):
        describe_tokenizer(read_tokenizer_files(tmp_path), ())
