"""Which copy of a model a request goes to."""

from __future__ import annotations

import pytest

from edge.scheduling.routing import CopyState, route

IDLE = CopyState(places=4)


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        pytest.param([{}, {}], 0, id="all alike: the first"),
        pytest.param([{"requests": 1}, {}], 1, id="the one with fewer requests"),
        pytest.param([{}, {"found_tokens": 64}], 1, id="where the beginning is"),
        pytest.param([{"found_tokens": 64}, {"found_tokens": 96}], 1, id="the longer beginning"),
        pytest.param(
            [{"found_tokens": 800, "requests": 1}, {}], 0, id="a long beginning outweighs a request"
        ),
        pytest.param(
            [{"found_tokens": 16, "requests": 1}, {}],
            1,
            id="a short one, as of a template, does not",
        ),
        pytest.param(
            [{"found_tokens": 800, "requests": 8}, {}], 1, id="a full copy loses its beginning"
        ),
        pytest.param(
            [{"found_tokens": 800, "waiting_tokens": 5000}, {}], 1, id="long prompts are in the way"
        ),
        pytest.param([{"token_s": 0.2}, {"token_s": 0.1}], 1, id="the faster device"),
        pytest.param(
            [{"token_s": 0.1, "requests": 6}, {"token_s": 0.2}], 1, id="a slow one that is idle"
        ),
        pytest.param([{"requests": 9}, {"requests": 8}], 1, id="all full: the shorter queue"),
    ],
)
def test_a_request_goes_where_it_ends_first(copies: list[dict[str, float]], expected: int) -> None:
    states = [CopyState(**{"places": 4, **each}) for each in copies]  # type: ignore[arg-type]
    assert route(1000, 128, states) == expected


def test_equal_times_go_to_the_longer_beginning_then_to_fewer_requests() -> None:
    free = CopyState(places=4, token_s=0.0, further_s=0.0, prompt_token_s=0.0)
    found = CopyState(
        places=4, token_s=0.0, further_s=0.0, prompt_token_s=0.0, found_tokens=5, requests=2
    )
    assert route(10, 10, [free, found]) == 1
    busy = CopyState(places=4, token_s=0.0, further_s=0.0, prompt_token_s=0.0, requests=1)
    assert route(10, 10, [busy, free]) == 1


def test_many_equal_requests_are_spread_evenly() -> None:
    counts = [0, 0, 0]
    for _ in range(63):
        states = [CopyState(places=8, requests=count) for count in counts]
        counts[route(100, 50, states)] += 1
    assert counts == [21, 21, 21]


def test_a_copy_twice_as_fast_gets_more() -> None:
    counts = [0, 0]
    for _ in range(24):
        speeds: tuple[dict[str, float], ...] = (
            {},
            {"prompt_token_s": 0.02, "token_s": 0.2, "further_s": 0.1},
        )
        states = [
            CopyState(places=64, requests=count, **speed)  # type: ignore[arg-type]
            for count, speed in zip(counts, speeds, strict=True)
        ]
        counts[route(100, 50, states)] += 1
    assert counts[0] > 1.5 * counts[1]
