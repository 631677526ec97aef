"""A stream of text is the decoding of its tokens, whatever the tokens, the prompt and the stops."""

from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.text import TextStream, Tokenizer
from edge.text.cleanup import SpaceCleaner, clean_up_spaces
from edge.text.stream import StopMatcher
from tests.support.small_tokenizers import KINDS, write_checkpoint

# Clean-up makes text wait for its own reasons; these two kinds have it.
CLEANED_UP = ("unigram", "words")


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    settings = {"clean_up_tokenization_spaces": kind in CLEANED_UP}
    with TemporaryDirectory() as folder:
        return Tokenizer.open(write_checkpoint(Path(folder), KINDS[kind](), settings))


def tokens(kind: str, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Any ids, unknown ones included, and the ids of text that splits its characters."""
    tokenizer = tokenizer_of(kind)
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=max_size)
    characters = "🎉", "漢", "é", "e\u0301", "👩\u200d👧", "\ufffd", "n't"
    letters = st.sampled_from([*"aeothx .,'?!n", *characters])
    text = st.lists(letters, max_size=12).map(lambda parts: tokenizer.encode("".join(parts)))
    return st.lists(anything | text, max_size=4).map(lambda parts: [*chain.from_iterable(parts)])


def stream_text(stream: TextStream, ids: list[int]) -> tuple[str, int]:
    """Everything the stream shows, and how many tokens it took until it stopped."""
    shown = ""
    for taken, token_id in enumerate(ids, start=1):
        shown += stream.push(token_id)
        assert stream.text == shown
        if stream.stopped:
            return shown, taken
    return shown + stream.finish(), len(ids)


def cut(text: str, stop: list[str]) -> str:
    return text[: min([place for word in stop if (place := text.find(word)) >= 0], default=None)]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_stream_without_a_prompt_is_the_decoding(kind: str, data: st.DataObject) -> None:
    tokenizer, ids = tokenizer_of(kind), data.draw(tokens(kind))
    assert stream_text(TextStream(tokenizer), ids) == (tokenizer.decode(ids), len(ids))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CLEANED_UP])
@given(data=st.data())
@settings(max_examples=60)
def test_a_stream_behind_a_prompt_continues_its_decoding(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    prompt_ids = tokenizer.encode(data.draw(st.sampled_from(["fox", "The 🎉 quick", "a "])))
    ids = tokenizer.encode("over")[-1:] + data.draw(tokens(kind))
    before, whole = tokenizer.decode(prompt_ids), tokenizer.decode(prompt_ids + ids)
    if whole.startswith(before):  # a decoder that reaches far may rewrite the prompt
        assert stream_text(TextStream(tokenizer, prompt_ids), ids)[0] == whole[len(before) :]
    else:
        assert kind == "far_reaching"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CLEANED_UP])
@given(data=st.data())
@settings(max_examples=60)
def test_a_stream_ends_before_the_earliest_stop_string(kind: str, data: st.DataObject) -> None:
    tokenizer, ids = tokenizer_of(kind), data.draw(tokens(kind))
    text = tokenizer.decode(ids).replace("\ufffd", " ")
    pieces = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(
        lambda place: text[place[0] : sum(place)] or "x"
    )
    stop = data.draw(st.lists(pieces | st.sampled_from(["the", "aa", "🎉"]), max_size=3))
    stream = TextStream(tokenizer, (), stop)
    shown, taken = stream_text(stream, ids)
    assert shown == cut(tokenizer.decode(ids[:taken]), stop)
    assert stream.stopped == any(word in tokenizer.decode(ids[:taken]) for word in stop)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(data=st.data())
@settings(max_examples=100)
def test_text_is_shown_in_whole_characters(kind: str, data: st.DataObject) -> None:
    letters = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
    text = data.draw(st.text(letters, max_size=20))
    tokenizer = tokenizer_of(kind)
    stream = TextStream(tokenizer)
    ids = tokenizer.encode(text)
    assert all("\ufffd" not in stream.push(token_id) for token_id in ids)
    assert "\ufffd" not in stream.finish()


@given(st.lists(st.text("ab .", max_size=5)), st.lists(st.text("ab .", min_size=1), max_size=4))
@settings(max_examples=120)
def test_a_matcher_holds_back_exactly_what_may_become_a_stop_string(
    parts: list[str], stop: list[str]
) -> None:
    matcher, came, shown = StopMatcher(stop), "", ""
    for part in parts:
        came += part
        shown += matcher.push(part)
        if any(word in came for word in stop):
            assert matcher.stopped_by in stop
            assert came.startswith(f"{shown}{matcher.stopped_by}")
            assert shown == cut(came, stop)
            return
        may_become = [
            length
            for length in range(1, len(came) + 1)
            if any(word.startswith(came[-length:]) for word in stop)
        ]
        assert shown == came[: len(came) - max(may_become, default=0)]
    assert shown + matcher.finish() == came
    assert matcher.stopped_by is None


RULES = [" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"]


@given(st.lists(st.sampled_from([*RULES, *" .'nvrex"]), max_size=12), st.integers(1, 3))
@settings(max_examples=200)
def test_cleaning_spaces_in_parts_is_cleaning_them_at_once(parts: list[str], size: int) -> None:
    text = "".join(parts)
    cleaner = SpaceCleaner(enabled=True)
    shown = "".join(cleaner.push(text[start : start + size]) for start in range(0, len(text), size))
    assert shown + cleaner.finish() == clean_up_spaces(text)
