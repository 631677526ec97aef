"""Speed of a loaded model: exact token counts, end tokens ignored, warm-ups left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edge.answers.text import FEWEST_TOKENS_OF_A_RATE
from edge.option_fields import option
from edge.partition import Estimate
from edge.planning.drift import Drift
from edge.planning.proposal import Proposal
from edge.protocol.step import Speculation
from edge.protocol.step_times import PeerTimes, StepTimes

_REPEATED_TOKENS = 24
"""Length of what a prompt repeats, to see whether guesses pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    """The lengths and repeats of a benchmark."""

    prompt_tokens: int = option(128, at_least=1, help="Length of the prompts.")
    new_tokens: int = option(
        64,
        at_least=FEWEST_TOKENS_OF_A_RATE,
        help="Length of the answers; shorter ones have no reliable rate.",
    )
    repeats: int = option(5, at_least=1, help="Number of measured answers.")
    warm_ups: int = option(1, at_least=0, help="Number of unmeasured answers before them.")
    requests: int = option(
        1, at_least=1, at_most=64, help="Also measure this many replies at once."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The 20th, 50th and 80th percentile of repeated measurements."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        p20, p50, p80 = (float(value) for value in np.percentile(values, [20, 50, 80]))
        return cls(p20=p20, p50=p50, p80=p80)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerShare:
    """One peer's part of the decoding, and its memory bandwidth limit."""

    times: PeerTimes
    weight_bytes: int
    """Bytes of weights that it reads for each token."""
    memory_bytes_per_s: float
    """Its memory bandwidth, measured just before."""

    @property
    def token(self) -> StepTimes:
        """Mean times of one decoded token."""
        return self.times.decode.each

    @property
    def bandwidth_share(self) -> float:
        """The time its weights would take at the full memory rate, over its compute time."""
        if not self.token.compute_s or not self.memory_bytes_per_s:
            return 0.0
        return self.weight_bytes / self.memory_bytes_per_s / self.token.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeed:
    """The plan's predicted speed, if the devices were measured."""

    decode_tokens_per_s: float
    decode_tokens_per_s_range: tuple[float, float]
    """The rate in slow and in fast minutes."""
    prefill_tokens_per_s: float
    first_token_s: float
    batch_tokens_per_s: float
    batch_tokens_per_s_range: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculated:
    """Decoding of text that repeats, with guessed tokens and without, in turn."""

    off_tokens_per_s: Spread
    tokens_per_s: Spread
    tokens_per_pass: float
    """With guesses; the mean of all answers."""
    predicted_tokens_per_s: Spread | None
    """For each answer's tokens and rows per pass; None where a device was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The result of a benchmark."""

    options: BenchmarkOptions
    decode_tokens_per_s: Spread
    prefill_tokens_per_s: Spread
    first_token_s: Spread
    batch_tokens_per_s: Spread
    """Tokens per second of `options.requests` requests that are decoded together."""
    peers: tuple[PeerShare, ...]
    predicted: PredictedSpeed | None
    drift: Drift | None
    """The cause, if it was slower than predicted."""

    def to_json(self) -> dict[str, Any]:
        value = dataclasses.asdict(self)
        value |= value.pop("options")
        for peer, share in zip(value["peers"], self.peers, strict=True):
            peer["token"] = dataclasses.asdict(share.token)
            peer["bandwidth_share"] = share.bandwidth_share
        return value


class TimedToken(Protocol):
    """A token of an answer."""

    @property
    def chosen_s(self) -> float:
        """The time at which it was sampled, by the clock of that device."""


class TimedReply(Protocol):
    """A whole answer."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def tokens_per_s(self) -> float: ...

    @property
    def statistics(self) -> Mapping[str, Any]: ...


class TimedModel(Protocol):
    """The part of `edge.Model` that a benchmark uses."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def token_weight_bytes(self) -> Mapping[str, int]: ...

    def generate(
        self,
        prompt: Sequence[int],
        /,
        *,
        max_new_tokens: int,
        ignore_eos: bool,
        speculate: Speculation | None = None,
    ) -> TimedReply: ...

    def stream(
        self,
        prompt: Sequence[int],
        /,
        *,
        max_new_tokens: int,
        ignore_eos: bool,
        speculate: Speculation | None = None,
    ) -> Iterable[TimedToken]: ...

    def measure(self) -> Sequence[PeerTimes]: ...

    def check(self, times: Sequence[PeerTimes] | None = None, /) -> Drift | None: ...

    def predict(
        self, *, prompt_tokens: int, output_tokens: int, concurrency: int
    ) -> Estimate | None: ...


def batch_tokens_per_s(
    model: TimedModel, *, requests: int, prompt_tokens: int, new_tokens: int
) -> float:
    """Tokens per second of all requests together, while all of them decode.

    Counts from the first token of the last request to the last token of the first that ends, by the
    clock of the device that samples. Raises RequestError when a prompt and its answer do not fit
    the context.
    """
    generator = np.random.default_rng()
    prompts = [
        generator.integers(model.vocab_size, size=prompt_tokens).tolist() for _ in range(requests)
    ]

    def times(prompt: list[int]) -> list[float]:
        stream = model.stream(prompt, max_new_tokens=new_tokens, ignore_eos=True, speculate="off")
        return [token.chosen_s for token in stream]

    with ThreadPoolExecutor(requests) as pool:
        chosen = list(pool.map(times, prompts))
    begin_s, end_s = max(each[0] for each in chosen), min(each[-1] for each in chosen)
    between = sum(begin_s < at <= end_s for each in chosen for at in each)
    return between / (end_s - begin_s) if end_s > begin_s else 0.0


def run_benchmark(
    model: TimedModel, options: BenchmarkOptions, *, memory_rates: dict[str, float]
) -> Benchmark:
    """Answer random prompts one after the other; then, if asked for, several at once.

    No prompt is repeated, so that no prefix cache is hit. memory_rates: bytes per second by peer
    name. Raises RequestError when prompt and answer do not fit the context, or the answer is too
    short to have a rate.
    """
    prompt_tokens, new_tokens = options.prompt_tokens, options.new_tokens
    generator = np.random.default_rng()

    def answer() -> TimedReply:
        prompt: list[int] = generator.integers(model.vocab_size, size=prompt_tokens).tolist()
        reply = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, speculate="off")
        assert len(reply.token_ids) == new_tokens
        return reply

    for _ in range(options.warm_ups):
        answer()
    model.check()
    model.measure()
    replies = [answer() for _ in range(options.repeats)]
    times = model.measure()
    shares = [
        PeerShare(
            times=each,
            weight_bytes=model.token_weight_bytes.get(each.name, 0),
            memory_bytes_per_s=memory_rates.get(each.name, 0.0),
        )
        for each in times
    ]
    drift = model.check(times)
    batches = [
        batch_tokens_per_s(
            model,
            requests=options.requests,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
        )
        for _ in range(options.repeats if options.requests > 1 else 0)
    ]
    decode = [reply.tokens_per_s for reply in replies]
    first = [reply.statistics["first_token_s"] for reply in replies]
    return Benchmark(
        options=options,
        decode_tokens_per_s=Spread.of(decode),
        prefill_tokens_per_s=Spread.of([prompt_tokens / each for each in first]),
        first_token_s=Spread.of(first),
        batch_tokens_per_s=Spread.of(batches or decode),
        peers=tuple(shares),
        predicted=_predicted(model, options),
        drift=drift,
    )


