"""Text to tokens and back, against `transformers`, and the errors of their files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import AutoTokenizer

from edge.errors import CheckpointError, RequestError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.text import TextStream, Tokenizer, read_end_ids, read_sampling, unused_settings
from edge.text.gguf import gguf_sampling
from tests.support.small_tokenizers import (
    KINDS,
    TEXTS,
    byte_fallback,
    byte_level,
    write_checkpoint,
)

END_DECLARED = {
    "0": {"content": "<unk>", "special": True, "normalized": False},
    "2": {"content": "</s>", "special": True, "normalized": False, "rstrip": True},
    "270": {"content": "▁the", "special": False, "normalized": False},
}

# (kind, tokenizer_config.json, model type, special_tokens_map.json)
CHECKPOINTS: list[tuple[str, dict[str, Any], str, dict[str, Any] | None]] = [
    *((kind, {}, "llama", None) for kind in KINDS),
    # The post-processor decides what is added, not these two older settings.
    ("byte_level", {"bos_token": "<|begin|>", "add_bos_token": False}, "qwen3", None),
    ("byte_level", {"eos_token": "<|end|>", "add_eos_token": True}, "llama", None),
    ("byte_level", {"tokenizer_class": "LlamaTokenizerFast"}, "llama", None),
    ("byte_level", {"tokenizer_class": "Qwen2Tokenizer"}, "granite", None),
    ("byte_fallback", {"tokenizer_class": "LlamaTokenizer"}, "llama", None),
    ("byte_fallback", {"tokenizer_class": "LlamaTokenizer", "legacy": True}, "llama", None),
    ("byte_fallback", {"tokenizer_class": "LlamaTokenizer", "legacy": None}, "", None),
    (
        "byte_fallback",
        {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False, "pad_token": "<pad>"},
        "llama",
        None,
    ),
    (
        "byte_fallback",
        {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": END_DECLARED},
        "llama",
        {"eos_token": "ignored, because the settings declare the tokens"},
    ),
    ("byte_fallback", {"tokenizer_class": "LlamaTokenizer"}, "mistral", None),
    ("byte_fallback", {"added_tokens_decoder": END_DECLARED}, "mistral", None),
    # Declared as an ordinary token, but named as a special one.
    (
        "byte_fallback",
        {"added_tokens_decoder": END_DECLARED, "eos_token": "▁the"},
        "mistral",
        None,
    ),
    # A normalizer that changes a special token's spelling keeps it from being skipped.
    (
        "byte_fallback",
        {"added_tokens_decoder": {"2": {"content": "</s>", "special": True, "normalized": True}}},
        "mistral",
        None,
    ),
    ("few_bytes", {"tokenizer_class": "LlamaTokenizer"}, "llama", None),
    (
        "byte_level",
        {"additional_special_tokens": ["<|user|>", "quick"], "image_token": "<|image|>"},
        "llama",
        {"eos_token": {"content": "<|end|>", "lstrip": True}, "pad_token": "<|pad|>"},
    ),
    ("byte_level", {"extra_special_tokens": {"audio_token": "fox"}}, "llama", None),
    ("byte_level", {"split_special_tokens": True}, "llama", None),
    ("byte_level", {"clean_up_tokenization_spaces": True}, "llama", None),
    (
        "byte_level",
        {
            "clean_up_tokenization_spaces": True,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
        },
        "llama",
        None,
    ),
    ("unigram", {"clean_up_tokenization_spaces": True, "eos_token": "</s>"}, "llama", None),
    ("words", {"clean_up_tokenization_spaces": True}, "llama", None),
]


@pytest.mark.parametrize(("kind", "settings", "model_type", "special_tokens_map"), CHECKPOINTS)
def test_encode_and_decode_are_those_of_transformers(
    tmp_path: Path,
    kind: str,
    settings: dict[str, Any],
    model_type: str,
    special_tokens_map: dict[str, Any] | None,
) -> None:
    write_checkpoint(
        tmp_path,
        KINDS[kind](),
        settings,
        model_type=model_type,
        special_tokens_map=special_tokens_map,
    )
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.open(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert dict(ours.special_tokens).items() >= theirs.special_tokens_map.items()
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    everything = list(range(ours.vocab_size + 5))  # a padded vocabulary has ids without a token
    assert ours.decode(everything) == theirs.decode(everything, skip_special_tokens=True)
    stream = TextStream(ours)
    streamed = "".join([stream.push(token_id) for token_id in everything])
    assert streamed + stream.finish() == ours.decode(everything)
    assert ours.decode([]) == ""
    for text in TEXTS:
        ids = ours.encode(text)
        own = [ours.vocabulary.text_of(token_id) for token_id in ids]
        for token_id, each in zip(ids, own, strict=True):
            if ours.vocabulary.piece(token_id) is not None:
                assert each.strip() == theirs.decode([token_id]).strip()
        if not ours.cleans_up_spaces and "\ufffd" not in "".join(own):
            plain = "".join(e for i, e in zip(ids, own, strict=True) if ours.vocabulary.piece(i))
            assert plain.strip() == ours.decode(ids).strip(), "each has its space"


def test_a_text_is_never_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=500)
    ours = Tokenizer.open(write_checkpoint(tmp_path, tokenizer))
    assert ours.decode(ours.encode("The quick brown fox")) == "The quick brown fox"
    assert 3 < len(ours.encode("The quick brown fox")) < 500


def test_token_ids_of_single_tokens(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_fallback()))
    assert ours.token_id("</s>") == 2
    assert ours.token_id("no such token") is None


def test_what_cannot_be_encoded_or_decoded_is_the_callers_error(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    with pytest.raises(RequestError, match="valid Unicode"):
        ours.encode("half a surrogate pair: \ud83d")
    with pytest.raises(RequestError, match="token ids must be whole numbers"):
        ours.decode([1, -1])
    with pytest.raises(RequestError, match="token ids must be whole numbers"):
        ours.decode([2**40])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer\.json is missing; give the folder"),
        ("tokenizer.json", b"{", r"tokenizer\.json is not a tokenizer this .*download"),
        ("tokenizer.json", b"[]", r"tokenizer\.json is not a tokenizer this version can read"),
        ("tokenizer.json", b"{}", r"tokenizer\.json is not a tokenizer this version can read"),
        ("tokenizer.json", b"\xff\xfe", r"it is not UTF-8 text"),
        (
            "tokenizer.json",
            b"[" * 100_000,
            r"tokenizer\.json is not a tokenizer this version can read",
        ),
        ("tokenizer_config.json", b"3", r"tokenizer_config\.json is damaged: it holds a int"),
        ("tokenizer_config.json", b'{"tokenizer_class": 3}', "tokenizer_class must be text"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is a int, not text"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "lacks its name or"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "must be an object"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": "y"}}', "'x' is no token id"),
        ("tokenizer_config.json", b'{"eos_token": {"contents": "x"}}', "a token must be text or"),
        ("tokenizer_config.json", b'{"extra_special_tokens": "x"}', "must be a list"),
        ("config.json", b'{"model_type": 1}', r"config\.json is damaged: model_type must be text"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    write_checkpoint(tmp_path, byte_level())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.open(tmp_path)


def test_a_file_too_large_to_be_text_is_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level())
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no disk
    with pytest.raises(CheckpointError, match="more than 67,108,864"):
        Tokenizer.open(tmp_path)


def test_end_tokens_come_from_either_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 3}}))
    assert read_end_ids(tmp_path) == (3,)
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": 3}})
    )
    assert read_end_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, -1, 9, 2]}))
    assert read_end_ids(tmp_path) == (2, 9)


def test_a_checkpoint_may_say_nothing_about_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert read_end_ids(tmp_path) == ()


SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {}),
        ({}, {}),
        (SAMPLED, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({**SAMPLED, "do_sample": False}, {"temperature": 0.0, "top_p": 0.95, "top_k": 20}),
        ({"temperature": 0.6}, {}),
        ({"top_k": 50.0, "top_p": 0.9}, {"top_p": 0.9}),
        ({**SAMPLED, "top_k": -1, "min_p": 0.1}, {
            "temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.1,
        }),
        ({"repetition_penalty": 1.1, "temperature": None}, {"repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_how_tokens_are_chosen(tmp_path: Path, content: Any, expected: dict[str, Any]) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_sampling(tmp_path) == SamplingParameters(**expected)


def test_what_would_change_answers_and_is_not_used_is_known_by_name(tmp_path: Path) -> None:
    assert unused_settings(tmp_path) == ()
    library: Any = transformers
    config = library.GenerationConfig()
    usual = config._get_default_generation_params()
    told = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    (tmp_path / "generation_config.json").write_text(json.dumps({**told, **usual, **SAMPLED}))
    assert unused_settings(tmp_path) == (), "as in transformers where nothing is said"
    others = {"num_beams": 3, "suppress_tokens": [7], "max_length": 40}
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**usual, **others, "bos_token_id": 1, "_from_model_config": True})
    )
    assert set(unused_settings(tmp_path)) == set(others)


def test_what_the_file_leaves_open_is_as_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": true}')
    library: Any = transformers
    usual = library.GenerationConfig.from_pretrained(tmp_path)._get_default_generation_params()
    found = read_sampling(tmp_path)
    for name in ("temperature", "top_k", "top_p"):
        assert getattr(found, name) == usual[name]


@pytest.mark.parametrize(
    "content",
    [
        {"top_p": 2, "do_sample": True},
        {"temperature": "hot", "do_sample": True},
        {"repetition_penalty": "much"},
    ],
)
def test_sampling_that_cannot_be_names_the_file(tmp_path: Path, content: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*; correct the file"):
        read_sampling(tmp_path)


def test_sampling_of_a_gguf_file() -> None:
    path = Path("m.gguf")
    assert gguf_sampling({}, path) == SamplingParameters()
    found = gguf_sampling({"general.sampling.temp": 0.7, "general.sampling.top_k": 40}, path)
    assert found == SamplingParameters(temperature=0.7, top_k=40)
    found = gguf_sampling({"general.sampling.top_p": 0.9}, path)
    assert found == SamplingParameters(temperature=1.0, top_p=0.9)
    with pytest.raises(CheckpointError, match=r"m\.gguf: top_p must be"):
        gguf_sampling({"general.sampling.top_p": 9.0}, path)
    for name, key in (("top_k", "top_k"), ("temperature", "temp")):
        with pytest.raises(CheckpointError, match=rf"m\.gguf: {name} must be"):
            gguf_sampling({f"general.sampling.{key}": np.zeros(2)}, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json is missing"),
        ({"eos_token_id": "</s>"}, r"eos_token_id must be whole numbers .*correct the file"),
        ({"eos_token_id": [1, True]}, "eos_token_id must be"),
        ({"eos_token_id": 2**31}, "eos_token_id must be"),
    ],
)
def test_damaged_generation_settings_are_named(tmp_path: Path, content: Any, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        read_end_ids(tmp_path)
