"""Options as dataclass fields that also describe command line options, and checks of calls."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from edge.errors import RequestError, shown

_KEY = "option"

Options = TypeVar("Options")
Made = TypeVar("Made")


class CallError(RequestError, TypeError):
    """A call with an unknown keyword, without a required one, or with a value of a wrong type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFacts:
    """Facts of a field for the command line, beside its name, type and default."""

    help: str
    flags: tuple[str, ...] = ()
    """Such as `-n`, `--max-new-tokens`; empty: made from the field's name."""
    choices: tuple[Any, ...] = ()
    """The allowed values; empty: those of the field's type."""
    at_least: int | None = None
    at_most: int | None = None
    metavar: str | None = None
    """The placeholder for a value, such as SIZE."""
    parse: Callable[[str], Any] | None = None
    """Parses a text; None: the field's type does."""
    repeats: bool = False
    """The option may be given several times; `parse` takes the values joined by commas."""


def option(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | None = None,
    **facts: Any,
) -> Any:
    """A dataclass field that is also an option of the command line. facts: see OptionFacts."""
    metadata = {_KEY: OptionFacts(**facts)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_facts(described: Field[Any]) -> OptionFacts | None:
    """The facts that `option` gave a field; None for a field that is set in Python only."""
    facts: OptionFacts | None = described.metadata.get(_KEY)
    return facts


_UNPACKED = re.compile(r"Unpack\[(\w+)\]")


def _check_names(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises CallError for an unknown keyword, with the closest known one."""
    for name in given:
        if name not in known:
            near = _near(name, known)
            said = f"do you mean {near}?" if near else f"there are {', '.join(known)}"
            raise CallError(f"{owner} has no {name!r:.80}", remedy=said)


_ALIKE = 0.7
"""Least similarity of a suggestion: context_length is 0.71 like context_tokens, and new_tokens,
which means something else, 0.61 like prompt_tokens."""


def _near(name: str, known: Sequence[str]) -> str | None:
    """The known name with the closest spelling, or the only one that extends or begins this one."""
    if found := difflib.get_close_matches(name, known, 1, _ALIKE):
        return found[0]
    begins = [each for each in known if each.startswith(name) or name.startswith(each)]
    return begins[0] if len(begins) == 1 else None


def checks_calls(made: type[Made]) -> type[Made]:
    """Decorate a class: its constructor and public methods raise CallError for wrong calls.

    The error names the known keyword that is closest to a wrong one. The keywords of `**overrides:
    Unpack[Overrides]` are the keys of that dictionary. Values are checked by their annotations (for
    constructors: of dataclasses only): booleans, texts, words of a Literal, functions, Edge's
    classes, lists of these, and dictionaries. Options are checked by their range.
    """
    for name, found in list(vars(made).items()):
        call = found.__func__ if isinstance(found, classmethod) else found
        is_called = name == "__init__" or not name.startswith("_")
        if not (is_called and inspect.isfunction(call)):
            continue
        owner = made.__name__ if name == "__init__" else f"{made.__name__}.{name}"
        options = fields(made) if name == "__init__" and is_dataclass(made) else ()
        by_type = name != "__init__" or is_dataclass(made)
        checked = _checked(call, owner, by_type=by_type, options=options)
        setattr(made, name, classmethod(checked) if call is not found else checked)
    return made


def _keywords(call: Callable[..., Any]) -> Sequence[str]:
    """The keywords of a call; keyword-only ones first."""
    kinds = inspect.signature(call).parameters.values()
    known = [each.name for each in kinds if each.kind is each.KEYWORD_ONLY]
    for each in kinds:
        if each.kind is each.VAR_KEYWORD:
            unpacked = _UNPACKED.fullmatch(each.annotation)
            assert unpacked is not None, f"{call.__qualname__} does not say what {each} may be"
            known += call.__globals__[unpacked[1]].__annotations__
    return known + [each.name for each in kinds if each.kind is each.POSITIONAL_OR_KEYWORD][1:]


def _checked(
    call: Callable[..., Any], owner: str, *, by_type: bool, options: Sequence[Field[Any]]
) -> Callable[..., Any]:
    """options: that are given by keywords of the same name."""
    known, signature = _keywords(call), inspect.signature(call)

    @functools.cache
    def kinds() -> dict[str, _Kind]:  # at the first call: now a module may be half imported
        hints = get_type_hints(call) if by_type else {}
        found = {name: _kind(hint) for name, hint in hints.items() if name not in _TOLD_ELSEWHERE}
        found |= {each.name: kind for each in options if (kind := _ranged(each, hints[each.name]))}
        return {name: kind for name, kind in found.items() if kind is not None}

    def check(given: Sequence[Any], named: Mapping[str, Any]) -> None:
        _check_names(owner, named, known)
        try:
            values = signature.bind(*given, **named).arguments
        except TypeError as error:
            takes = ", ".join(known) or "nothing"
            raise CallError(f"{owner}: {error}", remedy=f"it takes {takes}") from None
        for name, kind in kinds().items():
            if name in values and not kind.has(values[name]):
                raise CallError(f"{name} must be {kind.words}, not {shown(values[name])}")

    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def awaited(*given: Any, **named: Any) -> Any:
            check(given, named)
            return await call(*given, **named)

        return awaited

    @functools.wraps(call)
    def called(*given: Any, **named: Any) -> Any:
        check(given, named)
        return call(*given, **named)

    return called


_TOLD_ELSEWHERE = frozenset({"options", "return", "dtype", "kv_dtype", "accuracy"})
"""Parameters that are not checked here: `with_overrides` checks options, and the errors of formats
say what helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A kind of value, and its words in an error."""

    has: Callable[[Any], bool]
    words: str
    plural: str = ""


def _kind(hint: Any) -> _Kind | None:
    """The kind of value of an annotation; None: it is not checked."""
    if hint is bool:
        return _Kind(has=lambda value: type(value) is bool, words="True or False")
    if hint is str:
        return _Kind(has=lambda value: isinstance(value, str), words="a text", plural="texts")
    if hint is types.NoneType:
        return _Kind(has=lambda value: value is None, words="None")
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        *first, last = map(repr, parts)
        words = f"{', '.join(first)} or {last}" if first else last
        return _Kind(has=lambda value: isinstance(value, str) and value in parts, words=words)
    if get_origin(hint) in (types.UnionType, Union):
        return _any(list(map(_kind, parts)))
    if get_origin(hint) is Callable:
        return _Kind(has=callable, words="a function")
    if get_origin(hint) is Mapping and parts[1] is object:
        return _Kind(has=lambda value: isinstance(value, Mapping), words="a dictionary")
    if get_origin(hint) is Sequence:
        each = _kind(parts[0])
        return None if each is None or not each.plural else _list(each)
    if isinstance(hint, type) and hint.__module__.startswith("edge."):
        name = f"edge.{hint.__name__}"
        return _Kind(
            has=lambda value: isinstance(value, hint), words=f"an {name}", plural=f"{name} objects"
        )
    return None


def _ranged(option: Field[Any], hint: Any) -> _Kind | None:
    """None for an option without a range."""
    facts = option_facts(option)
    if facts is None or facts.at_least is None:
        return None
    least, most, may_be_none = facts.at_least, facts.at_most, types.NoneType in get_args(hint)

    def has(value: Any) -> bool:
        if value is None:
            return may_be_none
        return type(value) is int and least <= value and (most is None or value <= most)

    return _Kind(has=has, words=f"{least} or more" if most is None else f"{least} to {most}")


def _any(kinds: Sequence[_Kind | None]) -> _Kind | None:
    known = [each for each in kinds if each is not None]
    if len(known) < len(kinds):
        return None
    *first, last = (each.words for each in known)
    comma = "," if len(first) > 1 or " or " in first[0] else ""
    return _Kind(
        has=lambda value: any(each.has(value) for each in known),
        words=f"{', '.join(first)}{comma} or {last}",
    )


def _list(each: _Kind) -> _Kind:
    def has(values: Any) -> bool:
        is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        return is_list and all(map(each.has, values))

    return _Kind(has=has, words=f"a list of {each.plural}")


def with_overrides(
    kind: type[Options], options: Options | None, overrides: Mapping[str, Any]
) -> Options:
    """The options (None: the defaults) with some fields replaced.

    Raises CallError for options of another class, and the errors of the constructor.
    """
    if options is not None and not isinstance(options, kind):
        raise CallError(
            f"options must be {kind.__name__} or None, not of the type {type(options).__name__}",
            remedy=f"write {kind.__name__}(...), or give its fields by name",
        )
    given = kind() if options is None else options
    changed: Options = replace(given, **overrides)  # type: ignore[type-var]
    return changed
