"""One page names every environment variable that the program reads or sets, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub

from tests.architecture.test_docs import MODULES
from tests.architecture.test_names import REPOSITORY

PAGE = REPOSITORY / "docs" / "guide" / "environment.md"
NAME = re.compile(r"_?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
ONE_WORD = {"EDITOR", "HOME", "LANG", "TERM", "TZ", "VISUAL"}
VALUES = {"PCI_BUS_ID"}
"""Of variables."""
BY_LIBRARIES = {
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
    *("EDITOR", "NO_COLOR", "VISUAL"),
}
"""`platformdirs` reads those that begin with XDG, `rich` and `prompt_toolkit` the others."""


def read_or_set(module: Path) -> Iterator[str]:
    """What looks like a variable's name in a module that deals with the environment."""
    text = module.read_text(encoding="utf-8")
    if not re.search(r"\benviron(?:ment)?\b|\bgetenv\b", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = NAME.fullmatch(node.value) or node.value in ONE_WORD
            if is_name and node.value not in VALUES:
                yield node.value


def of_the_program() -> set[str]:
    modules = [each for each in MODULES if "demos" not in each.relative_to(REPOSITORY).parts]
    return {name for module in modules for name in read_or_set(module)}


def on_the_page() -> set[str]:
    quoted = re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8"))
    named = {each for each in quoted if NAME.fullmatch(each) or each in ONE_WORD}
    return named - VALUES


def test_every_variable_of_the_program_is_on_the_page() -> None:
    found = of_the_program()
    assert {"EDGE_CACHE", "EDGE_CONFIG", "TRITON_INTERPRET"} <= found
    assert found - on_the_page() == set()


def test_every_variable_on_the_page_is_one() -> None:
    folder = Path(huggingface_hub.__file__).parent
    sources = [folder / "constants.py", *folder.glob("utils/_auth.py")]
    hub = {name for each in sources for name in NAME.findall(each.read_text(encoding="utf-8"))}
    assert on_the_page() - of_the_program() - hub - BY_LIBRARIES == set()
