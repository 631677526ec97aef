"""Rooms of an answer's life stay readable: no large class, no function with many parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.test_names import REPOSITORY

ROOMS = ("api", "studies", "runs", "answers", "scheduling")

MOST_LINES_OF_A_CLASS = 250
MOST_PARAMETERS = 8


def modules(*rooms: str) -> Iterator[tuple[str, ast.Module]]:
    for room in rooms:
        for path in sorted(Path(REPOSITORY, "edge", room).rglob("*.py")):
            yield path.relative_to(REPOSITORY).as_posix(), ast.parse(path.read_text("utf-8"))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of named parameters, without self and cls."""
    named = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return sum(each.arg not in ("self", "cls") for each in named)


def test_classes_and_functions_are_small() -> None:
    large = []
    for name, module in modules(*ROOMS):
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                large += [(name, node.name, lines)] if lines > MOST_LINES_OF_A_CLASS else []
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = parameters(node)
                large += [(name, node.name, count)] if count > MOST_PARAMETERS else []
    assert not large


def test_scheduling_draws_no_random_numbers() -> None:
    """Import contracts know whole packages, and numpy is one."""
    random = [
        name
        for name, module in modules("scheduling")
        for node in ast.walk(module)
        if (isinstance(node, ast.Attribute) and node.attr == "random")
        or (isinstance(node, ast.ImportFrom) and "random" in (node.module or ""))
    ]
    assert not random
