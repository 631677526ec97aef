"""Tokenizers in GGUF files make the ids of the tokenizers that they were made from."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from edge.errors import CheckpointError
from edge.models.gguf_architectures import ARCHITECTURES
from edge.offload import GgufFile
from edge.text import TextStream, Tokenizer
from edge.text.gguf import gguf_end_ids, gguf_templates, gguf_tokenizer_files, has_tokenizer
from edge.text.pre_tokenizers import PRE_TOKENIZERS
from tests.support.gguf_files import add_byte_level, add_gemma4, add_sentence_pieces
from tests.support.small_tokenizers import CHAT_TEMPLATE, TEXTS, byte_fallback, byte_level

Metadata = dict[str, Any]

MORE_TEXTS = [
    *TEXTS,
    "12345 1 22 333 4444 ½ ² ٣٤",
    "don't DON'T I'LL we've 's 'S 'tis",
    "def f(x):\n\treturn x ** 2  # why?\r\n\r\n\n   \n",
    "CamelCaseWords andHTTPServer ÀÉÎ àéî ǅ ʰ",
    "a\u00a0b\u3000c\u2028d",
    "$100 <=> ^~|`'\"\\ ...!!! (x)[y]{z}/*",
    "<|begin|>inside<|end|> <|end|>",
    "鿿龥ࠀ가힣 한국어 漢字かな",
]


def metadata_of(folder: Path, add: Callable[[Any], None]) -> Metadata:
    path = folder / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with GgufFile(path) as file:
        return dict(file.metadata)


def opened(metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer(gguf_tokenizer_files(metadata, Path("it.gguf")))


def byte_level_metadata(folder: Path, pre: str | None = "qwen2", **settings: Any) -> Metadata:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return metadata_of(
        folder, lambda writer: add_byte_level(writer, byte_level(), pre=pre, settings=named)
    )


def pieces_metadata(folder: Path, **settings: Any) -> Metadata:
    named = {f"ggml.{key}": value for key, value in settings.items()}
    return metadata_of(
        folder, lambda writer: add_sentence_pieces(writer, byte_fallback(), settings=named)
    )


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


WORDS = "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
REST = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"

ORIGINALS: Mapping[str, Sequence[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": [
        split(f"{SHORT}|{WORDS}|\\p{{N}}{{1,3}}|{REST}"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        split(f"{SHORT}|{WORDS}|\\p{{N}}|{REST}"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""How publishers cut text into words, spelt in another way than the product does."""


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_ids_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    original = byte_level()
    original.pre_tokenizer = pre_tokenizers.Sequence(list(ORIGINALS[pre]))
    if pre != "qwen2":
        original = without_normalizer(original)
    found = opened(
        metadata_of(
            tmp_path,
            lambda writer: add_byte_level(
                writer,
                original,
                pre=pre,
                settings={"ggml.bos_token_id": 0, "ggml.add_bos_token": True},
            ),
        )
    )
    for text in MORE_TEXTS:
        ids = original.encode(text).ids
        if pre == "llama-bpe":  # a word that is a token is one, whatever merges say
            ids = whole_words(original).encode(text).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids) == original.decode(ids)
        stream = TextStream(found)
        assert "".join([*map(stream.push, ids), stream.finish()]) == original.decode(ids)


