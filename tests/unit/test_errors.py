"""What an error says is to be done, for programs."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import edge
from edge.api.local_peers import _command_lines
from edge.cli.usage_errors import as_sentence, remedy_of
from edge.errors import shown
from tests.architecture.test_docs import MODULES
from tests.architecture.test_names import REPOSITORY

NAMES = {
    *("EdgeError", "RequestError", "CheckpointError", "CapacityError", "PlanError"),
    *("PeerError", "PeerLostError", "NetworkError", "ProtocolError"),
}


@pytest.mark.parametrize(
    ("error", "sentence", "remedy"),
    [
        (
            edge.RequestError("/a; b/c is there already", remedy="name another file"),
            "/a; b/c is there already; name another file",
            "name another file",
        ),
        (
            edge.PeerError("a; b", "it is full", remedy="wait"),
            "peer a; b: it is full; wait",
            "wait",
        ),
        (edge.PlanError("x", ("1", "2"), remedy="y"), "x; y", "y"),
        (edge.CapacityError("no room; give more"), "no room; give more", "give more"),
        (edge.EdgeError("so it is"), "so it is", ""),
        (edge.RequestError("a must be b"), "a must be b", "a must be b"),
        (
            edge.RequestError("top_k must be 1 or 2, or None, not 'a; b, not c'"),
            "top_k must be 1 or 2, or None, not 'a; b, not c'",
            "top_k must be 1 or 2, or None",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_remedy_ends_the_sentence(error: edge.EdgeError, sentence: str, remedy: str) -> None:
    for each in (error, pickle.loads(pickle.dumps(error)) if "peer" not in sentence else error):
        assert str(each) == sentence
        assert each.remedy == remedy


def test_any_value_is_shown_in_short() -> None:
    enormous = 10**5000
    assert shown(enormous) == "an enormous number"
    assert shown({"a": [enormous, -enormous]}) == "{'a': [an enormous number, an enormous number]}"
    assert shown(10**20) == "1" + "0" * 20
    assert len(shown("x" * 10_000)) <= 80


def test_a_plan_that_cannot_run_lists_its_problems() -> None:
    assert edge.PlanError("x", remedy="y").problems == ("x; y",)
    assert edge.PlanError("x", ("1", "2"), remedy="y").problems == ("1", "2")


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("give either --a or --b; leave out one", "leave out one"),
        ("'q; r' is not one of 'a', 'b'", "edge --help shows its usage"),
        ("no 'q; r' and no \"s; t\"; give 'u; v'", "give 'u; v'"),
        ("the cat's; take 'it'", "take 'it'"),
    ],
)
def test_of_what_was_typed_wrong_no_value_is_a_remedy(message: str, remedy: str) -> None:
    told = as_sentence(click.UsageError(message))
    assert told.message.startswith(message)
    assert remedy_of(told) == remedy


@pytest.mark.parametrize(
    "settings",
    [
        {"peers": 0},
        {"peers": 1, "threads": 0},
        {"peers": 1, "memory": "lots; of it"},
        {"peers": 1, "kv_disk": "a; b"},
        {"peers": 2, "threads": [1]},
        {"peers": 1, "backend": "x; y"},
    ],
    ids=str,
)
def test_settings_of_local_peers_have_a_remedy(settings: dict[str, object]) -> None:
    with pytest.raises(edge.RequestError) as raised:
        _command_lines(**settings)  # type: ignore[arg-type]
    assert raised.value.remedy
    values = (each for each in settings.values() if isinstance(each, str))
    assert not any(each in raised.value.remedy for each in values)


def hides_its_remedy() -> Iterator[str]:
    """Errors that are made of a text from elsewhere, with a semicolon somewhere behind it."""
    for module in MODULES:
        if not module.is_relative_to(REPOSITORY / "edge"):
            continue
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in NAMES and any(map(_has_both, node.args)):
                yield f"{module.relative_to(REPOSITORY)}:{node.lineno}"


def _has_both(argument: ast.expr) -> bool:
    parts = argument.values if isinstance(argument, ast.JoinedStr) else ()
    kinds = [
        "value" if isinstance(each, ast.FormattedValue) else "remedy"
        for each in parts
        if isinstance(each, ast.FormattedValue) or "; " in str(getattr(each, "value", ""))
    ]
    return "remedy" in kinds and kinds[0] == "value"


def test_a_remedy_behind_a_text_from_elsewhere_is_given_apart() -> None:
    assert list(hides_its_remedy()) == []
    (call,) = ast.parse('f(f"{path} is there; remove it")').body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert _has_both(call.value.args[0])
    assert Path(REPOSITORY / "edge" / "errors.py") in MODULES


TOLD = ("api", "cli", "text")
"""Rooms whose refusals people read most."""


def leaves_out_its_remedy(module: ast.Module) -> Iterator[int]:
    """Lines of refusals that end with their cause, as far as their words are written there."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id != "RequestError" or any(
            each.arg in ("remedy", None) for each in node.keywords
        ):
            continue
        said = [
            str(each.value)
            for argument in node.args
            for each in ast.walk(argument)
            if isinstance(each, ast.Constant)
        ]
        if said and not any("; " in each or " must be " in each for each in said):
            yield node.lineno


@pytest.mark.parametrize("room", TOLD)
def test_a_refusal_says_what_is_to_be_done(room: str) -> None:
    folder = REPOSITORY / "edge" / room
    modules = [module for module in MODULES if module.is_relative_to(folder)]
    assert modules
    found = [
        f"{module.relative_to(REPOSITORY)}:{line}"
        for module in modules
        for line in leaves_out_its_remedy(ast.parse(module.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_and_one_that_does_not_is_seen() -> None:
    said = 'RequestError(f"{path} is there")\nRequestError("a must be b, not c")\n'
    said += 'RequestError("it is there", remedy="remove it")\nRequestError(str(error))\n'
    assert list(leaves_out_its_remedy(ast.parse(said))) == [1]
