"""The settings of `/set`: the options of answers, and their view."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from edge.answers.terms import GenerationOptions
from edge.cli.chat.answer_view import Thoughts
from edge.errors import RequestError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.option_fields import OptionFacts, option_facts

_SHORT = {"max_tokens": "max_new_tokens"}
_WORDS = {"none": None, "default": None}
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a conversation."""

    generation: GenerationOptions
    markdown: bool = True
    """Render Markdown on a terminal."""
    thoughts: Thoughts = "fold"
    """The view of thinking: a line about it, all of it, or nothing."""

    def changed(self, name: str, value: str) -> Settings:
        """The settings with one changed. Raises RequestError for an unknown name or invalid
        value."""
        field = name.strip("-").replace("-", "_")
        field = _SHORT.get(field, field)
        if field == "markdown":
            return replace(self, markdown=_one_of(name, value, _SWITCH))
        if field == "thoughts":
            kinds: dict[str, Thoughts] = {each: each for each in get_args(Thoughts)}
            return replace(self, thoughts=_one_of(name, value, kinds))
        names = _generation_names()
        if field not in names:
            known = setting_names()
            near = difflib.get_close_matches(name, known, 1)
            instead = f"do you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise RequestError(f"{name} cannot be set", remedy=instead)
        return replace(self, generation=replace(self.generation, **{field: _value(field, value)}))

    def told(self, name: str, usual: SamplingParameters) -> str:
        """The present value of a name that `changed` accepted."""
        field = name.strip("-").replace("_", "-")
        field = _SHORT.get(field.replace("-", "_"), field).replace("_", "-")
        return f"{field}: {dict(self.rows(usual))[field]}"

    def rows(self, usual: SamplingParameters) -> list[tuple[str, str]]:
        """(name, value) of each setting, for `/show`. usual: the model's defaults."""
        rows = [
            (name.replace("_", "-"), _shown(getattr(self.generation, name), name, usual))
            for name in _generation_names()
        ]
        return [*rows, ("markdown", "on" if self.markdown else "off"), ("thoughts", self.thoughts)]


def setting_names() -> list[str]:
    """The names that `/set` takes."""
    return [*(each.replace("_", "-") for each in _generation_names()), "markdown", "thoughts"]


def near_setting(name: str) -> str | None:
    """The setting with this name or a similar one; None: there is none."""
    field = name.strip("-").replace("-", "_")
    field = _SHORT.get(field, field).replace("_", "-")
    near = difflib.get_close_matches(field, setting_names(), 1, 0.8)
    return near[0] if near else None


def words_of(name: str) -> list[str]:
    """The values of a setting with a few words as values."""
    if name in ("markdown", "thinking"):
        return list(_SWITCH)
    return list(get_args(Thoughts)) if name == "thoughts" else []


def _generation_names() -> list[str]:
    return list(_generation_facts())


def _generation_facts() -> dict[str, OptionFacts]:
    """The facts of command line options, by name."""
    every = ((each.name, option_facts(each)) for each in fields(GenerationOptions))
    return {name: facts for name, facts in every if facts is not None}


def _value(name: str, text: str) -> Any:
    hint = get_type_hints(GenerationOptions)[name]
    kinds = get_args(hint) or (hint,)
    if type(None) in kinds and _WORDS.get(text, text) is None:
        return None
    if name in ("stop", "context"):
        if _WORDS.get(text, text) is None:
            return ()
        return (text,) if name == "stop" else tuple(each.strip() for each in text.split(","))
    if (parse := _generation_facts()[name].parse) is not None:
        return parse(text)
    if bool in kinds:
        return _one_of(name, text, {**_SWITCH, "default": None})
    number = float if float in kinds else int
    try:
        return number(text)
    except ValueError:
        what = "a number" if number is float else "a whole number"
        raise RequestError(
            f"{name.replace('_', '-')} is {what}, not {text!r:.80}", remedy=f"give {what}"
        ) from None


def _one_of(name: str, value: str, choices: dict[str, Any]) -> Any:
    if value not in choices:
        known = ", ".join(choices)
        raise RequestError(
            f"{name} is one of {known}, not {value!r:.80}", remedy=f"give one of {known}"
        )
    return choices[value]


def _shown(value: object, name: str, usual: SamplingParameters) -> str:
    if isinstance(value, Mapping) and name == "logit_bias":
        return ",".join(f"{id}={bias:g}" for id, bias in value.items())
    if value is None and name not in ("seed", "logit_bias") and hasattr(usual, name):
        return f"{getattr(usual, name)} (the model's)"
    if value is None and name == "thinking":
        return "default (the template's)"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == ():
        return "none"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
