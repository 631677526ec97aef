"""Fields that a user sets, described once: the command line makes its options from them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, TypeVar

_KEY = "option"

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFacts:
    """What a command line needs to know of a field, apart from its name, type and default."""

    help: str
    flags: tuple[str, ...] = ()
    """As `-n`, `--max-new-tokens`; empty: made of the field's name."""
    choices: tuple[Any, ...] = ()
    """All that is allowed; empty: what the field's type allows."""
    at_least: int | None = None
    at_most: int | None = None
    metavar: str | None = None
    """What a value is called, as SIZE."""
    parse: Callable[[str], Any] | None = None
    """Makes the value of a text; None: the field's type does."""
    repeats: bool = False
    """What `parse` makes may be given several times, as one text with commas."""


def option(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | None = None,
    **facts: Any,
) -> Any:
    """A field of a dataclass that is an option of the command line as well; see OptionFacts."""
    metadata = {_KEY: OptionFacts(**facts)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_facts(described: Field[Any]) -> OptionFacts | None:
    """What `option` said of a field; None for a field that is set in Python only."""
    facts: OptionFacts | None = described.metadata.get(_KEY)
    return facts


def with_overrides(options: Options, overrides: Mapping[str, Any]) -> Options:
    """The options with some fields given by name. Raises TypeError naming what is near a wrong one,
    and what the fields' own checks raise."""
    names = [each.name for each in fields(options)]  # type: ignore[arg-type]
    for name in overrides:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            said = f"; do you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
            raise TypeError(f"{type(options).__name__} has no {name!r:.80}{said}")
    changed: Options = replace(options, **overrides)  # type: ignore[type-var]
    return changed
