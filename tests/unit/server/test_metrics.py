"""What a server counts of its answers."""

from __future__ import annotations

import re

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


def test_another_devices_clock_is_not_compared() -> None:
    metrics = Metrics()
    reply = metrics.reply(3)
    for chosen_s in (100.0, 7.0, 5000.0):
        reply.token(chosen_s)
    assert total(metrics, "edge_token_seconds_count") == 2
    assert total(metrics, "edge_token_seconds_sum") < 1.0
