"""Guesses at what a grammar forces: how much they save, and what they follow from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edge.demos.bundled import MODEL
from edge.errors import RequestError
from edge.text import Tokenizer
from edge.text.detokenizer import Vocabulary
from edge.text.grammar import Grammar, Grammars, Matcher, schema_grammar
from tests.support.call_templates import random_schema
from tests.support.small_tokenizers import letters

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_the_cat": {"type": "string", "maxLength": 8},
        "place_of_the_cat": {"enum": ["in the barn", "in the house"]},
        "number_of_cats": {"type": "integer"},
    },
    "required": ["name_of_the_cat", "place_of_the_cat", "number_of_cats"],
    "additionalProperties": False,
}
ANSWER = {"name_of_the_cat": "Tom", "place_of_the_cat": "in the barn", "number_of_cats": 3}
MOST = 15


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(
        tokenizer.vocabulary,
        vocab_size=tokenizer.vocab_size,
        end_ids=frozenset({2}),
        encode=tokenizer.encode_part,
    )


def steps(matcher: Matcher, answer: Sequence[int], most: int = MOST) -> list[int]:
    """The numbers of tokens that steps give a model that answers so, with drafts up to `most`."""
    found, place = [], 0
    while place < len(answer):
        guesses, right = matcher.guesses[:most], 0
        assert len(matcher.allowed_after(guesses)) == len(guesses), "each may follow"
        while answer[place + right : place + right + 1] == [*guesses[right : right + 1]] != []:
            right += 1
        found.append(len(answer[place : place + right + 1]))
        for token in answer[place : place + right + 1]:
            matcher.take(token)
        place += found[-1]
    return found


@pytest.mark.parametrize("indent", [None, 2])
def test_keys_and_signs_are_guessed(
    grammars: Grammars, tokenizer: Tokenizer, indent: int | None
) -> None:
    answer = tokenizer.encode_part(json.dumps(ANSWER, indent=indent))
    given = steps(grammars.begin(schema_grammar(SCHEMA), guesses=True), answer)
    assert len(given) < len(answer) / 2
    assert max(given) > 8
    assert steps(grammars.begin(schema_grammar(SCHEMA)), answer) == [1] * len(answer)


def test_white_space_is_as_it_was(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.begin(schema_grammar(SCHEMA), guesses=True)
    for token in tokenizer.encode_part('{\n  "name_of_the_cat" : "Tom",'):
        matcher.take(token)
    text = b"".join(tokenizer.vocabulary.bytes_of(each) or b"" for each in matcher.guesses)
    assert text.startswith(b'\n  "p')


@pytest.mark.parametrize("most", [1, 3, 7])
def test_guesses_do_not_depend_on_how_many_are_verified(
    grammars: Grammars, tokenizer: Tokenizer, most: int
) -> None:
    """Whether a token was one decides about its last bits."""
    answer = tokenizer.encode_part(json.dumps(ANSWER))
    whole, cut = (grammars.begin(schema_grammar(SCHEMA), guesses=True) for _each in range(2))
    assert len(steps(cut, answer[:20], most)) > len(steps(whole, answer[:20]))
    assert (cut.guesses, cut.was_guessed) == (whole.guesses, whole.was_guessed)
    one_by_one = grammars.begin(schema_grammar(SCHEMA), guesses=True)
    for token in answer[:20]:
        one_by_one.take(token)
    assert (one_by_one.guesses, one_by_one.was_guessed) == (whole.guesses, whole.was_guessed)


def test_guesses_that_were_wrong_are_fewer(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Of a model that spells its keys letter by letter."""
    begun = json.dumps(ANSWER).split("number")[0]
    guesses = []
    for parts in ([begun], begun):
        matcher = grammars.begin(schema_grammar(SCHEMA), guesses=True)
        for part in parts:
            for token in tokenizer.encode_part(part):
                matcher.take(token)
        guesses.append(matcher.guesses)
    usual, fewer = guesses
    assert 0 < len(fewer) < len(usual)
    assert usual[: len(fewer)] == fewer


def test_a_free_text_is_not_guessed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.begin(Grammar("start: /(?s:.{0,200})/"), guesses=True)
    for token in tokenizer.encode_part("The cat lives in the barn."):
        assert matcher.guesses == ()
        matcher.take(token)
    assert not matcher.was_guessed


def test_a_regex_may_force_a_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.begin(
        Grammar("start: /[ab]The cat lives in the (barn|house)/"), guesses=True
    )
    matcher.take(tokenizer.encode_part("a")[-1])
    text = b"".join(tokenizer.vocabulary.bytes_of(each) or b"" for each in matcher.guesses)
    assert b"The cat lives in the ".startswith(text)
    assert len(text) > 8


def test_each_mask_is_that_behind_its_guess(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """In answers of a model that knows nothing to random schemas; guesses change nothing."""
    seen = 0
    for seed in range(40):
        grammar, draw = schema_grammar(random_schema(seed)), np.random.default_rng(seed)
        guided, plain = grammars.begin(grammar, guesses=True), grammars.begin(grammar)
        for _token in range(60):
            assert (guided.allowed() == plain.allowed()).all()
            guesses = guided.guesses
            masks = guided.allowed_after(guesses)
            seen += len(masks)
            assert len(masks) == len(guesses)
            if guesses:
                ahead = grammars.begin(grammar)
                ahead._matcher = plain._matcher.deep_copy()
                for guess, mask in zip(guesses, masks, strict=True):
                    ahead.take(guess)
                    assert (mask == ahead.allowed()).all()
            bits = np.unpackbits(plain.allowed(), count=tokenizer.vocab_size, bitorder="little")
            token = int(draw.choice(np.flatnonzero(bits)))
            if token == 2:
                break
            guided.take(token)
            plain.take(token)
    assert seen > 100


def test_masks_end_before_a_token_that_may_not_follow(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.begin(schema_grammar(SCHEMA), guesses=True)
    (begin, wrong) = tokenizer.encode_part("{")[-1], tokenizer.encode_part("cat")[-1]
    assert len(matcher.allowed_after([begin, wrong, begin])) == 1
    matcher.take(begin)
    with pytest.raises(RequestError):
        matcher.take(wrong)


def test_guesses_end_before_a_special_token() -> None:
    """Which a grammar may name by its id. Nor is the end of an answer guessed."""
    pieces = ["a", "b", "ab", "ÿ", "<call>", "<end>", "ba"]
    grammars = Grammars(
        Vocabulary(letters(pieces)),
        vocab_size=7,
        end_ids=frozenset({5}),
        encode=lambda text: [pieces.index(sign) for sign in text],
    )
    matcher = grammars.begin(Grammar('start: "ab" "a" <[4]> "b" "ab"'), guesses=True)
    found = []
    for token in (2, 0, 4, 1, 0, 1):
        found.append(matcher.guesses)
        matcher.take(token)
    assert found == [(), (0,), (), (1, 0, 1), (0, 1), (1,)]
    assert matcher.guesses == ()
