"""Folders that differ from their config.json are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edge.errors import CheckpointError
from edge.host.cache_paths import CACHE_VARIABLE
from edge.models.spec import tensor_shapes
from edge.offload import SafetensorsStore
from edge.text import read_tokenizer_files
from edge.weights.checkpoint import Checkpoint
from edge.weights.header import read_header
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.small_tokenizers import byte_level

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tied(folder: Path, family: str) -> tuple[TinyCheckpoint, dict[str, Any]]:
    """A checkpoint whose config.json says that its head is the embedding."""
    made = make_checkpoint(folder, family, layers=2)
    config = json.loads((made.path / "config.json").read_text())
    (made.path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(made.path / "model.safetensors")
    tensors.pop(HEAD, None)
    return made, tensors


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_a_head_of_its_own_is_used_where_config_says_tied(family: str, tmp_path: Path) -> None:
    import transformers

    made, tensors = tied(tmp_path / family, family)
    own = tensors[EMBEDDING] + np.float32(0.5)
    path = made.path / "model.safetensors"
    save_file({**tensors, HEAD: own}, path, metadata={"format": "pt"})
    with Checkpoint.open(made.path) as opened:
        assert not opened.spec.tied_embeddings
        assert "the files have another head" in opened.note
        np.testing.assert_array_equal(opened.store.read(opened.tensor_name("head")), own)
    assert read_header(made.path).claims.note == opened.note
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.path)
    np.testing.assert_array_equal(theirs.lm_head.weight.detach().numpy(), own)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_head_with_the_values_of_the_embedding_is_tied(dtype: Any, tmp_path: Path) -> None:
    """Whatever the size of the pieces that are compared; one other value makes it a head."""
    made, tensors = tied(tmp_path / "llama", "llama")
    tensors = {name: values.astype(dtype) for name, values in tensors.items()}
    for other in (0, 1):
        head = tensors[EMBEDDING].copy()
        head[-1, -1] += other
        save_file({**tensors, HEAD: head}, made.path / "model.safetensors")
        with Checkpoint.open(made.path) as opened:
            assert opened.spec.tied_embeddings != bool(other)
            assert bool(opened.note) == bool(other)


def test_an_equal_head_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the file has it read again."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    made, tensors = tied(tmp_path / "llama", "llama")
    read: list[str] = []

    def note(self: SafetensorsStore, name: str, *runs: Any) -> Any:
        read.append(name)
        return plain_read(self, name, *runs)

    plain_read = SafetensorsStore.read
    monkeypatch.setattr(SafetensorsStore, "read", note)
    for other in (0, 1):
        head = tensors[EMBEDDING] + np.float32(other)
        save_file({**tensors, HEAD: head}, made.path / "model.safetensors")
        for is_first in (True, False):
            read.clear()
            with Checkpoint.open(made.path) as opened:
                assert opened.spec.tied_embeddings != bool(other)
            assert (HEAD in read) == (is_first or bool(other))


def test_a_head_of_another_type_is_one_of_its_own(tmp_path: Path) -> None:
    made, tensors = tied(tmp_path / "llama", "llama")
    head = tensors[EMBEDDING].astype(np.float16)
    save_file({**tensors, HEAD: head}, made.path / "model.safetensors")
    with Checkpoint.open(made.path) as opened:
        assert not opened.spec.tied_embeddings


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_names_of_a_model_with_pictures_in_a_folder_of_text(
    family: str, prefix: str, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / family, family)
    with Checkpoint.open(made.path) as opened:
        spec = opened.spec
        roles = tensor_shapes(spec)
        expected = {role: opened.store.read(opened.tensor_name(role)) for role in roles}
    tensors = load_file(made.path / "model.safetensors")
    head = "language_model." if prefix == "language_model.model." else ""
    named = {
        f"{prefix}{name.removeprefix('model.')}" if name.startswith("model.") else head + name: each
        for name, each in tensors.items()
    }
    save_file(named, made.path / "model.safetensors")
    with Checkpoint.open(made.path) as opened:
        assert opened.spec == spec
        for role, values in expected.items():
            np.testing.assert_array_equal(opened.store.read(opened.tensor_name(role)), values)


def test_no_head_is_made_up_where_config_says_that_there_is_one(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "llama", "llama", layers=1)
    tensors = load_file(made.path / "model.safetensors")
    del tensors[HEAD]
    named = {name.replace("model.", "model.language_model.", 1): tensors[name] for name in tensors}
    for each in (tensors, named):
        save_file(each, made.path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            Checkpoint.open(made.path)


def test_a_tokenizer_may_have_more_tokens_than_the_model_has_rows(tmp_path: Path) -> None:
    """As Gemma 3 270M has, and models that were trained with a padding token more."""
    made = make_checkpoint(tmp_path / "llama", "llama", layers=1)
    byte_level().save(str(made.path / "tokenizer.json"))
    with Checkpoint.open(made.path) as opened:
        assert opened.tokenizer.vocab_size > opened.spec.vocab_size
        assert max(opened.end_ids, default=0) < opened.spec.vocab_size


def test_the_end_token_of_the_tokenizer_ends_answers_too(tmp_path: Path) -> None:
    """Makers of chat models change tokenizer_config.json and forget generation_config.json."""
    made = make_checkpoint(tmp_path / "llama", "llama", layers=1)
    tokenizer = byte_level()
    tokenizer.save(str(made.path / "tokenizer.json"))
    (made.path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    settings = made.path / "tokenizer_config.json"
    for named, ends in ((None, {5}), ("<|end|>", {5, 1}), ("nowhere", {5})):
        settings.write_text(json.dumps({} if named is None else {"eos_token": named}))
        with Checkpoint.open(made.path) as opened:
            assert opened.end_ids == ends
        facts = read_header(made.path).tokenizer
        assert facts is not None
        assert facts.end_tokens.keys() == ends
    (made.path / "tokenizer.json").write_text("{}")
    with Checkpoint.open(made.path) as opened:
        assert opened.end_ids == {5}


def test_a_chat_template_in_the_file_of_a_processor(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert templates(tmp_path) == {"default": "of the processor"}
    settings = {"chat_template": "of the tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert templates(tmp_path) == {"default": "of the tokenizer"}
    (tmp_path / "chat_template.jinja").write_text("of its own file")
    assert templates(tmp_path) == {"default": "of its own file"}


def templates(folder: Path) -> dict[str, str]:
    found = read_tokenizer_files(folder).chat_templates
    return {name: source for name, (source, _file) in found.items()}
