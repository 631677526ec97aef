"""What a token costs beside its graphs, measured: choosing it, and everything around a step."""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from edge.backends.base import Backend, Step, StepEntry, StepLimits
from edge.event_loop import LoopThread
from edge.formats import WeightFormat
from edge.layout import shard_layout
from edge.made_up_weights import written_weights
from edge.models.spec import ModelSpec
from edge.profile_sample import step_sample
from edge.session import ShardSession
from edge.wire import Assignment, SamplingTerms, error_from_header
from edge.wire_choice import WireRules
from kernels.sampling.parameters import SamplingParameters
from kernels.sampling.shortlist import choose, make_shortlist
from partition import Plan, Shard, Stage
from transport import Frame, MemoryChannel, WireRule

_REPEATS = 15
_TOKENS = 64
_MOST_LOGITS = 1 << 20
_OTHER_BYTES = 64 << 20
"""Read between two choices, as weights are: more than most caches hold."""


def sample_seconds(vocab_size: int, budget_bytes: int) -> float:
    """Choosing one token greedily, as a session does it, from logits that no cache holds.

    What it takes of memory is within the budget, as long as that holds a few MiB.
    """
    size = min(vocab_size, _MOST_LOGITS)
    logits = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    others = np.ones(min(_OTHER_BYTES, budget_bytes // 4) // 8 + 1, np.uint64)
    parameters = SamplingParameters()
    seconds = []
    for position in range(_REPEATS):
        np.bitwise_or.reduce(others)
        start_s = time.perf_counter()
        mine = make_shortlist(
            logits,
            first_id=0,
            vocab_size=size,
            history=(),
            parameters=parameters,
            position=position,
        )
        choose([mine], columns=[size], parameters=parameters, position=position)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds) * vocab_size / size


def step_seconds(
    backend: Backend, spec: ModelSpec, weight_format: WeightFormat, folder: Path
) -> float:
    """From token to token of a model that computes next to nothing, in a real session.

    Each token is told as a daemon tells its coordinator, because that takes the compute thread's
    interpreter, and on a small device its core. One run of a graph is in it. Raises the session's
    error when it fails.
    """
    tiny = step_sample(spec, weight_format)
    whole = Shard(
        device="a",
        heads=range(1),
        ffn_columns=range(tiny.ffn_columns),
        vocab=range(tiny.vocab_size),
    )
    plan = Plan(model="sample", version=0, stages=(Stage(layers=range(1), shards=(whole,)),))
    listener = _Listener()
    session = ShardSession(
        Assignment(
            session="measuring",
            model=tiny,
            plan=plan,
            stage=0,
            rank=0,
            weight_format=weight_format,
            manifest_digest="",
            weights_digest="",
            kv_dtype="float32",
            wire_rules=WireRules(sums=(WireRule(),), hops=()),
            limits=StepLimits(
                context_tokens=2 * _TOKENS,
                chunk_tokens=1,
                requests=1,
                cached_tokens=2 * _TOKENS,
            ),
        ),
        listener.hear,
    )
    try:
        layout = shard_layout(tiny, plan, stage=0, rank=0)
        with written_weights(layout, weight_format, folder) as weights:
            session.load(backend, weights).result()
        terms = SamplingTerms(
            sampling=SamplingParameters(), end_ids=frozenset(), max_new_tokens=_TOKENS
        )
        session.begin("0", terms)
        entry = StepEntry(request="0", position=0, tokens=(0,), logit_rows=1)
        session.step(Step(entries=(entry,), run=_TOKENS))
        moments = listener.moments()
    finally:
        session.close()
        listener.close()
    return statistics.median(after - before for before, after in pairwise(moments))


class _Listener:
    """Notes when tokens come, and passes them on to an event loop that sends them on a channel."""

    def __init__(self) -> None:
        self._loop = LoopThread("edge-measure")
        self._reports: asyncio.Queue[Frame] = asyncio.Queue()
        self._channel, self._other = MemoryChannel.pair("measured", "coordinator")
        self._moments: SimpleQueue[float | Frame] = SimpleQueue()
        self._loop.post(self._send_reports())

    def hear(self, report: Frame) -> None:
        """For the session to call."""
        self._moments.put(report if report.kind == "failed" else time.perf_counter())
        self._loop.submit(lambda: self._reports.put_nowait(report))

    def moments(self) -> list[float]:
        """When each of the tokens was told; waits for the last. Raises the session's error."""
        found: list[float] = []
        while len(found) < _TOKENS:
            moment = self._moments.get()
            if isinstance(moment, Frame):
                raise error_from_header("measuring", moment.header)
            found.append(moment)
        return found

    def close(self) -> None:
        self._loop.close()

    async def _send_reports(self) -> None:
        while True:
            await self._channel.send(await self._reports.get())
