"""Sentences below tables and answers, broken between words where a terminal shows them."""

from __future__ import annotations

from rich.console import Console


def print_sentence(console: Console, sentence: str) -> None:
    """As it is: on a terminal broken between words, elsewhere one line, however long."""
    console.print(
        sentence, markup=False, highlight=False, emoji=False, soft_wrap=not console.is_terminal
    )


def tell(sentence: str) -> None:
    """The same, on standard error."""
    print_sentence(Console(stderr=True), sentence)
