"""Prompts for what goes between two texts, in the tokens that a tokenizer has for that."""

from __future__ import annotations

import pytest

from edge.text.infill import infill_prompt


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (
            "<|fim_prefix|> <|fim_suffix|> <|fim_middle|>",
            "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
        ),
        ("<fim_prefix> <fim_suffix> <fim_middle> x", "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        ("[PREFIX] [SUFFIX] [MIDDLE]", "[SUFFIX]b[PREFIX]a"),
        ("<|fim_prefix|> <|fim_suffix|>", None),
        ("", None),
    ],
)
def test_the_form_is_that_of_the_tokens(tokens: str, prompt: str | None) -> None:
    assert infill_prompt(lambda token: token in tokens.split(), "a", "b") == prompt


def test_texts_are_never_taken_for_parts_of_the_form() -> None:
    assert infill_prompt(lambda _token: True, "{behind}", "{before}") == (
        "<|fim_prefix|>{behind}<|fim_suffix|>{before}<|fim_middle|>"
    )
