"""The kind and facts of a checkpoint's tokenizer, without building it. Pure but for reading files.

Building a tokenizer of 100,000 tokens takes longer than the rest of an inspection.
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
"""Most special tokens that are listed; files name two to seven."""
MAX_TOKEN_CHARACTERS = 100
"""Most characters of a listed token; a longer one is cut."""

BYTE_LEVEL = "BPE, byte level"
BYTE_FALLBACK = "BPE, byte fallback"

_MERGES = re.compile(r'(?<!\\)"merges"\s*:\s*\[')
"""The start of the merges: a text in JSON has no bare quotation mark, and no token's id is a
list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """The facts of a tokenizer by its files."""

    file: Path
    """The file with the vocabulary."""
    kind: str
    """The kind, such as "BPE, byte level"."""
    vocab_size: int
    """The number of tokens, added ones included."""
    special_tokens: Mapping[str, str]
    """The special tokens by role: bos_token, eos_token, …"""
    end_tokens: Mapping[int, str | None]
    """The tokens that end an answer, by id; None: the vocabulary has no such id."""
    chat_templates: Mapping[str, str]
    """The chat templates by name; a single one is named "default"."""


def describe_tokenizer(files: TokenizerFiles, end_ids: Iterable[int]) -> TokenizerFacts:
    """Facts from the files of a folder. Raises CheckpointError if they have no tokenizer."""
    serialized = _parsed(files)
    model = serialized.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(vocabulary, Mapping | list):
        raise CheckpointError(
            f"{files.file} has no tokenizer that Edge knows (it has no vocabulary)",
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
    spelt = {**vocabulary, **known}
    extra = {token.content for token in (*files.extra_tokens, *files.named_tokens.values())}
    return TokenizerFacts(
        file=files.file,
        kind=_kind(model, files.serialized),
        vocab_size=len(vocabulary) + len((known.keys() | extra) - vocabulary.keys()),
        special_tokens=short_tokens(
            {role: token.content for role, token in files.named_tokens.items()}
        ),
        end_tokens=_spelt({*end_ids, *_named_end(files, spelt)}, spelt),
        chat_templates={name: text for name, (text, _origin) in files.chat_templates.items()},
    )


def short_tokens(named: Mapping[str, str]) -> dict[str, str]:
    """The special tokens by role, cut to the limits of number and length."""
    return {
        role[:MAX_TOKEN_CHARACTERS]: token[:MAX_TOKEN_CHARACTERS]
        for role, token in list(named.items())[:MAX_NAMED]
    }


def _parsed(files: TokenizerFiles) -> dict[str, Any]:
    """The parsed file, without the merges if they are at its end, as usual. They are half of the
    file; skipping them leaves a third of the time."""
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
            f"{files.file} is damaged: it is not valid JSON ({error})",
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


def _named_end(files: TokenizerFiles, spelt: Mapping[str, Any]) -> Iterable[int]:
    """The id of the end token that the settings name."""
    named = files.named_tokens.get("eos_token")
    place = None if named is None else spelt.get(named.content)
    return (place,) if type(place) is int else ()


def _spelt(ids: Iterable[int], vocabulary: Mapping[str, Any]) -> dict[int, str | None]:
    wanted: dict[int, str | None] = dict.fromkeys(sorted(ids)[:MAX_NAMED])
    for token, place in vocabulary.items():
        if type(place) is int and place in wanted:
            wanted[place] = token[:MAX_TOKEN_CHARACTERS]
    return wanted
