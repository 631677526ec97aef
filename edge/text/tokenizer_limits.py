"""Limits on the growth and time of a tokenizer.json: parts beyond any model's need are refused.

The parts of the file are small programs. A normalizer that writes a hundred letters for one, four
times in a row, makes gigabytes of ten letters, and the library aborts the process without memory.
The checks come before the library builds any part, because it normalizes added tokens at once.

A part is recognised by its fields, because the library accepts one without a type, too.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from edge import offload
from edge.text.pattern_cost import pattern_cost

MAX_STEPS = 256
"""Most steps of each part, nested ones included; the longest known one has ten."""
MAX_ITEMS = 64
"""Most steps of a list, or tokens around a text."""
MAX_GROWTH = 64
"""Most letters that all steps together make of one. Bytes as letters make four."""
MAX_STEP_LETTERS = 256
"""Most letters of a text that a step has or adds."""
MAX_ADDED_LETTERS = 2_000_000
"""Most letters of all added tokens after the normalizer: 10,000 usual ones have 200,000. 30 million
took 2.2 GB."""
MAX_AFFIX_LETTERS = 64
MAX_WORD_LETTERS = 1000
"""Most letters of a word for greedy matching, which takes the cube of its length."""
_MOST_PART_LETTERS = 8 << 20
"""Most letters of a part's JSON; 10,000 added tokens take 2 million."""

_ONCE = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"})
"""Idempotent steps, whose second use changes nothing."""
_MADE_BY_KIND = {"ByteLevel": 4, "Metaspace": 2, "BertNormalizer": 4, "CTC": 2}
_MADE_BY_FIELD = {
    "add_prefix_space": 4,
    "use_regex": 4,
    "replacement": 2,
    "handle_chinese_chars": 4,
}
"""Most letters that these steps make of one."""

_TEXT = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OTHER = r'[^"\[\]{}]*+'
_INNER = rf"{_OTHER}(?:{_TEXT}{_OTHER})*+"
_NO_BRACKETS = re.compile(_INNER, re.DOTALL)
for _ in range(2):
    _INNER = rf"{_OTHER}(?:(?:{_TEXT}|[\[{{]{_INNER}[\]}}]){_OTHER})*+"
_MODEL = re.compile(rf"\s*+\{{{_INNER}\}}", re.DOTALL)
"""A vocabulary or merges, matched in one go, as there may be a million entries."""

_NAME = re.compile(_TEXT, re.DOTALL)
_SIMPLE = re.compile(rf'{_TEXT}|[^"\[\]{{}},]++', re.DOTALL)
"""A value without brackets."""
_SPACES = re.compile(r"[ \t\r\n]*+")

_LONGEST_LIGATURE = 18
"""Most letters that Unicode's rules make of one."""


def check_parts(parts: Mapping[str, Any], more_tokens: Iterable[str] = ()) -> None:
    """Check the parts of a tokenizer.json, and further added tokens. Raises ValueError, with the
    cause, if a short text could take minutes or gigabytes."""
    normalized = _check_part(parts, "normalizer")
    words = _check_part(parts, "pre_tokenizer")
    for name, made in (
        ("text", normalized * words),
        ("ends of a text", _check_part(parts, "post_processor")),
        ("tokens", _check_part(parts, "decoder")),
    ):
        if made > MAX_GROWTH:
            raise ValueError(f"its steps for {name} may make more than {MAX_GROWTH} letters of one")
    added = parts.get("added_tokens")
    own = (each.get("content") for each in _objects(added if isinstance(added, list) else ()))
    letters = normalized * sum(len(str(each)) for each in chain(own, more_tokens))
    if letters > MAX_ADDED_LETTERS:
        raise ValueError(f"its added tokens may have {letters:,.0f} letters in all")


def check_model(model: object) -> None:
    """Check a model that the library has read. Raises ValueError beyond the limits."""
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(model, affix, None) or "") > MAX_AFFIX_LETTERS:
            raise ValueError(f"its {affix} has more than {MAX_AFFIX_LETTERS} letters")
    if (getattr(model, "max_input_chars_per_word", None) or 0) > MAX_WORD_LETTERS:
        raise ValueError(f"it looks for words of more than {MAX_WORD_LETTERS} letters")


def _check_part(parts: Mapping[str, Any], name: str) -> float:
    """The most letters that a part's steps make of one. Raises ValueError beyond the limits."""
    growth, seen = 1.0, Counter[str]()
    steps = list(_objects(parts.get(name)))
    if len(steps) > MAX_STEPS:
        raise ValueError(f"its {name} has {len(steps):,} steps")
    for step in steps:
        _check_sizes(step, name)
        kind = str(step.get("type"))
        seen[kind] += 1
        # Capped, so that numbers stay comparable.
        growth = min(1e9, growth * _growth(step, kind, is_again=seen[kind] > 1))
    return growth


