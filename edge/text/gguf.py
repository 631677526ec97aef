"""The tokenizer in a GGUF file: its metadata converted back to a tokenizer.json.

Knows keys and token types; builds nothing. Defaults are llama.cpp's: the kinds that put a BOS token
before a text, and a space before each stretch of text in SentencePiece vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np

from edge.errors import CheckpointError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.text.files import TOKENIZER, SpecialToken, TokenizerFiles
from edge.text.generation_config import sampling_of
from edge.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from edge.text.tokenizer_facts import (
    BYTE_FALLBACK,
    BYTE_LEVEL,
    MAX_NAMED,
    MAX_TOKEN_CHARACTERS,
    TokenizerFacts,
    short_tokens,
)

_MODEL = "tokenizer.ggml.model"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_SCORES = "tokenizer.ggml.scores"
_MERGES = "tokenizer.ggml.merges"
_PRE = "tokenizer.ggml.pre"
_TEMPLATE = "tokenizer.chat_template"

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}

_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_MARKS = frozenset(
    {
        "<|end|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>",
        "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|return|>",
        "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~[",
    }
)  # fmt: skip
"""Tokens that end an answer. Files name one end token, models have several. The name decides, as
many files have these tokens as normal ones."""
_END_WORDS = frozenset({"</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]"})
"""Tokens that end an answer if they are control tokens. Some vocabularies have `</s>` as HTML."""
_PARTED_BY = frozenset({"<|channel|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"})
"""In a vocabulary with one of these, answers are messages, and `<|end|>` only separates them."""

_AROUND = ("<unk>", "<s>", "<|endoftext|>")

_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

_MOST_CHARACTERS = 4 << 20
_LONGEST_PIECE = 512
_MOST_MERGED = 32 << 20
"""Limits for vocabularies without merges, which are found by trying every cut of every token: most
characters of all tokens, of one, and of all merges. 256,000 tokens have 2 and 5 million."""
_MOST_ADDED = 100_000


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Whether the file has a tokenizer."""
    return _kind(metadata) not in ("none", "no_vocab")


def _kind(metadata: Mapping[str, Any]) -> str:
    """The file's name of the tokenizer's kind; empty: it is not a text."""
    kind = metadata.get(_MODEL, "none")
    return kind if isinstance(kind, str) else ""


