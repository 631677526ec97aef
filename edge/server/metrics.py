"""What a server counts, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One server's figures, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "edge_http_requests",
            "Requests that were answered",
            ["path", "status"],
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "edge_prompt_tokens", "Tokens of prompts", registry=self._registry
        )
        self._new_tokens = Counter(
            "edge_generated_tokens", "Tokens generated", registry=self._registry
        )
        self._under_way = Gauge(
            "edge_answers_under_way", "Answers that have begun", registry=self._registry
        )
        self._ended = Counter(
            "edge_answers", "Answers, by how they ended", ["end"], registry=self._registry
        )
        self._first_token_s = Histogram(
            "edge_first_token_seconds",
            "From asking for an answer to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._token_s = Histogram(
            "edge_token_seconds",
            "From a token of an answer to its next",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def reply(self, prompt_tokens: int) -> ObservedReply:
        self._prompt_tokens.inc(prompt_tokens)
        return ObservedReply(self)

    def text(self) -> bytes:
        """In the format that Prometheus reads."""
        return generate_latest(self._registry)


class ObservedReply:
    """One answer: counted as under way until it ends, or nobody wants it any more."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last_s = time.perf_counter()
        self._has_begun = self._is_over = False
        metrics._under_way.inc()

    def token(self) -> None:
        now_s = time.perf_counter()
        metrics = self._metrics
        kind = metrics._token_s if self._has_begun else metrics._first_token_s
        kind.observe(now_s - self._last_s)
        metrics._new_tokens.inc()
        self._has_begun, self._last_s = True, now_s

    def end(self, how: str) -> None:
        """May be called again: the first counts."""
        if not self._is_over:
            self._is_over = True
            self._metrics._under_way.dec()
            self._metrics._ended.labels(how).inc()
