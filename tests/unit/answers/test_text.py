"""One reply in the making: why it ends, what is shown, and its figures by a clock that is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest

from edge.answers.terms import AnswerReading, Terms
from edge.answers.text import AnswerText, Token
from edge.errors import RequestError
from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.protocol.step import FinishReason
from edge.text import Tokenizer
from edge.text.answer_forms import AnswerForm
from edge.text.answer_parser import whole_answer
from edge.text.answer_parts import ReadAnswer, Said
from tests.support.small_tokenizers import byte_level, write_checkpoint


def request(**values: object) -> Terms:
    fields: dict[str, object] = {
        "prompt": (1, 2, 3),
        "max_new_tokens": 4,
        "sampling": SamplingParameters(seed=7),
        **values,
    }
    return Terms(**fields)  # type: ignore[arg-type]


def clock(times: Iterable[float]) -> Iterator[float]:
    return iter(times)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"max_new_tokens": 0}, "must be 1 or more, not 0"),
        ({"max_new_tokens": -3}, "must be 1 or more, not -3"),
        ({"max_new_tokens": 1.0}, "must be 1 or more, not 1.0"),
        ({"max_new_tokens": True}, "must be 1 or more, not True"),
        ({"stop": ("",)}, "texts that are not empty"),
        ({"stop": (5,)}, "texts that are not empty"),
    ],
)
def test_what_cannot_be_asked(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        request(**values)
    assert message in str(raised.value)


def test_it_ends_by_its_length() -> None:
    generation = AnswerText(request(max_new_tokens=3), None)
    ends: list[FinishReason | None] = [None, None, "length"]
    tokens = [
        generation.push(token, end, 0.0) for token, end in zip((10, 11, 12), ends, strict=True)
    ]
    assert [token.finish_reason for token in tokens] == [None, None, "length"]
    assert [token.token_id for token in tokens] == generation.token_ids == [10, 11, 12]
    assert generation.finish_reason == "length"


def test_it_ends_by_an_end_token_which_is_kept() -> None:
    generation = AnswerText(request(end_ids=frozenset({11, 12})), None)
    assert generation.push(10, None, 0.0).finish_reason is None
    assert generation.push(11, "stop", 0.0).finish_reason == "stop"
    assert generation.token_ids == [10, 11]


def test_without_a_tokenizer_there_is_no_text() -> None:
    generation = AnswerText(request(), None)
    assert generation.push(10, None, 0.0).text == generation.text == ""


def test_figures_of_a_reply() -> None:
    """Asked at 100 s; tokens arrive in two bursts and are chosen every half second."""
    times = clock([100.0, 102.0, 102.1, 102.1, 102.1, 102.1, 103.9, 103.9, 103.9])
    generation = AnswerText(request(max_new_tokens=8), None, clock=lambda: next(times))
    for number in range(8):
        generation.push(number, None, 7000.0 + 0.5 * number)
    assert generation.statistics() == {
        "prompt_tokens": 3,
        "new_tokens": 8,
        "first_token_s": 2.0,
        "decode_s": 3.5,
        "tokens_per_s": 2.0,
        "total_s": pytest.approx(3.9),
        "seed": 7,
    }


def test_few_tokens_have_no_rate() -> None:
    generation = AnswerText(request(max_new_tokens=8), None)
    for number in range(7):
        generation.push(number, None, float(number))
        assert generation.statistics()["tokens_per_s"] is None
    generation.push(8, "length", 7.0)
    assert generation.statistics()["tokens_per_s"] == 1.0


def test_a_clock_that_stands_still_divides_by_nothing() -> None:
    generation = AnswerText(request(), None)
    for number in range(9):
        generation.push(number, None, 5.0)
    assert generation.statistics()["tokens_per_s"] is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(write_checkpoint(tmp_path_factory.mktemp("words"), byte_level()))


def pushed(made: AnswerText, ids: Sequence[int], last: FinishReason | None = None) -> list[Token]:
    """The tokens up to the one that ends the answer."""
    found: list[Token] = []
    for place, token_id in enumerate(ids):
        is_last = place == len(ids) - 1
        found.append(made.push(token_id, last if is_last else None, float(place)))
        if found[-1].finish_reason is not None:
            break
    return found


@pytest.mark.parametrize("stop", [(), ("Question:",), ("Question:", "zebra")])
def test_in_a_conversation_parts_are_told_and_thoughts_stop_nothing(
    stop: tuple[str, ...], tokenizer: Tokenizer
) -> None:
    reading = AnswerReading(thinking=False, form=AnswerForm(), tools={})
    text = "<think>The Question: is easy.</think>It is 4. Question: and on"
    ids = tokenizer._encode(text, add_special_tokens=False)
    made = AnswerText(request(reading=reading, stop=stop), tokenizer)
    tokens = pushed(made, ids, "length")
    expected = text.partition(" Question: and")[0] + " " if stop else text
    assert made.text == "".join(token.text for token in tokens) == expected
    said = "It is 4. " if stop else "It is 4. Question: and on"
    assert made.answer == ReadAnswer(
        content=said, reasoning="The Question: is easy.", tool_calls=()
    )
    assert whole_answer(part for token in tokens for part in token.parts) == made.answer
    assert made.finish_reason == ("stop" if stop else "length")
    assert tokens[-1].stopped_by == ("Question:" if stop else None)
    again = AnswerText(request(reading=reading, stop=stop), tokenizer)
    for token in tokens:  # as a resumed reply does
        again.restore(token.token_id, token.finish_reason, None)
    assert (again.text, again.answer, again.finish_reason) == (
        made.text,
        made.answer,
        made.finish_reason,
    )


def test_outside_a_conversation_all_of_it_is_said(tokenizer: Tokenizer) -> None:
    text = "<think>a Question: b"
    made = AnswerText(request(stop=("Question:",)), tokenizer)
    tokens = pushed(made, tokenizer._encode(text, add_special_tokens=False))
    assert made.text == made.answer.content == "<think>a "
    assert [part for token in tokens for part in token.parts] == [
        Said(token.text) for token in tokens if token.text
    ]


def test_logprobs_have_the_bytes_of_each_token(tokenizer: Tokenizer) -> None:
    """A character of several tokens has a part of its bytes in each."""
    text = "smile 🫠<|end|>"
    ids = tokenizer._encode(text, add_special_tokens=False)
    made = AnswerText(request(logprobs=2, max_new_tokens=99), tokenizer)
    logprobs = Logprobs(logprob=-1.0, top=((ids[-2], -1.0), (ids[-3], -2.0)))
    chosen = [made.push(each, None, 0.0, logprobs).chosen for each in ids]
    assert chosen == made.logprobs
    *spoken, end = made.logprobs
    assert b"".join(each.bytes for each in spoken) == "smile 🫠".encode()
    assert [each.is_special for each in made.logprobs] == [False] * len(spoken) + [True]
    assert end.text == "<|end|>"
    parts = [each for each in spoken if "\ufffd" in each.text]
    assert len(parts) > 1
    assert all(0 < len(each.bytes) < 4 for each in parts)
    assert made.top_logprobs[0][0].bytes != made.top_logprobs[0][1].bytes
