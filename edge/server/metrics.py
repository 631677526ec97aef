"""Metrics of a server, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edge.answers.text import decode_rate
from edge.scheduling.orders import Work

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
        self._loaded = Gauge(
            "edge_model_loaded", "1 while the model is loaded", ["model"], registry=self._registry
        )
        self._computed = Counter(
            "edge_computed_tokens",
            "Tokens that the peers were given to compute, of prompts and of answers",
            ["model", "of"],
            registry=self._registry,
        )
        self._steps = Counter(
            "edge_steps", "Steps that the peers were given", ["model"], registry=self._registry
        )
        self._drafted = Counter(
            "edge_drafted_tokens",
            "Tokens that were guessed, right or wrong",
            ["model"],
            registry=self._registry,
        )
        self._accepted = Counter(
            "edge_accepted_tokens",
            "Guessed tokens that were right",
            ["model"],
            registry=self._registry,
        )
        self._draft_steps = Counter(
            "edge_draft_steps",
            "Steps that verified guessed tokens",
            ["model"],
            registry=self._registry,
        )
        self._seen: dict[str, Work] = {}
        """Work of each model at the last call of `note_work`."""
        self.new_tokens = 0
        self.last_tokens_per_s: float | None = None
        """Decoding rate of the last whole reply that was long enough to tell."""
        self._replies: set[ObservedReply] = set()

    def reply(self, prompt_tokens: int) -> ObservedReply:
        self._prompt_tokens.inc(prompt_tokens)
        reply = ObservedReply(self, prompt_tokens)
        self._replies.add(reply)
        return reply

    def note_models(self, loaded: Mapping[str, bool]) -> None:
        """Set for each model, by name, whether it is loaded now."""
        for name, is_loaded in loaded.items():
            self._loaded.labels(name).set(is_loaded)

    def note_work(self, name: str, work: Work) -> None:
        """Add the work of a model; `work` counts from when it was loaded."""
        seen = self._seen.get(name, Work())
        if work.steps < seen.steps:
            seen = Work()  # it was loaded anew
        self._seen[name] = work
        self._computed.labels(name, "prompts").inc(work.prompt_tokens - seen.prompt_tokens)
        self._computed.labels(name, "answers").inc(work.answer_tokens - seen.answer_tokens)
        self._steps.labels(name).inc(work.steps - seen.steps)
        self._drafted.labels(name).inc(work.drafted_tokens - seen.drafted_tokens)
        self._accepted.labels(name).inc(work.accepted_tokens - seen.accepted_tokens)
        self._draft_steps.labels(name).inc(work.draft_steps - seen.draft_steps)

    def under_way(self) -> list[dict[str, float]]:
        """Age and tokens of each reply that has begun and not ended, the oldest first."""
        now_s = time.perf_counter()
        found = sorted(self._replies, key=lambda reply: reply.begun_s)
        return [
            {
                "age_s": now_s - reply.begun_s,
                "prompt_tokens": reply.prompt_tokens,
                "new_tokens": reply.new_tokens,
            }
            for reply in found
        ]

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class ObservedReply:
    """One answer, counted as under way until it ends or is given up."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.new_tokens = 0
        self.begun_s = time.perf_counter()
        self.first_token_s = 0.0
        """Seconds from the begin of the answer to the arrival of its first token."""
        self._first_chosen_s = self._last_chosen_s = 0.0
        self._metrics = metrics
        self._is_over = False
        metrics._under_way.inc()

    def token(self, chosen_s: float) -> None:
        """Count a token. chosen_s: when it was sampled, because fast tokens arrive in groups."""
        metrics = self._metrics
        if not self.new_tokens:
            self.first_token_s = time.perf_counter() - self.begun_s
            metrics._first_token_s.observe(self.first_token_s)
            self._first_chosen_s = chosen_s
        else:
            metrics._token_s.observe(max(0.0, chosen_s - self._last_chosen_s))
        self._last_chosen_s = chosen_s
        metrics._new_tokens.inc()
        metrics.new_tokens += 1
        self.new_tokens += 1

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last, by the times of sampling."""
        return self._last_chosen_s - self._first_chosen_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None for too few tokens."""
        return decode_rate(self.new_tokens, self.decode_s)

    def end(self, how: str) -> None:
        """Count the end of the answer. Only the first call counts."""
        if not self._is_over:
            self._is_over = True
            self._metrics.last_tokens_per_s = self.tokens_per_s or self._metrics.last_tokens_per_s
            self._metrics._replies.discard(self)
            self._metrics._under_way.dec()
            self._metrics._ended.labels(how).inc()
