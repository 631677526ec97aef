"""Fields that a user sets, described once: the command line makes its options from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFacts:
    """What a command line needs to know of a field, apart from its name, type and default."""

    help: str
    flags: tuple[str, ...]
    """As `-n`, `--max-new-tokens`; empty: made of the field's name."""
    choices: tuple[Any, ...]
    """All that is allowed; empty: what the field's type allows."""
    at_least: int | None
    at_most: int | None
    metavar: str | None
    """What a value is called, as SIZE."""
    parse: Callable[[str], Any] | None
    """Makes the value of a text; None: the field's type does."""


def option(
    default: Any = MISSING,
    *,
    help: str,
    default_factory: Callable[[], Any] | None = None,
    flags: tuple[str, ...] = (),
    choices: tuple[Any, ...] = (),
    at_least: int | None = None,
    at_most: int | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A field of a dataclass that is an option of the command line as well."""
    facts = OptionFacts(
        help=help,
        flags=flags,
        choices=choices,
        at_least=at_least,
        at_most=at_most,
        metavar=metavar,
        parse=parse,
    )
    if default_factory is not None:
        return field(default_factory=default_factory, metadata={_KEY: facts})
    return field(default=default, metadata={_KEY: facts})


def option_facts(described: Field[Any]) -> OptionFacts | None:
    """What `option` said of a field; None for a field that is set in Python only."""
    facts: OptionFacts | None = described.metadata.get(_KEY)
    return facts
