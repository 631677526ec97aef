"""One reply in the making: why it ends, what is shown, and its figures by a clock that is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from edge.coordinator.generation import Generation, GenerationRequest
from edge.errors import RequestError
from edge.protocol.step import FinishReason
from kernels.sampling.parameters import SamplingParameters


def request(**values: object) -> GenerationRequest:
    fields: dict[str, object] = {
        "prompt_ids": (1, 2, 3),
        "max_new_tokens": 4,
        "sampling": SamplingParameters(seed=7),
        **values,
    }
    return GenerationRequest(**fields)  # type: ignore[arg-type]


def clock(times: Iterable[float]) -> Iterator[float]:
    return iter(times)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_ids": ()}, "the prompt is empty"),
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
    generation = Generation(request(max_new_tokens=3), None)
    ends: list[FinishReason | None] = [None, None, "length"]
    tokens = [generation.push(token, end) for token, end in zip((10, 11, 12), ends, strict=True)]
    assert [token.finish_reason for token in tokens] == [None, None, "length"]
    assert [token.token_id for token in tokens] == generation.token_ids == [10, 11, 12]
    assert generation.finish_reason == "length"


def test_it_ends_by_an_end_token_which_is_kept() -> None:
    generation = Generation(request(end_ids=frozenset({11, 12})), None)
    assert generation.push(10, None).finish_reason is None
    assert generation.push(11, "stop").finish_reason == "stop"
    assert generation.token_ids == [10, 11]


def test_without_a_tokenizer_there_is_no_text() -> None:
    generation = Generation(request(), None)
    assert generation.push(10, None).text == generation.text == ""


def test_figures_of_a_reply() -> None:
    """Started at 100 s, tokens at 102, 102.5, 103 and 103.5 s."""
    times = clock([100.0, 102.0, 102.5, 103.0, 103.5])
    generation = Generation(request(), None, clock=lambda: next(times))
    for token in range(4):
        generation.push(token, None)
    assert generation.statistics() == {
        "prompt_tokens": 3,
        "new_tokens": 4,
        "first_token_s": 2.0,
        "tokens_per_s": 2.0,
        "total_s": 3.5,
        "seed": 7,
    }


def test_the_rate_of_a_single_token_counts_the_wait_for_it() -> None:
    times = clock([100.0, 104.0])
    generation = Generation(request(max_new_tokens=1), None, clock=lambda: next(times))
    generation.push(1, None)
    assert generation.statistics()["tokens_per_s"] == 0.25


def test_a_clock_that_stands_still_divides_by_nothing() -> None:
    generation = Generation(request(), None, clock=lambda: 5.0)
    generation.push(1, None)
    generation.push(2, None)
    assert generation.statistics()["tokens_per_s"] > 0
