"""Pages say what is true: the files they name exist, links lead somewhere, figures are in rows."""

from __future__ import annotations

import ast
import csv
import functools
import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.test_names import PARTS, REPOSITORY
from tests.support import quality_picture, recorded_session, reference_page

RESULTS = REPOSITORY / "demos" / "bench" / "results.csv"

FIGURE_PAGES = [REPOSITORY / "README.md", REPOSITORY / "docs" / "benchmarks.md"]
"""Whose tables name the rows that they rest on."""


@cache
def tracked() -> frozenset[str]:
    """Every file and folder of the repository that somebody wrote, as paths from its root."""
    tops = [REPOSITORY / top for top in ("edge", *PARTS, "docs", "tests", "scripts", ".ci")]
    found = [path for top in tops for path in (top, *top.rglob("*"))]
    own = [path for path in (*found, *REPOSITORY.glob("*.*")) if "__pycache__" not in path.parts]
    return frozenset(path.relative_to(REPOSITORY).as_posix() for path in own)


PAGES = sorted(REPOSITORY / name for name in tracked() if name.endswith(".md"))
MODULES = sorted(
    REPOSITORY / name
    for name in tracked()
    if name.endswith(".py")
    and name.split("/")[0] in ("edge", *PARTS)
    and not name.startswith("kernels/native/")  # a distribution of its own
)