def without_normalizer(original: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    changed = json.loads(original.to_str()) | {"normalizer": None}
    return tokenizers.Tokenizer.from_str(json.dumps(changed))


def whole_words(original: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    changed = json.loads(original.to_str())
    changed["model"]["ignore_merges"] = True
    return tokenizers.Tokenizer.from_str(json.dumps(changed))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_cut_loses_nothing(pre: str, tmp_path: Path) -> None:
    found = opened(byte_level_metadata(tmp_path, pre, ggml__add_bos_token=False))
    for text in MORE_TEXTS:
        whole = found.decode(found.encode(text), skip_special_tokens=False)
        assert whole in (text, unicodedata.normalize("NFC", text))


def joined_by_score(text: str, metadata: Metadata, *, space_before: bool) -> list[int]:
    """SentencePiece's own rule, step by step: of all neighbours that are a token together, those of
    the best score are joined, the first of equals; what is no token then is bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: place for place, token in enumerate(tokens)}
    pieces = list((" " * (space_before and bool(text)) + text).replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[ids[first + second]], place)
            for place, (first, second) in enumerate(itertools.pairwise(pieces))
            if ids.get(first + second, 0) > 258
        ]
        if not pairs:
            break
        place = min(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return [
        token_id
        for piece in pieces
        for token_id in (
            [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        )
    ]


@pytest.mark.parametrize("space_before", [True, False])
def test_pieces_are_joined_by_their_scores(space_before: bool, tmp_path: Path) -> None:
    metadata = pieces_metadata(
        tmp_path, bos_token_id=1, eos_token_id=2, add_space_prefix=space_before
    )
    found = opened(metadata)
    for text in MORE_TEXTS:
        if "<s>" in text:
            continue
        ids = joined_by_score(text, metadata, space_before=space_before)
        assert found.encode(text) == [1, *ids], text
        stream = TextStream(found)
        shown = "".join([*map(stream.push, found.encode(text)), stream.finish()])
        assert shown == found.decode(found.encode(text)) == text


def test_pieces_are_those_of_the_original(tmp_path: Path) -> None:
    """Which knows one way to join each token; files know all of them, so few texts differ."""
    original, found = byte_fallback(), opened(pieces_metadata(tmp_path, bos_token_id=1))
    same = [original.encode(text).ids == found.encode(text) for text in MORE_TEXTS]
    assert sum(same) >= len(same) - 3
    marked = "<s>marked</s> text"  # special tokens are tokens, with a space before what follows
    assert found.encode(marked) == original.encode(marked).ids


def test_pieces_of_gemma4_are_joined_by_the_merges_of_the_file(tmp_path: Path) -> None:
    """No space is before a text, and every id is that of the original."""
    original = byte_fallback()
    original.normalizer = normalizers.Replace(" ", "▁")
    settings = {"ggml.bos_token_id": 1, "ggml.add_space_prefix": False}
    for named in (settings, {"ggml.bos_token_id": 1}):
        add = partial(add_gemma4, tokenizer=original, settings=named)
        found = opened(metadata_of(tmp_path, add))
        for text in MORE_TEXTS:
            ids = original.encode(text).ids
            assert found.encode(text) == ids, text
            assert found.decode(ids) == text.replace("<s>", "").replace("</s>", "")


def test_what_stands_around_a_text(tmp_path: Path) -> None:
    ids: dict[str, Any] = {"ggml__bos_token_id": 0, "ggml__eos_token_id": 1}
    plain = opened(byte_level_metadata(tmp_path, **ids)).encode("fox")
    both: dict[str, Any] = {"ggml__add_bos_token": True, "ggml__add_eos_token": True}
    assert opened(byte_level_metadata(tmp_path, **ids, **both)).encode("fox") == [0, *plain, 1]
    assert opened(byte_level_metadata(tmp_path, "llama-bpe", **ids)).encode("fox")[0] == 0
    assert opened(byte_level_metadata(tmp_path, "llama-bpe")).encode("fox")[0] != 0
    assert opened(pieces_metadata(tmp_path, bos_token_id=1)).encode("fox")[0] == 1
    without = pieces_metadata(tmp_path, bos_token_id=1, add_bos_token=False)
    assert opened(without).encode("fox")[0] != 1
    outside = byte_level_metadata(tmp_path, ggml__bos_token_id=9999, ggml__add_bos_token=True)
    assert opened(outside).encode("fox") == plain


def test_chats_go_through_the_template_of_the_file(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "chat_template": CHAT_TEMPLATE,
        "ggml__bos_token_id": 0,
        "ggml__eos_token_id": 1,
    }
    found = opened(byte_level_metadata(tmp_path, **settings))
    assert found.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    messages = [{"role": "user", "content": "hi"}]
    prompt = found.chat(messages)
    assert prompt == "<|begin|><|user|>hi<|end|>\n<|assistant|>"
    assert found.encode_chat(messages)[0] == 0
    found.close()


def test_several_templates_by_name(tmp_path: Path) -> None:
    settings = {
        "chat_template": "one",
        "chat_templates": ["tool_use", "gone"],
        "chat_template.tool_use": "two",
    }
    metadata = metadata_of(
        tmp_path,
        lambda writer: add_byte_level(writer, byte_level(), pre="gpt-2", settings=settings),
    )
    found = gguf_templates(metadata, Path("it.gguf"))
    assert found == {"default": ("one", "it.gguf"), "tool_use": ("two", "it.gguf")}


def test_where_answers_end(tmp_path: Path) -> None:
    assert gguf_end_ids({}) == ()
    metadata = byte_level_metadata(tmp_path, ggml__eos_token_id=7, ggml__eot_token_id=9)
    assert gguf_end_ids(metadata) == (7, 9, 1)  # <|end|> is a control token of such a name
    assert gguf_end_ids({"tokenizer.ggml.eos_token_id": "x"}) == ()


NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


@pytest.mark.parametrize(
    ("tokens", "types", "ends"),
    [
        # gpt-oss: messages of one answer end with <|end|>.
        (("<|end|>", "<|call|>", "<|return|>", "<|channel|>"), (3, 3, 3, 3), {1, 2}),
        (("<|end|>", "<|calls|>", "<|flush|>"), (3, 3, 3), {1, 2}),
        (("<|end|>", "<|channel|>"), (3, 3), set()),
        (("<|end|>", "<|user|>"), (3, 3), {0}),
        # Names count whatever the type.
        (("<|end|>", "<|im_end|>"), (USER_DEFINED, NORMAL), {0, 1}),
        (("<end_of_turn>", "<turn|>", "<end_of_utterance>"), (1, 1, 4), {0, 1, 2}),
        (("<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"), (1,) * 4, {0, 1, 2, 3}),
        # These may be words of the vocabulary, as </s> of HTML is.
        (("</s>", "<eos>", "[EOS]", "<EOT>", "[EOT]", "_<EOT>"), (NORMAL,) * 6, set()),
        (("</s>", "<eos>", "[EOS]", "<EOT>", "[EOT]", "_<EOT>"), (CONTROL,) * 6, set(range(6))),
    ],
)
def test_ends_by_name(tokens: tuple[str, ...], types: tuple[int, ...], ends: set[int]) -> None:
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types)}
    assert set(gguf_end_ids(metadata)) == ends
    assert set(gguf_end_ids({**metadata, "tokenizer.ggml.eos_token_id": 0})) == (
        ends if "<|channel|>" in tokens or "<|flush|>" in tokens else ends | {0}
    )


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
def test_a_mark_of_an_end_is_no_text_whatever_its_type(kind: int, tmp_path: Path) -> None:
    metadata = byte_level_metadata(tmp_path, "llama-bpe")
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[1] = kind  # <|end|>
    found = opened(metadata | {"tokenizer.ggml.token_type": types})
    ids = found.encode("fox<|end|>fox")
    assert ids.count(1) == 1
    assert found.decode(ids) == "foxfox"


CONVERTED: Mapping[str, Sequence[str]] = {
    "glm4": ["glm4", "chatglm-bpe"],
    "glm4moe": ["glm4"],
    "gpt-oss": ["gpt-4o"],
    "granite": ["refact", "dbrx", "granite-docling"],
    "lfm2": ["lfm2"],
    "lfm2moe": ["lfm2"],
    "llama": [
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "pixtral", "midm-2.0"),
        *("smollm", "deepseek-llm", "deepseek-coder", "seed-coder", "mellum", "minerva-7b"),
        *("viking", "trillion", "kormo", "tekken", "minicpm5", "starcoder", "default"),
    ],
    "mistral3": ["tekken"],
    "olmo2": ["dbrx", "superbpe"],
    "phi3": ["dbrx", "gpt-4o"],
    "qwen2": ["qwen2", "deepseek-r1-qwen", "megrez", "a.x-4.0"],
    "qwen2moe": ["qwen2"],
    "qwen2vl": ["qwen2"],
    "qwen3vl": ["qwen2"],
    "qwen3vlmoe": ["qwen2"],
    "qwen3": ["qwen2"],
    "qwen3moe": ["qwen2"],
    "qwen3next": ["qwen2"],
    "qwen35": ["qwen35"],
    "qwen35moe": ["qwen35"],
    "smollm3": ["smaug-bpe", "llama-bpe"],
}
"""Names of pre-tokenizers that converters write, by architecture."""

PIECES = {"gemma2", "gemma3", "gemma4"}
"""Architectures whose vocabularies have no pre-tokenizer."""


def test_every_architecture_has_its_pre_tokenizers() -> None:
    assert ARCHITECTURES.keys() == CONVERTED.keys() | PIECES
    for name, known in CONVERTED.items():
        assert set(known) <= PRE_TOKENIZERS.keys(), name


@pytest.mark.parametrize("pre", ["glm4", "chatglm-bpe", "dbrx"])
def test_words_of_llama_3_without_whole_words(pre: str, tmp_path: Path) -> None:
    original = without_normalizer(byte_level())
    original.pre_tokenizer = pre_tokenizers.Sequence(list(ORIGINALS["llama-bpe"]))
    found = opened(byte_level_metadata(tmp_path, pre, ggml__add_bos_token=False))
    for text in MORE_TEXTS:
        assert found.encode(text) == original.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_token_under_two_ids(model: str, tmp_path: Path) -> None:
    """A text becomes the first one; both have the text."""
    made = byte_level_metadata if model == "gpt2" else pieces_metadata
    metadata = made(tmp_path)
    tokens = metadata["tokenizer.ggml.tokens"]
    plain = opened(metadata)
    word = plain.encode("The quick brown fox")[-1]
    count = len(tokens)
    metadata["tokenizer.ggml.tokens"] = (*tokens, tokens[word], "", tokens[word])
    for key, value in (("token_type", NORMAL), ("scores", 0)):
        if (values := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            metadata[f"tokenizer.ggml.{key}"] = np.append(values, [value] * 3).astype(values.dtype)
    found = opened(metadata)
    assert found.vocab_size == count + 3
    for text in MORE_TEXTS:
        assert found.encode(text) == plain.encode(text)
    ids = plain.encode("The quick brown fox")
    for again in (count, count + 2):
        assert found.decode([*ids[:-1], again]) == plain.decode(ids)
        assert found.vocabulary.text_of(again) == plain.vocabulary.text_of(word)
        assert found.vocabulary.bytes_of(again) == plain.vocabulary.bytes_of(word)
        stream = TextStream(found, ids[:-1])
        assert stream.push(again) + stream.finish() == TextStream(plain, ids[:-1]).push(word)


def test_control_tokens_of_phi_3_take_the_space_behind_them(tmp_path: Path) -> None:
    """As its tokenizer.json says, and the file cannot."""
    original = byte_fallback()
    marks = ["<|user|>", "<|end|>", "<|assistant|>"]
    original.add_special_tokens([tokenizers.AddedToken(m, normalized=False) for m in marks])
    metadata = metadata_of(tmp_path, lambda writer: add_sentence_pieces(writer, original))
    of_phi = {**metadata, "general.architecture": "phi3"}
    text = "<s><|user|>\nhi<|end|>\n<|assistant|>\n"
    for each, rstrip in ((metadata, False), (of_phi, True)):
        expected = byte_fallback()
        expected.add_special_tokens(
            [tokenizers.AddedToken(m, normalized=False, rstrip=rstrip) for m in marks]
        )
        known = [expected.token_to_id(mark) for mark in marks]
        ids = opened({**each, "tokenizer.ggml.add_bos_token": False}).encode(text)
        assert [id for id in ids if id in known] == known
        assert (ids[-1] == known[-1]) is rstrip
        newline = expected.token_to_id("<0x0A>")
        assert (newline in ids) is not rstrip


def test_files_without_a_tokenizer() -> None:
    for metadata in ({}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}):
        assert not has_tokenizer(metadata)
    assert has_tokenizer({"tokenizer.ggml.model": "gpt2"})


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing, and a wrong pre-tokenizer makes"),
        ({"pre": "falcon"}, r"tokenizer\.ggml\.pre 'falcon' is not known here"),
        ({"pre": 7}, "is not known here"),
        ({"pre": np.zeros(2)}, "is not known here"),
        ({"model": np.zeros(2)}, r"tokenizer\.ggml\.model .* is not known here"),
        (
            {"model": "bert"},
            r"tokenizer\.ggml\.model 'bert' is not known here; gpt2, llama and gemma4",
        ),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": ()}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": ("a", "a", "[REPEATED_1]")}, "has a token twice"),
        ({"token_type": "x"}, "is not one number for each of"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": ("abc",)}, "an entry that is not two pieces"),
        ({"merges": ("nowhere tobefound",)}, "is not a tokenizer this version can read"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    changes: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    metadata = byte_level_metadata(tmp_path)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(CheckpointError, match=cause) as caught:
        opened(metadata)
    assert str(caught.value).startswith("it.gguf")


def test_empty_tokens_have_names_that_no_text_has(tmp_path: Path) -> None:
    metadata = byte_level_metadata(tmp_path)
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = (*tokens, "", "")
    del metadata["tokenizer.ggml.token_type"]
    assert opened(metadata).vocab_size == len(tokens) + 2


def test_pieces_that_would_take_too_long_are_refused(tmp_path: Path) -> None:
    metadata = pieces_metadata(tmp_path)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = (*tokens[:-1], "x" * 600)
    with pytest.raises(CheckpointError, match="a token of more than 512"):
        opened(metadata)
    many = [letter * count for letter in "ab" for count in range(1, 513)]
    metadata["tokenizer.ggml.tokens"] = tuple(dict.fromkeys((*tokens, *many)))
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.token_type"] = np.ones(count, np.int32)
    metadata["tokenizer.ggml.scores"] = np.zeros(count, np.float32)
    with pytest.raises(CheckpointError, match="in more ways than any model's"):
        opened(metadata)


def test_a_large_vocabulary(tmp_path: Path) -> None:
    """150,000 tokens with as many merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [first + second for first in letters for second in letters]
    triples = [(pair, letter) for pair in pairs[:8000] for letter in letters[:16]]
    tokens = [*letters, *pairs, *("".join(each) for each in triples)][:150_000]
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs]
    merges += [" ".join(each) for each in triples][: 150_000 - len(letters) - len(pairs)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.merges": tuple(merges),
    }
    assert opened(metadata).vocab_size == 150_000
