"""What kind of tokenizer a checkpoint has, said without building it. Pure but for reading files.

Building one of 100,000 tokens takes longer than everything else that is asked of a checkpoint.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge import offload
from edge.errors import CheckpointError
from edge.text.files import MAX_TOKENIZER_VALUES, TokenizerFiles

MAX_NAMED = 32
"""Special tokens that are told; files name two to seven."""
MAX_TOKEN_CHARACTERS = 100
"""Most characters that are told of a token; the rest of a longer one is left out."""

BYTE_LEVEL = "BPE, byte level"
BYTE_FALLBACK = "BPE, byte fallback"

_MERGES = re.compile(r'(?<!\\)"merges"\s*:\s*\[')
"""No text in JSON has a bare quotation mark, and no token has a list for its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What a tokenizer is, by its files."""

    file: Path
    """What holds the vocabulary."""
    kind: str
    """As "BPE, byte level"."""
    vocab_size: int
    """Tokens, added ones included."""
    special_tokens: Mapping[str, str]
    """By role: bos_token, eos_token, …"""
    end_tokens: Mapping[int, str | None]
    """Those that end an answer, by id; None where the vocabulary has none of this id."""
    chat_templates: Mapping[str, str]
    """Their text by name; a single one is named "default"."""


def describe_tokenizer(files: TokenizerFiles, end_ids: Iterable[int]) -> TokenizerFacts:
    """Facts from the files of a folder. Raises CheckpointError where they hold no tokenizer."""
    serialized = _parsed(files)
    model = serialized.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(vocabulary, Mapping | list):
        raise CheckpointError(
            f"{files.file} holds no tokenizer that is known here (it has no vocabulary)",
            remedy="download it again",
        )
    if isinstance(vocabulary, list):  # of pieces and their scores, in the order of their ids
        pieces = (each[0] if isinstance(each, list) and each else None for each in vocabulary)
        vocabulary = {str(piece): place for place, piece in enumerate(pieces)}
    added = serialized.get("added_tokens")
    known = {
        each["content"]: each.get("id")
        for each in (added if isinstance(added, list) else ())
        if isinstance(each, Mapping) and isinstance(each.get("content"), str)
    }
    known |= {token.content: place for place, token in files.declared_tokens.items()}
    extra = {token.content for token in (*files.extra_tokens, *files.named_tokens.values())}
    return TokenizerFacts(
        file=files.file,
        kind=_kind(model, files.serialized),
        vocab_size=len(vocabulary) + len((known.keys() | extra) - vocabulary.keys()),
        special_tokens=short_tokens(
            {role: token.content for role, token in files.named_tokens.items()}
        ),
        end_tokens=_spelt(end_ids, {**vocabulary, **known}),
        chat_templates={name: text for name, (text, _origin) in files.chat_templates.items()},
    )


def short_tokens(named: Mapping[str, str]) -> dict[str, str]:
    """By role, as many as are told and of each as much."""
    return {
        role[:MAX_TOKEN_CHARACTERS]: token[:MAX_TOKEN_CHARACTERS]
        for role, token in list(named.items())[:MAX_NAMED]
    }


def _parsed(files: TokenizerFiles) -> dict[str, Any]:
    """Without the merges, which are half of the file, where they are its end, as programs write it:
    it takes a third of the time."""
    found = _MERGES.search(files.serialized)
    if found is not None:
        with contextlib.suppress(ValueError):  # the keys are in another order
            value = _object(f"{files.serialized[: found.end()]}]}}}}")
            model = value.get("model")
            if "added_tokens" in value and isinstance(model, Mapping) and "vocab" in model:
                return value
    try:
        return _object(files.serialized)
    except ValueError as error:
        raise CheckpointError(
            f"{files.file} is damaged: it is not JSON that is read here ({error})",
            remedy="download it again",
        ) from error


def _object(text: str) -> dict[str, Any]:
    value = offload.parse_json(text, most_values=MAX_TOKENIZER_VALUES)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def _kind(model: Mapping[str, Any], serialized: str) -> str:
    name = model.get("type")
    kind = name[:MAX_TOKEN_CHARACTERS] if isinstance(name, str) and name else "BPE"
    if kind != "BPE":
        return kind
    if '"ByteLevel"' in serialized:
        return BYTE_LEVEL
    return BYTE_FALLBACK if model.get("byte_fallback") is True else kind


def _spelt(ids: Iterable[int], vocabulary: Mapping[str, Any]) -> dict[int, str | None]:
    wanted: dict[int, str | None] = dict.fromkeys(sorted(ids)[:MAX_NAMED])
    for token, place in vocabulary.items():
        if type(place) is int and place in wanted:
            wanted[place] = token[:MAX_TOKEN_CHARACTERS]
    return wanted
