"""Measures overheads of a token beside its graphs: sampling, and everything around a step."""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from edge.backends.interface import Backend
from edge.concurrency.loop_thread import LoopThread
from edge.engine.report_batching import ReportBatcher, Told
from edge.engine.shard_engine import ShardEngine
from edge.kernels.sampling.parameters import SamplingParameters
from edge.kernels.sampling.shortlist import choose, make_shortlist
from edge.models.spec import ModelSpec
from edge.partition import Plan, Shard, Stage
from edge.profiling.cold_caches import Caches
from edge.profiling.random_weights import written_weights
from edge.profiling.sample import step_sample
from edge.protocol.assignment import Assignment
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import Event, to_frame
from edge.protocol.step import SamplingTerms, Step, StepEntry, StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import MemoryChannel, WireRule
from edge.weights.formats import WeightFormat
from edge.weights.layout import shard_layout

_REPEATS = 15
_TOKENS = 64
_MOST_LOGITS = 1 << 20


def sample_seconds(vocab_size: int, caches: Caches) -> float:
    """Seconds to sample one token greedily, as a session does, from logits in no cache."""
    size = min(vocab_size, _MOST_LOGITS)
    logits = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    parameters = SamplingParameters()
    seconds = []
    for position in range(_REPEATS):
        caches.forget()
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
    backend: Backend, spec: ModelSpec, weight_format: WeightFormat, folder: Path, caches: Caches
) -> float:
    """Seconds from token to token in a real session, with a model that computes almost nothing.

    Tokens are sent as a daemon does, because that takes the compute thread's interpreter, and on a
    small device its core. Before each token the caches are filled with other data, as weights would
    do. One graph run is included. Raises the session's error if it fails.
    """
    tiny = step_sample(spec, weight_format)
    whole = Shard(
        device="a",
        heads=range(1),
        ffn_columns=range(tiny.kinds[0].feed_forward.columns),
        vocab=range(tiny.vocab_size),
    )
    plan = Plan(model="sample", version=0, stages=(Stage(layers=range(1), shards=(whole,)),))
    listener = _Listener(caches)
    session = ShardEngine(
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
        entry = StepEntry(request="0", position=0, tokens=(0,), logit_rows=1)
        session.step(Step(entries=(entry,), run=_TOKENS), {"0": terms})
        seconds = listener.seconds()
    finally:
        session.close()
        listener.close()
    return statistics.median(seconds)


class _Listener:
    """Records when tokens come, and passes them to an event loop that sends them on a channel."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._loop = LoopThread("edge-measure")
        self._unsent: asyncio.Queue[Told] = asyncio.Queue()
        self._channel, self._other = MemoryChannel.pair("measured", "coordinator")
        self._moments: SimpleQueue[tuple[float, float] | Failed] = SimpleQueue()
        self._reports = self._loop.run(self._reports_of_the_loop())
        self._loop.post(self._send_reports())

    def hear(self, report: Event) -> None:
        """The session's `report`, called on its compute thread."""
        if isinstance(report, Failed):
            self._moments.put(report)
            return
        told_s = time.perf_counter()
        self._caches.forget()
        self._moments.put((told_s, time.perf_counter()))
        self._reports.report(report)

    def seconds(self) -> list[float]:
        """Seconds between tokens; waits for the last one. Raises the session's error."""
        found: list[tuple[float, float]] = []
        while len(found) < _TOKENS:
            moment = self._moments.get()
            if isinstance(moment, Failed):
                raise moment.as_error("measuring")
            found.append(moment)
        return [told_s - begun_s for (_, begun_s), (told_s, _) in pairwise(found)]

    def close(self) -> None:
        self._loop.close()

    async def _reports_of_the_loop(self) -> ReportBatcher:
        return ReportBatcher(lambda *told: self._unsent.put_nowait(told))

    async def _send_reports(self) -> None:
        while True:
            report, sent = await self._unsent.get()
            await self._channel.send(to_frame(report.kind, report))
            sent()
