"""Tokenizers that would take minutes or gigabytes for a short text are refused before that."""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from edge.errors import CheckpointError
from edge.text import Tokenizer
from edge.text.pattern_cost import pattern_cost
from edge.text.pre_tokenizers import PRE_TOKENIZERS
from edge.text.tokenizer_limits import check_parts, read_parts

MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}


def replaced(pattern: dict[str, str] | str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def in_order(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def around(single: list[dict[str, Any]], ids: int) -> dict[str, Any]:
    token = {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"a": token},
    }


def added(content: str, number: int = 0) -> dict[str, Any]:
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": 2 + number, "content": content, "normalized": True, **rules}


def charsmap(entry: str) -> str:
    return base64.b64encode(struct.pack("<I", 0) + entry.encode() + b"\0").decode()


TENFOLD = replaced({"String": "a"}, "a" * 10)
BOMBS = {
    "replaced again and again": {"normalizer": in_order("normalizers", TENFOLD, TENFOLD)},
    "without types": {
        "normalizer": {
            "normalizers": [{"pattern": {"String": "a"}, "content": "a" * 10} for _ in range(2)]
        }
    },
    "a long text for a letter": {"normalizer": replaced({"String": "a"}, "a" * 300)},
    "between all letters": {"normalizer": replaced({"String": ""}, "a" * 100)},
    "by a pattern of nothing": {"normalizer": replaced({"Regex": "b*"}, "a" * 100)},
    "what falls apart": {
        "normalizer": in_order(
            "normalizers", replaced({"String": "a"}, "\ufdfa" * 2), {"type": "NFKD"}, TENFOLD
        )
    },
    "in one and the other part": {
        "normalizer": TENFOLD,
        "pre_tokenizer": in_order(
            "pretokenizers", *[{"type": "Metaspace", "replacement": each} for each in "_-="]
        ),
    },
    "by a table": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("a" * 99)}
    },
    "before each stretch": {
        "normalizer": {"type": "Prepend", "prepend": "a" * 99},
        "added_tokens": [added("b")],
    },
    "many steps": {"normalizer": in_order("normalizers", *[{"type": "NFC"}] * 65)},
    "groups of steps": {
        "pre_tokenizer": in_order(
            "pretokenizers", *[in_order("pretokenizers", *[{"type": "Whitespace"}] * 9)] * 60
        )
    },
    "many tokens around": {"post_processor": around([{"SpecialToken": {"id": "a"}}] * 65, 1)},
    "many ids of one": {"post_processor": around([{"SpecialToken": {"id": "a"}}], 65)},
    "added tokens": {"added_tokens": [added("x" * 500_001, each) for each in range(4)]},
    "added tokens that grow": {"normalizer": TENFOLD, "added_tokens": [added("a" * 200_001)]},
    "in the decoder": {"decoder": in_order("decoders", TENFOLD, TENFOLD)},
    "affixes": {"model": {**MODEL, "continuing_subword_prefix": "x" * 65}},
    "long words": {
        "model": {
            "type": "WordPiece",
            "unk_token": "a",
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 1001,
            "vocab": {"a": 0},
        }
    },
    "a pattern": {"normalizer": replaced({"Regex": "(a+)+$"}, "b")},
    "a cut": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[a-z]*[a-z]*[A-Z0-9]"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
}


@pytest.mark.parametrize("parts", BOMBS.values(), ids=BOMBS)
def test_what_takes_minutes_or_gigabytes_is_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": MODEL} | parts))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is refused, because a short text"):
        Tokenizer.open(tmp_path)


def test_tokens_of_the_settings_count_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": MODEL}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "x" * 2_000_001}))
    with pytest.raises(CheckpointError, match="added tokens may have"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"model": {}, "\\u006eormalizer": STEP}',
        '{"model": {"vocab": {"]}": 1, "\\"}": 2}, "merges": [["a", "{"]]}, "normalizer": STEP}',
        ' {\n"normalizer" : STEP ,\t"model":{}} ',
        '{"normalizer": null, "normalizer": STEP, "model": {}}',
        '{"model": {}, "model": {}, "decoder": STEP}',
    ],
)
def test_no_part_is_hidden_by_how_it_is_written(text: str) -> None:
    step = json.dumps(replaced({"String": "a"}, "a" * 100))
    with pytest.raises(ValueError, match=r"may make more than|twice"):
        check_parts(read_parts(text.replace("STEP", step)))


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_half_a_file_is_refused(cut: int) -> None:
    whole = json.dumps({"normalizer": {"type": "NFC"}, "model": {"vocab": {"a": 0}}})
    assert list(read_parts(whole)) == ["normalizer", "model"]
    with pytest.raises(ValueError, match=r"."):
        read_parts(whole[:cut])


CHATS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"(?<=\p{L})'(?=\p{L})|[[:alpha:]]+",
    r" {2,}",
    r"\s+$",
)
"""Of published tokenizers: GPT-2, GPT-4, Kimi K2, DeepSeek V3, Bloom, and normalizers of others."""


def test_patterns_of_published_models_are_read() -> None:
    steps = [step for each in PRE_TOKENIZERS.values() for step in each.steps]
    cuts = [step["pattern"]["Regex"] for step in steps if "pattern" in step]  # type: ignore[index]
    assert len(cuts) > 10
    for pattern in (*CHATS, *cuts):
        pattern_cost(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "(x+x+)+y",
        "[a-z]*[a-z]*1",
        "(?:a?){20}b",
        "a?" * 20 + "b",
        "(?:a|a)" * 20 + "b",
        "(?:a{1,9}){2,}b",
        "((a+){2,})",
        "(?=a*a*b)c",
        "(?:a*)*b",
        r"(a*)\1",
        r"(?<n>a\g<n>?)",
        "(?~a)",
        "(?(1)a|b)",
        "(a",
        "a)",
        "[a",
        "*a",
        "\\",
        "a{3,1}",
        "(" * 40 + ")" * 40,
        "a" * (1 << 15),
    ],
)
def test_patterns_that_may_take_too_long_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        pattern_cost(pattern)


def test_a_pattern_at_the_limit_takes_moments() -> None:
    """The limits are chosen for this: as hard as what is let through is for 1 KB."""
    pattern = "a?" * 5 + "[a-z]*[A-Z0-9]"
    assert pattern_cost(pattern).last_ways * 2 > 32
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    begun_s = time.thread_time()
    assert len(split.pre_tokenize_str("a" * 1000 + "-1")) == 2
    assert time.thread_time() - begun_s < 5
