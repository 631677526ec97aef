"""Sentences below tables, on terminals and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from edge.cli.sentences import print_sentence

SENTENCE = "Left out: [bold]attic[/bold] :cat: (it has less memory than one layer takes)."


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_word_is_broken(is_terminal: bool) -> None:
    out = io.StringIO()
    print_sentence(
        Console(file=out, width=30, force_terminal=is_terminal, color_system=None), SENTENCE
    )
    lines = out.getvalue().splitlines()
    assert (len(lines) > 1) == is_terminal
    assert [word for line in lines for word in line.split()] == SENTENCE.split()
    assert not is_terminal or max(map(len, lines)) <= 30