def gguf_end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens; empty: none is known."""
    ends = [_id(metadata, key) for key in _ENDS]
    found = {each: None for each in ends if each is not None}
    tokens, types = metadata.get(_TOKENS), metadata.get(_TYPES)
    if not isinstance(tokens, tuple):
        return tuple(found)
    is_control: Sequence[bool] = [False] * len(tokens)
    if isinstance(types, np.ndarray) and len(types) == len(tokens):
        is_control = (types == _CONTROL).tolist()
    for place, token in enumerate(tokens):
        if token in _END_MARKS or (token in _END_WORDS and is_control[place]):
            found[place] = None
    if not _PARTED_BY.isdisjoint(tokens):
        separators = [each for each in found if each < len(tokens) and tokens[each] == "<|end|>"]
        found = {each: None for each in found if each not in separators}
    return tuple(found)


def gguf_sampling(metadata: Mapping[str, Any], path: Path) -> SamplingParameters:
    """The sampling parameters in the file; greedy without any."""
    given = {name: metadata[key] for name, key in _SAMPLING.items() if key in metadata}
    given = {name: list(e) if isinstance(e, np.ndarray) else e for name, e in given.items()}
    if given.keys() - {"repetition_penalty"}:
        given.setdefault("temperature", 1.0)
    return sampling_of(given, str(path))


def gguf_templates(metadata: Mapping[str, Any], path: Path) -> dict[str, tuple[str, str]]:
    """Chat templates by name; a single one is named "default"."""
    found = {}
    names = metadata.get("tokenizer.chat_templates", ())
    keys = {"default": _TEMPLATE}
    keys |= {name: f"{_TEMPLATE}.{name}" for name in (names if isinstance(names, tuple) else ())}
    for name, key in keys.items():
        if isinstance(source := metadata.get(key), str):
            found[name] = (source, str(path))
    return found


def describe_gguf_tokenizer(
    metadata: Mapping[str, Any], path: Path, end_ids: Iterable[int]
) -> TokenizerFacts:
    """The facts of the tokenizer in the file `path`; its merges are not read.

    Raises CheckpointError for an unknown kind.
    """
    tokens = _tokens(metadata, path)
    kind = _kind(metadata)
    if kind == "gpt2":
        _pre_tokenizer(metadata, path)
    elif kind not in ("llama", "gemma4"):
        raise _unknown_kind(metadata, path)
    return TokenizerFacts(
        file=path,
        kind=BYTE_LEVEL if kind == "gpt2" else BYTE_FALLBACK,
        vocab_size=len(tokens),
        special_tokens=short_tokens(
            {name: token.content for name, token in _named(metadata, tokens).items()}
        ),
        end_tokens={
            each: tokens[each][:MAX_TOKEN_CHARACTERS] if each < len(tokens) else None
            for each in sorted(end_ids)[:MAX_NAMED]
        },
        chat_templates={name: text for name, (text, _) in gguf_templates(metadata, path).items()},
    )


def gguf_tokenizer_files(metadata: Mapping[str, Any], path: Path) -> TokenizerFiles:
    """The tokenizer of the file `path`, in the form of a folder's files.

    Raises CheckpointError naming the file and the key.
    """
    tokens = _tokens(metadata, path)
    types = _types(metadata, tokens, path)
    kind = _kind(metadata)
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata, path)
        pipeline = _byte_level(pre, tokens, _merges(metadata, path))
        adds_bos = pre.adds_bos
    elif kind == "llama":
        pipeline = _sentence_pieces(
            metadata, tokens, _merges_by_score(metadata, tokens, types, path)
        )
        adds_bos = True
    elif kind == "gemma4":
        spaceless = {"tokenizer.ggml.add_space_prefix": False, **metadata}
        pipeline = _sentence_pieces(spaceless, tokens, _merges(metadata, path))
        adds_bos = True
    else:
        raise _unknown_kind(metadata, path)
    serialized = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types, path, takes_space=_takes_space(metadata)),
        "post_processor": _template(metadata, tokens, adds_bos=adds_bos),
        **pipeline,
    }
    return TokenizerFiles(
        path=path,
        file=path,
        serialized=json.dumps(serialized, ensure_ascii=False),
        settings={},
        tokenizer_class="",
        model_type="",
        named_tokens=_named(metadata, tokens),
        declared_tokens={},
        extra_tokens=(),
        chat_templates=gguf_templates(metadata, path),
        same_as=_repeated(metadata),
    )


def _unknown_kind(metadata: Mapping[str, Any], path: Path) -> CheckpointError:
    kind = shown(metadata.get(_MODEL))
    return _refused(path, f"{_MODEL} {kind} is not known here; gpt2, llama and gemma4 are")


def _named(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, SpecialToken]:
    return {
        name: SpecialToken(content=tokens[token_id])
        for name, key in _NAMED.items()
        if (token_id := _id(metadata, key)) is not None and token_id < len(tokens)
    }


def _tokens(metadata: Mapping[str, Any], path: Path) -> Sequence[str]:
    """The tokens by id; empty and repeated ones get names that no text contains."""
    tokens = metadata.get(_TOKENS)
    if not isinstance(tokens, tuple) or not tokens:
        raise _refused(path, f"{_TOKENS} is missing or no list of texts")
    repeated = _repeated(metadata)
    if not repeated and all(tokens):
        return tokens
    named = [
        f"[REPEATED_{place}]" if place in repeated else token or f"[EMPTY_{place}]"
        for place, token in enumerate(tokens)
    ]
    if len(set(named)) != len(named):
        raise _refused(path, f"{_TOKENS} has a token twice")
    return tuple(named)


def _repeated(metadata: Mapping[str, Any]) -> dict[int, int]:
    """Ids of tokens that have the text of an earlier one, with the id of that one."""
    tokens = metadata.get(_TOKENS)
    if not isinstance(tokens, tuple) or len(set(tokens)) == len(tokens):
        return {}
    first: dict[str, int] = {}
    return {
        place: first[token]
        for place, token in enumerate(tokens)
        if token and first.setdefault(token, place) != place
    }


def _types(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> np.ndarray[Any, Any]:
    """The type of each token; marks of ends are control tokens, and repeated tokens are unused."""
    types = _numbers(metadata, _TYPES, len(tokens), path)
    types = np.full(len(tokens), _NORMAL) if types is None else types.copy()
    types[[place for place, token in enumerate(tokens) if token in _END_MARKS]] = _CONTROL
    types[[*_repeated(metadata)]] = _UNUSED
    return types


def _takes_space(metadata: Mapping[str, Any]) -> bool:
    """Whether control tokens take the white space behind them, as in the tokenizer.json of Phi-3.

    The format has no key for it.
    """
    return metadata.get("general.architecture") == "phi3" and _kind(metadata) == "llama"


def _numbers(
    metadata: Mapping[str, Any], key: str, count: int, path: Path
) -> np.ndarray[Any, Any] | None:
    """A number for each token; None: there is no such key."""
    values = metadata.get(key)
    if values is None:
        return None
    if not isinstance(values, np.ndarray) or len(values) != count or values.dtype == np.bool_:
        raise _refused(path, f"{key} is not one number for each of {count:,} tokens")
    return values


def _merges(metadata: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    merges = metadata.get(_MERGES)
    if not isinstance(merges, tuple):
        raise _refused(path, f"{_MERGES} is missing or no list of texts")
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    if not all(first and second for first, second in pairs):
        raise _refused(path, f"{_MERGES} has an entry that is not two pieces")
    return pairs


def _pre_tokenizer(metadata: Mapping[str, Any], path: Path) -> PreTokenizer:
    name = metadata.get(_PRE)
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = f"{shown(name)} is not known here" if _PRE in metadata else "is missing"
        cause = f"{_PRE} {known}"
        raise _refused(path, f"{cause}, and a wrong pre-tokenizer makes wrong tokens")
    return PRE_TOKENIZERS[name]


def _byte_level(
    pre: PreTokenizer, tokens: Sequence[str], merges: Sequence[tuple[str, str]]
) -> dict[str, object]:
    """A byte-level BPE tokenizer, as in GPT-2, Llama 3 and Qwen."""
    bytes_as_characters = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pre.gpt2_words,
    }
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pre.steps, bytes_as_characters]},
        "decoder": {**bytes_as_characters, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": pre.whole_words,
        },
    }


def _sentence_pieces(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
) -> dict[str, object]:
    """A SentencePiece BPE tokenizer, as in Llama 2 and Gemma: spaces are ▁, and unknown text falls
    back to bytes."""
    has_space_before = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    unknown = _id(metadata, "unknown_token_id", 0)
    unknown = 0 if unknown is None or unknown >= len(tokens) else unknown
    before = [{"type": "Prepend", "prepend": "▁"}] if has_space_before else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_space_before else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *after,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _merges_by_score(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: np.ndarray[Any, Any], path: Path
) -> list[tuple[str, str]]:
    """Every pair of pieces that together is a piece, best score of the whole first.

    SentencePiece joins the neighbours whose whole has the best score; the ranks do the same.
    """
    scores = _numbers(metadata, _SCORES, len(tokens), path)
    if scores is None:
        raise _refused(path, f"{_SCORES} is missing, which merges need")
    pieces = {
        token: token
        for token, kind in zip(tokens, types.tolist(), strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    lengths = [len(piece) for piece in pieces]
    if sum(lengths) > _MOST_CHARACTERS or max(lengths, default=0) > _LONGEST_PIECE:
        raise _refused(
            path,
            f"{_TOKENS} has more than {_MOST_CHARACTERS:,} characters, or a token of more than "
            f"{_LONGEST_PIECE}",
        )
    found: list[tuple[float, int, int, str, str]] = []
    left = _MOST_MERGED
    for place in np.flatnonzero(types == _NORMAL).tolist():
        token = tokens[place]
        score = -float(scores[place])
        for cut in range(1, len(token)):
            first = pieces.get(token[:cut])
            if first is not None and (second := pieces.get(token[cut:])) is not None:
                found.append((score, cut, place, first, second))
                left -= len(token)
        if left < 0:
            raise _refused(path, f"{_TOKENS} can be joined in more ways than any model's")
    found.sort(key=lambda each: each[:3])
    return [(first, second) for _score, _cut, _place, first, second in found]


def _added(
    tokens: Sequence[str], types: np.ndarray[Any, Any], path: Path, *, takes_space: bool
) -> list[dict[str, object]]:
    """Tokens that are matched as a whole: control tokens are special, the user's are not.

    takes_space: they take the white space behind them, except those around a text.
    """
    places = np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
    if len(places) > _MOST_ADDED:
        raise _refused(
            path,
            f"{_TYPES} has {len(places):,} control tokens, and {_MOST_ADDED:,} are the most",
        )
    return [
        {
            "id": place,
            "content": tokens[place],
            "single_word": False,
            "lstrip": False,
            "rstrip": takes_space and tokens[place] not in _AROUND,
            "normalized": False,
            "special": bool(types[place] != _USER_DEFINED),
        }
        for place in places
    ]


def _template(
    metadata: Mapping[str, Any], tokens: Sequence[str], *, adds_bos: bool
) -> dict[str, object] | None:
    """The special tokens before and after each text."""

    def one(key: str, adds: bool) -> list[str]:
        token_id = _id(metadata, f"{key}_token_id")
        wanted = metadata.get(f"tokenizer.ggml.add_{key}_token", adds) is True
        known = token_id is not None and token_id < len(tokens)
        return [tokens[token_id]] if wanted and known and token_id is not None else []

    before, after = one("bos", adds_bos), one("eos", False)
    if not before and not after:
        return None
    ids = {token: tokens.index(token) for token in (*before, *after)}

    def special(token: str) -> dict[str, object]:
        return {"SpecialToken": {"id": token, "type_id": 0}}

    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*map(special, before), text, *map(special, after)],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [place], "tokens": [token]} for token, place in ids.items()
        },
    }


def _id(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    return value if type(value) is int and 0 <= value < 2**31 else None


def _refused(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {cause}",
        remedy=f"put the model's {TOKENIZER} beside the file, or fetch another one",
    )