def compare_speculation(
    model: TimedModel,
    options: BenchmarkOptions,
    speculate: Speculation,
    *,
    proposal: Proposal,
) -> Speculated:
    """Answer prompts that repeat some random tokens again and again, each of them twice.

    proposal: of the model's plan.
    """
    generator = np.random.default_rng()
    rates: dict[Speculation, list[float]] = {"off": [], speculate: []}
    tokens_per_pass: list[float] = []
    predicted: list[float] = []
    for number in range(options.warm_ups + options.repeats):
        some = generator.integers(model.vocab_size, size=_REPEATED_TOKENS).tolist()
        prompt = (some * options.prompt_tokens)[: options.prompt_tokens]
        for kind, found in rates.items():
            reply = model.generate(
                prompt, max_new_tokens=options.new_tokens, ignore_eos=True, speculate=kind
            )
            if number >= options.warm_ups:
                found.append(reply.tokens_per_s)
                if kind != "off":
                    figures = reply.statistics
                    each = figures.get("tokens_per_pass", 1.0)
                    rows = 1 + figures.get("drafted_tokens", 0) * each / options.new_tokens
                    tokens_per_pass.append(each)
                    pass_s = proposal.step_s(
                        rows,
                        prompt_tokens=options.prompt_tokens,
                        output_tokens=options.new_tokens,
                    )
                    predicted += [each / pass_s] if pass_s else []
    return Speculated(
        off_tokens_per_s=Spread.of(rates["off"]),
        tokens_per_s=Spread.of(rates[speculate]),
        tokens_per_pass=float(np.mean(tokens_per_pass)),
        predicted_tokens_per_s=Spread.of(predicted) if predicted else None,
    )


def _predicted(model: TimedModel, options: BenchmarkOptions) -> PredictedSpeed | None:
    alone, together = (
        model.predict(
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.new_tokens,
            concurrency=concurrency,
        )
        for concurrency in (1, options.requests)
    )
    if alone is None or together is None:
        return None
    return PredictedSpeed(
        decode_tokens_per_s=alone.tokens_per_s,
        decode_tokens_per_s_range=alone.tokens_per_s_range,
        prefill_tokens_per_s=options.prompt_tokens / alone.first_token_s,
        first_token_s=alone.first_token_s,
        batch_tokens_per_s=together.tokens_per_s,
        batch_tokens_per_s_range=together.tokens_per_s_range,
    )
