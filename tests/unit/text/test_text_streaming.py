"""Text that grows token by token: whole characters, first spaces, stop strings, cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from edge.errors import RequestError
from edge.text import TextStream, Tokenizer
from edge.text.detokenizer import Vocabulary, WindowStream
from tests.support.small_tokenizers import (
    KINDS,
    byte_fallback,
    byte_level,
    unigram,
    words,
    write_checkpoint,
)


def stream_of(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    prompt_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, prompt_ids, stop)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()], stream


def test_characters_split_over_tokens_appear_whole(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    text = "🫠漢e\u0302👩‍👩‍👧ẞ"
    ids = ours.encode(text)[1:]
    shown, stream = stream_of(ours, ids)
    assert len(ids) > len(text), "the characters are split"
    assert "\ufffd" not in "".join(shown)
    assert stream.text == ours.decode(ids)
    last_of_first = len(ours.encode("🫠")) - 2
    assert shown[: last_of_first + 1] == [""] * last_of_first + ["🫠"], "not sooner, not later"


def test_an_answer_that_ends_amid_a_character(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    ids = ours.encode("fox 🫠")[1:-1]
    shown, stream = stream_of(ours, ids)
    assert shown[-1] == "\ufffd"
    assert stream.text == ours.decode(ids) == "fox \ufffd"


def test_a_run_of_byte_tokens_is_shown_when_it_ends(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_fallback()))
    bytes_of = {text: [3 + byte for byte in text.encode()] for text in ("漢", "🎉")}
    fox = ours.encode("fox")[1:]
    shown, _ = stream_of(ours, [*bytes_of["漢"], *bytes_of["🎉"], *fox])
    assert shown[:7] == [""] * 7
    assert "".join(shown) == "漢🎉 fox"
    # One byte too many spoils the run: what was held back would have been wrong.
    spoilt = [*bytes_of["漢"], bytes_of["🎉"][0], *fox]
    shown, _ = stream_of(ours, spoilt)
    assert "".join(shown) == ours.decode(spoilt) == "\ufffd" * 4 + " fox"


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "LlamaTokenizer"}])
def test_the_first_space_is_kept_only_behind_a_prompt(
    tmp_path: Path, settings: Mapping[str, object]
) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_fallback(), settings))
    prompt_ids, ids = ours.encode("The quick"), ours.encode("brown fox")[1:]
    assert "".join(stream_of(ours, ids)[0]) == "brown fox"
    assert "".join(stream_of(ours, ids, prompt_ids=prompt_ids)[0]) == " brown fox"
    begin_only = prompt_ids[:1]
    assert "".join(stream_of(ours, ids, prompt_ids=begin_only)[0]) == "brown fox"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_cut_by_the_prompts_end_is_completed(tmp_path: Path, kind: str) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, KINDS[kind]()))
    ids = ours.encode("fox 🎉🫠")
    for cut in (1, 2, 3):
        shown, _ = stream_of(ours, ids[-cut:], prompt_ids=ids[:-cut])
        assert "".join(shown) == "🫠"


STOPS = [
    (["qu"], "The "),
    (["k brown f"], "The quic"),
    (["ck", "quick"], "The "),
    (["T"], ""),
    (["The quick brown fox"], ""),
    (["quack", "quicker", "quick brown!"], "The quick brown fox"),
    (["fox jumps"], "The quick brown fox"),
    (["x"], "The quick brown fo"),
    (["wn fox", "own", "brown fx"], "The quick br"),
    (["ox", "fox"], "The quick brown "),
]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("by_letter", [False, True])
@pytest.mark.parametrize(("stop", "wanted"), STOPS)
def test_stop_strings_cut_the_text(
    tmp_path: Path, kind: str, by_letter: bool, stop: list[str], wanted: str
) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, KINDS[kind]()))
    text, space = "The quick brown fox", "Ġ" if kind == "byte_level" else "▁"
    ids: list[int | None] = [*ours.encode(text)[1:]]
    if by_letter:
        ids = [ours.token_id(letter) for letter in text.replace(" ", space)]
    shown, stream = stream_of(
        ours, [token_id for token_id in ids if token_id is not None], stop=stop
    )
    assert "".join(shown) == stream.text == wanted
    assert stream.stopped == (wanted != text)


def test_text_waits_only_while_it_may_become_a_stop_string(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    ids = [ours.token_id(letter) or 0 for letter in "ababacab"]
    shown, stream = stream_of(ours, ids, stop=["abac!", "cab?"])
    assert shown == ["", "", "", "ab", "", "", "aba", "", "cab"]
    assert not stream.stopped


def test_after_a_stop_string_nothing_more_is_shown(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    stream = TextStream(ours, (), ["quick"])
    for token_id in ours.encode("The quick brown"):
        stream.push(token_id)
    assert stream.stopped_by == "quick"
    assert stream.push(ours.token_id("a") or 0) == ""
    assert stream.finish() == ""
    assert stream.text == "The "


def test_a_stop_string_may_complete_in_the_text_held_back_to_the_end(tmp_path: Path) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_fallback()))
    ids = [*ours.encode("fox")[1:], *(3 + byte for byte in "漢".encode())]
    shown, stream = stream_of(ours, ids, stop=["x漢"])
    assert "".join(shown) == "fo"
    assert stream.stopped


@pytest.mark.parametrize("stop", [[""], ["a", ""], "a", [3]])
def test_stop_strings_that_could_not_stop_anything_are_refused(tmp_path: Path, stop: Any) -> None:
    ours = Tokenizer.open(write_checkpoint(tmp_path, byte_level()))
    with pytest.raises(RequestError, match="stop must be a list of strings that are not empty"):
        TextStream(ours, (), stop)


def test_spaces_taken_off_the_start_are_those_of_the_whole_text(tmp_path: Path) -> None:
    backend = byte_fallback()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    )
    ours = Tokenizer.open(write_checkpoint(tmp_path, backend))
    space = ours.token_id("▁") or 0
    ids = [space] * 5 + ours.encode("fox jumps")[1:] + [space] * 5 + ours.encode("fox")[1:]
    for skipped in range(6):
        assert "".join(stream_of(ours, ids[skipped:])[0]) == ours.decode(ids[skipped:])


class RecordingVocabulary(Vocabulary):
    """Notes how many tokens each decoding took."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.lengths: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        self.lengths.append(len(token_ids))
        return super().decode(token_ids)


@pytest.mark.parametrize("build", [byte_fallback, unigram, words])
def test_a_token_late_in_an_answer_costs_as_little_as_the_first(build: Any) -> None:
    backend = build()
    vocabulary = RecordingVocabulary(backend)
    prompt_ids = backend.encode("The quick brown fox " * 50).ids
    stream = WindowStream(vocabulary, prompt_ids, byte_fallback=True)
    spaces = [token_id for token_id in [backend.token_to_id("▁")] if token_id is not None] * 500
    ids = backend.encode("jumps over the lazy dog " * 50).ids + spaces
    for token_id in ids:
        stream.push(token_id)
    assert max(vocabulary.lengths) <= 9
    assert len(vocabulary.lengths) <= 5 * len(ids) + 1
