"""One reply in the making: why it ends, what is shown, and its figures by a clock that is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from edge.answers.terms import Terms
from edge.answers.text import AnswerText
from edge.errors import RequestError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.protocol.step import FinishReason


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