def read_parts(serialized: str) -> dict[str, Any]:
    """The parts of a tokenizer.json's text, without the values of its model. Raises ValueError for
    invalid text."""
    parts: dict[str, Any] = {}
    at = _after(serialized, 0, "{")
    while not serialized.startswith("}", at):
        if parts:
            at = _after(serialized, at, ",")
        match = _NAME.match(serialized, at)
        if match is None:
            raise ValueError("it is no JSON object")
        name = offload.parse_json(match[0])
        if name in parts:
            raise ValueError(f"it holds the name {name!r:.100} twice")
        at = _after(serialized, match.end(), ":")
        if name == "model":
            match = _MODEL.match(serialized, at)
            if match is None:
                raise ValueError("its model is not an object that Edge can read")
            parts[name], stop = None, match.end()
        else:
            stop = _end(serialized, at)
            parts[name] = offload.parse_json(serialized[at:stop])
        at = _after(serialized, stop)
    return parts


def _end(text: str, begin: int) -> int:
    """The end of the value that begins at `begin`."""
    match = _SIMPLE.match(text, begin)
    if match is not None:
        return match.end()
    depth, at = 0, begin
    while at - begin <= _MOST_PART_LETTERS and at < len(text):
        depth += 1 if text[at] in "[{" else -1
        at += 1
        if depth <= 0:
            return at
        match = _NO_BRACKETS.match(text, at)
        assert match is not None
        at = match.end()
    raise ValueError("a part of it is longer than any model's, or has no end")


def _after(text: str, at: int, mark: str = "") -> int:
    """The position behind the mark and the spaces around it."""
    match = _SPACES.match(text, at)
    assert match is not None
    if not text.startswith(mark, match.end()):
        raise ValueError("it is no JSON object")
    match = _SPACES.match(text, match.end() + len(mark))
    assert match is not None
    return match.end()


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """All nested objects, in the order of their use."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _objects(each)


def _check_sizes(step: Mapping[str, Any], part: str) -> None:
    """Raises ValueError for a step beyond the limits of size."""
    for name, value in step.items():
        if name in ("Regex", "precompiled_charsmap"):
            continue  # they have limits of their own
        if isinstance(value, list | dict) and len(value) > MAX_ITEMS:
            raise ValueError(f"{name!r:.40} in its {part} has {len(value):,} items")
        if isinstance(value, str) and len(value) > MAX_STEP_LETTERS:
            raise ValueError(f"{name!r:.40} in its {part} has {len(value):,} letters")


def _growth(step: Mapping[str, Any], kind: str, *, is_again: bool) -> float:
    """The most letters that a step makes of one. Raises ValueError for a pattern that is too
    expensive."""
    if kind in _ONCE:
        return 4.0 if is_again else 1.0
    if (charsmap := step.get("precompiled_charsmap")) is not None:
        return _longest_entry(charsmap)
    pattern = step.get("pattern")
    least = 1
    if isinstance(pattern, dict):
        if isinstance(regex := pattern.get("Regex"), str):
            least = pattern_cost(regex).least
        elif isinstance(exact := pattern.get("String"), str):
            least = len(exact)
    elif isinstance(pattern, str):
        least = len(pattern)
    if pattern is not None and isinstance(content := step.get("content"), str):
        # Other steps may split it further.
        letters = max(
            len(unicodedata.normalize("NFKD", each)) for each in (content, content.lower())
        )
        return max(1.0, letters / least) if least else 1.0 + letters
    if isinstance(before := step.get("prepend"), str):
        return 1.0 + len(before)  # each letter may be a text of its own, between added tokens
    if (single := step.get("single")) is not None:
        return max(1.0, str(single).count("Sequence" if isinstance(single, list) else "$"))
    made = [letters for field, letters in _MADE_BY_FIELD.items() if field in step]
    return max(1.0, _MADE_BY_KIND.get(kind, 1), *made)


def _longest_entry(charsmap: object) -> float:
    """The length of the longest replacement in a SentencePiece table."""
    try:
        table = base64.b64decode(str(charsmap), validate=True)
        (size,) = struct.unpack_from("<I", table)
    except (binascii.Error, struct.error) as error:
        raise ValueError("its table of characters is damaged") from error
    # Bytes of UTF-8 bound the number of letters.
    texts = table[struct.calcsize("<I") + size :].split(b"\0")
    longest = max(len(unicodedata.normalize("NFKD", t.decode(errors="replace"))) for t in texts)
    return 1.0 if longest <= _LONGEST_LIGATURE else float(longest)
