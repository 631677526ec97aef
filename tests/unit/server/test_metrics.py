"""What a server counts of its answers."""

from __future__ import annotations

import re

from edge.answers.text import FEWEST_TOKENS_OF_A_RATE
from edge.server.metrics import Metrics


def total(metrics: Metrics, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", metrics.text().decode(), re.MULTILINE)
    assert found is not None
    return float(found.group(1))


def test_tokens_that_come_together_have_the_times_at_which_they_were_chosen() -> None:
    metrics = Metrics()
    reply = metrics.reply(3)
    for number in range(5):
        reply.token(100.0 + 0.25 * number)
    assert total(metrics, "edge_token_seconds_count") == 4
    assert total(metrics, "edge_token_seconds_sum") == 1.0
    assert total(metrics, "edge_first_token_seconds_count") == 1


def test_a_rate_is_that_of_choosing_and_there_is_none_under_eight_tokens() -> None:
    metrics = Metrics()
    long, short = metrics.reply(3), metrics.reply(3)
    for number in range(FEWEST_TOKENS_OF_A_RATE):
        assert long.tokens_per_s is None
        long.token(100.0 + 0.25 * number)
    assert long.tokens_per_s == 4.0
    long.end("finished")
    short.token(1.0)
    short.token(2.0)
    short.end("finished")
    assert metrics.last_tokens_per_s == 4.0, "of the last that was long enough to tell"
