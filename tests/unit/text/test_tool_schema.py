"""Schemas of Python functions are those that `transformers` makes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest
from transformers.utils import get_json_schema

from edge.errors import RequestError
from edge.text.tool_schema import function_schema, tool_schemas


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


def weather(city: str, days: int = 1, unit: Unit = Unit.C) -> str:
    """The weather of a city.

    It is asked of a service.

    Args:
        city: Its name, which
            may be long: as "Aix-en-Provence".
        days: How far to look ahead (choices: [1, 2, 3])
        unit: Of temperatures.

    Returns:
        A sentence.
    """
    return f"{city} {days} {unit}"


def everything(
    a: list[int],
    b: dict[str, float],
    c: tuple[int, str],
    d: int | None,
    e: Optional[list[str]],  # noqa: UP045  users write it
    f: int | str,
    g: list[int] | str,
    h: Literal["x", "y", 3],
    i: Any,
    j: list,  # type: ignore[type-arg]
    k: dict,  # type: ignore[type-arg]
    m: bool = False,
) -> object:
    """Takes all.

    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
        f: six
        g: seven
        h: eight
        i: nine
        j: ten
        k: eleven
        m: twelve
    """
    return a, b, c, d, e, f, g, h, i, j, k, m


def nothing() -> None:
    """Does nothing."""


class Clock:
    def now(self, zone: str) -> str:
        """The time.

        Args:
            zone: Where, as Europe/Paris
        """
        return zone


@pytest.mark.parametrize(
    "function",
    [weather, everything, nothing, Clock.now, Clock().now],
    ids=["weather", "everything", "nothing", "a method", "a bound method"],
)
def test_a_schema_is_that_of_transformers(function: Callable[..., object]) -> None:
    assert function_schema(function) == get_json_schema(function)


def test_functions_and_schemas_go_together() -> None:
    by_hand = {"type": "function", "function": {"name": "mine", "parameters": {}}}
    schemas = tool_schemas([weather, by_hand])
    assert schemas == [get_json_schema(weather), by_hand]
    assert tool_schemas(None) is tool_schemas([]) is None


def no_docstring(x: int) -> int:
    return x


def no_type(x) -> None:  # type: ignore[no-untyped-def]
    """It.

    Args:
        x: what
    """


def not_described(x: int) -> None:
    """It."""


def strange(x: Clock) -> None:
    """It.

    Args:
        x: what
    """


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (no_docstring, "tool no_docstring has no docstring"),
        (no_type, "tool no_type has no type for x; annotate it"),
        (not_described, "does not describe x; add it under Args:"),
        (strange, "x of tool strange has a type that JSON does not have"),
        (5, "a tool must be a function or its JSON schema, not 5"),
    ],
)
def test_what_a_tool_lacks_is_said(tool: Any, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        tool_schemas([tool])
    assert message in str(raised.value)
    with pytest.raises(RequestError, match="tools must be a list"):
        tool_schemas("weather")  # type: ignore[arg-type]
