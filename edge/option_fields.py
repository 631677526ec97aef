"""Fields that a user sets, described once: the command line makes its options from them."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, replace
from typing import Any, TypeVar

_KEY = "option"

Options = TypeVar("Options")
Made = TypeVar("Made")


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


_UNPACKED = re.compile(r"Unpack\[(\w+)\]")


def _check_names(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises TypeError, naming what is near it, for a keyword that is not known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            said = f"; do you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise TypeError(f"{owner} has no {name!r:.80}{said}")


def names_near_keywords(made: type[Made]) -> type[Made]:
    """A class whose constructor and public methods name the keyword that is near a wrong one.

    Of `**overrides: Unpack[Overrides]` these are the keys of that dictionary.
    """
    for name, found in list(vars(made).items()):
        call = found.__func__ if isinstance(found, classmethod) else found
        is_called = name == "__init__" or not name.startswith("_")
        if not (is_called and inspect.isfunction(call)):
            continue
        owner = made.__name__ if name == "__init__" else f"{made.__name__}.{name}"
        checked = _checked(call, owner, _keywords(call))
        setattr(made, name, classmethod(checked) if call is not found else checked)
    return made


def _keywords(call: Callable[..., Any]) -> Sequence[str]:
    """Those first that nothing but their name tells apart."""
    kinds = inspect.signature(call).parameters.values()
    known = [each.name for each in kinds if each.kind is each.KEYWORD_ONLY]
    for each in kinds:
        if each.kind is each.VAR_KEYWORD:
            unpacked = _UNPACKED.fullmatch(each.annotation)
            assert unpacked is not None, f"{call.__qualname__} does not say what {each} may be"
            known += call.__globals__[unpacked[1]].__annotations__
    return known + [each.name for each in kinds if each.kind is each.POSITIONAL_OR_KEYWORD][1:]


def _checked(call: Callable[..., Any], owner: str, known: Sequence[str]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def awaited(*given: Any, **named: Any) -> Any:
            _check_names(owner, named, known)
            return await call(*given, **named)

        return awaited

    @functools.wraps(call)
    def called(*given: Any, **named: Any) -> Any:
        _check_names(owner, named, known)
        return call(*given, **named)

    return called


def with_overrides(
    kind: type[Options], options: Options | None, overrides: Mapping[str, Any]
) -> Options:
    """The options, None for those of a new one, with some fields given by name.

    Raises TypeError for options of no such kind, and what their constructor raises.
    """
    if options is not None and not isinstance(options, kind):
        raise TypeError(
            f"options must be {kind.__name__} or None, not of the type {type(options).__name__}; "
            f"write {kind.__name__}(...), or give its fields by name"
        )
    given = kind() if options is None else options
    changed: Options = replace(given, **overrides)  # type: ignore[type-var]
    return changed
