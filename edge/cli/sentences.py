"""Sentences below tables and answers, wrapped at words on a terminal."""

from __future__ import annotations

from rich.console import Console


def print_sentence(console: Console, sentence: str) -> None:
    """Print a sentence: wrapped at words on a terminal, else in one line."""
    console.print(
        sentence, markup=False, highlight=False, emoji=False, soft_wrap=not console.is_terminal
    )


def tell(sentence: str) -> None:
    """Like `print_sentence`, on standard error."""
    print_sentence(Console(stderr=True), sentence)