def page_id(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def exists(name: str, place: Path) -> bool:
    """Whether a path is one of the repository's: from its root, from `place`, or its very end."""
    candidates = {name, (place / name).resolve().relative_to(REPOSITORY).as_posix()}
    return not candidates.isdisjoint(tracked()) or any(
        path.endswith(f"/{name}") for path in tracked()
    )


def named_files(text: str) -> Iterator[str]:
    """What is said in backticks of modules and pages, as `x/y.py` or `y.py`."""
    for name in re.findall(r"`((?:\.\./)*[\w./<>*-]+\.(?:py|md|csv))`", text):
        if not re.search(r"[<>*]", name):
            yield name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_named_on_a_page_exist(page: Path) -> None:
    missing = [
        name
        for name in named_files(page.read_text(encoding="utf-8"))
        if not exists(name, page.parent)
    ]
    assert not missing + unknown_names(page.read_text(encoding="utf-8"))


TOPS = "|".join(["edge", *PARTS, "docs", "tests"])

IN_BACKTICKS = re.compile(r"`([^`\n]+)`")

FOLDER = re.compile(rf"(?:{TOPS})/[\w./-]*")
"""A file or folder by its path from the root."""

DOTTED = re.compile(r"(?<![\w./])(?:edge|tests)(?:\.\w+)+")
"""A module or package, and maybe a name in it."""


@cache
def words(file: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", (REPOSITORY / file).read_text(encoding="utf-8")))


@cache
def is_known(dotted: str) -> bool:
    """Whether the module exists, and says the name that follows."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = "/".join(parts[1:count] if count > 1 and parts[1] in PARTS else parts[:count])
        file = f"{place}.py" if f"{place}.py" in tracked() else f"{place}/__init__.py"
        if file in tracked():
            return count == len(parts) or parts[count] in words(file)
    return False


def unknown_names(text: str) -> list[str]:
    """Folders, modules and their names in backticks, or run by `python -m`, that do not exist."""
    quoted = IN_BACKTICKS.findall(text)
    folders = {name.rstrip("/") for name in quoted if FOLDER.fullmatch(name)}
    dotted = [name for part in quoted for name in DOTTED.findall(part) if "/" not in part]
    dotted += re.findall(r"python -m ((?:edge|tests)\.[\w.]*\w)", text)
    return sorted(folders - tracked()) + [name for name in dotted if not is_known(name)]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those in it, without the expressions that most of a tree is."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, field, ()):
            yield each
            yield from statements(each)


@functools.cache
def docstrings(path: Path) -> tuple[str, ...]:
    """Those of the module, its classes and functions, and the strings under constants."""
    strings = (
        node.value.value
        for node in statements(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    return tuple(each for each in strings if isinstance(each, str))


def test_files_named_in_docstrings_exist() -> None:
    missing = []
    for module in MODULES:
        for text in docstrings(module):
            unknown = [name for name in named_files(text) if not exists(name, module.parent)]
            missing += [(page_id(module), name) for name in (*unknown, *unknown_names(text))]
    assert not missing


def rooms() -> Iterator[tuple[str, str]]:
    """The folders of ARCHITECTURE.md that answer a question, with the question."""
    for line in (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r"\| `([\w/]+)/` \| ([A-Z][^|]*\?) \|", line)
        if found is not None:
            yield found[1], found[2]


def test_docstrings_start_with_what_a_thing_is() -> None:
    opening = [
        (page_id(module), text.split("\n")[0])
        for module in MODULES
        for text in docstrings(module)
        if text.startswith("Of ")
    ]
    assert not opening, "Of what it is, is not what it is"


def test_each_room_says_the_question_of_the_architecture() -> None:
    asked = dict(rooms())
    for room, question in asked.items():
        docstring = docstrings(REPOSITORY / room / "__init__.py")[0]
        assert docstring.startswith(question), room
    packages = {path.parent.name for path in (REPOSITORY / "edge").glob("*/__init__.py")}
    assert {room.removeprefix("edge/") for room in asked if room.startswith("edge/")} == packages


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src(?:set)?="(.+?)"', text):
        if "://" in target:
            continue
        name, _hash, anchor = target.partition("#")
        aim = (page.parent / name).resolve() if name else page
        if not aim.exists() or (anchor and anchor not in anchors(aim)):
            broken.append(target)
    assert not broken


@cache
def rows() -> list[dict[str, str]]:
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


QUESTIONS = {row["question"] for row in rows()}


def shown(text: str, value: float) -> bool:
    """Whether `text` is this value, rounded to the digits that it has."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5001 / 10.0**digits


def is_of(figure: re.Match[str], row: dict[str, str]) -> bool:
    """Whether "50th percentile (20th to 80th)" are those of the row."""
    median, low, high = figure.groups()
    if not shown(median, float(row["p50"])):
        return False
    return low is None or (shown(low, float(row["p20"])) and shown(high, float(row["p80"])))


FIGURE = re.compile(r"(\d[\d.]*)(?: (?:tok/s|MiB|µs|ms|s))?(?: \(([\d.]+)–([\d.]+)\))?")


def tables(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """The cells of each line of a table, with the question that was named last before it."""
    question: str | None = None
    for line in text.splitlines():
        found = re.match(r"`([^`]+)`: ", line)
        if found is not None:
            question = found[1]
        elif line.startswith("#"):
            question = None
        elif line.startswith("| "):
            yield question, [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", FIGURE_PAGES, ids=page_id)
def test_figures_are_those_of_the_rows_that_they_name(page: Path) -> None:
    checked = 0
    for question, cells in tables(page.read_text(encoding="utf-8")):
        commit = re.fullmatch(r"`([0-9a-f]{7})`", cells[-1])
        if commit is None:
            continue
        own = [
            row
            for row in rows()
            if row["commit"].partition("-")[0] == commit[1] and question in (None, row["question"])
        ]
        for cell in cells[1:-1]:
            figure = FIGURE.fullmatch(cell)
            assert figure is not None, cells
            assert any(is_of(figure, row) for row in own), (cells[0], cell)
            checked += 1
    assert checked > 10


def test_questions_named_on_pages_are_in_the_results() -> None:
    named = {
        question
        for page in FIGURE_PAGES
        for question, _cells in tables(page.read_text(encoding="utf-8"))
        if question is not None
    }
    assert named
    assert named <= QUESTIONS


def test_the_reference_is_what_the_program_says() -> None:
    written = reference_page.PAGE.read_text(encoding="utf-8")
    assert written == reference_page.page(), "run: python -m tests.support.reference_page"


def test_the_recorded_session_is_of_these_commands() -> None:
    """`scripts/record-session` runs them, and demos and README's tests what they show."""
    light, dark = (
        html.unescape((REPOSITORY / "docs" / "drawings" / name).read_text())
        for name in ("session.svg", "session-dark.svg")
    )
    shown = light.replace("\N{NO-BREAK SPACE}", " ")
    assert all(f"$ {command}" in shown for command in recorded_session.COMMANDS)
    assert "the same as without the loss" in shown
    colour = re.compile(r"#[0-9a-fA-F]{6}|rgb\([0-9,]+\)")
    assert light != dark
    assert colour.sub("", light) == colour.sub("", dark), "of one run"


def test_the_picture_of_quality_is_of_the_newest_rows() -> None:
    drawn = quality_picture.drawing(quality_picture.points())
    assert quality_picture.PICTURE.read_text(encoding="utf-8") == drawn, (
        "draw it again: python -m tests.support.quality_picture"
    )
