"""Errors of grammars and schemas in the user's terms: the faulty field of the schema.

llguidance names a line of generated rules, which a user does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edge.errors import shown
from edge.text.schema_keywords import BY_NAME, CHOICES, HELD, IN_ORDER, NAMED

_LINE = re.compile(r"at (\d{1,9})\(\d{1,9}\): ")
_SHOWN_RULES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_MARKED = re.compile(r"\n *\^+ *\n")
"""A line of carets that points at the line above."""
_OF_SCHEMA = "failed to compile JSON schema: "
_UNSUPPORTED = ("Unimplemented keys:", "these keywords are not supported:")
_ONE_OF = ("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")

_MOST_TRIED = 64
"""Most parts of a schema to check; each takes a millisecond per few KiB."""
_MOST_SEARCHED_BYTES = 32 << 10

Check = Callable[[Mapping[str, Any]], str]
"""Returns llguidance's error for a schema; "": it is valid."""


def whose(words: str) -> str:
    """A comment line before a rule that names the origin of its schema, for errors."""
    return f"// {words}"


def fault(error: str, rules: str, check: Check) -> str:
    """The error sentence. error: llguidance's, for the rules."""
    said = sentence(error)
    if _OF_SCHEMA not in error:
        return f"the grammar or schema cannot be kept to: {said}"
    lines, line = rules.split("\n"), _LINE.match(error)
    number = int(line[1]) - 1 if line is not None else 0
    rule = lines[number] if number < len(lines) else ""
    before = lines[number - 1] if 0 < number < len(lines) else ""
    of = before.removeprefix("// ") if before.startswith("// ") else "the JSON schema"
    place = _place(rule.partition("%json ")[2], said, check)
    where = f": {place}" if place else ""
    return f"{of} cannot be kept to{where}: {said}"


def sentence(error: str) -> str:
    """llguidance's error without its position in the generated rules."""
    if "NoExtensionBias" in error:
        return (
            "no token of the model has the next required characters: ask for other "
            "characters, or take a model that has them"
        )
    said = _SHOWN_RULES.sub("", error).rpartition(_OF_SCHEMA)[2]
    said = _MARKED.sub("\n", said).replace(*_UNSUPPORTED).replace(*_ONE_OF)
    return " ".join(said.split())[:400]


def _place(text: str, said: str, check: Check) -> str:
    """The place of the fault in a schema: the innermost part that has it on its own."""
    if not text or len(text) > _MOST_SEARCHED_BYTES:
        return ""
    try:
        root = json.loads(text)
    except ValueError:
        return ""
    place: tuple[str, ...] = ()
    here, tried, seen = root, 0, {id(root)}
    while True:
        for steps, part in _parts(here, root, place):
            if tried == _MOST_TRIED:
                return _shown_place(place)
            if id(part) in seen:
                continue
            tried += 1
            alone = {**{name: root[name] for name in NAMED if name in root}, **part}
            if sentence(check(alone)) == said:
                place, here = steps, part
                seen.add(id(part))
                break
        else:
            return _shown_place(place)


def _shown_place(place: tuple[str, ...]) -> str:
    return shown(".".join(place))[1:-1]


def _parts(
    schema: Mapping[str, Any], root: Mapping[str, Any], place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The nested schemas with their places."""
    for key in BY_NAME:
        held = schema.get(key)
        for name, each in held.items() if isinstance(held, Mapping) else ():
            if isinstance(each, Mapping):
                yield (*place, key, name), each
    for key in (*IN_ORDER, *CHOICES):
        held = schema.get(key)
        for at, each in enumerate(held if isinstance(held, list) else ()):
            if isinstance(each, Mapping):
                yield (*place, f"{key}[{at}]"), each
    for key in HELD:
        if isinstance(held := schema.get(key), Mapping):
            yield (*place, key), held
    for key in NAMED:
        reference, held = schema.get("$ref"), root.get(key)
        if isinstance(reference, str) and isinstance(held, Mapping):
            name = reference.removeprefix(f"#/{key}/")
            if isinstance(each := held.get(name), Mapping):
                yield (key, name), each
