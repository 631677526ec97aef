"""A shard's session alone or beside others of its plan, with a made-up model."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.engine.shard_engine import ShardSession
from edge.protocol.assignment import Assignment
from edge.protocol.frame_codec import Event
from edge.protocol.messages import Tokens
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.protocol.step_times import StepTimes
from edge.protocol.wire_rules import WireRules
from edge.weights.formats import weight_format
from kernels.sampling.parameters import SamplingParameters
from offload import Manifest
from partition import Plan, Shard, Stage
from tests.support.linked_shards import REPORT_WITHIN_S, RUN, shards
from tests.support.made_up_shards import SPEC, VOCAB, MadeUpBackend
from tests.support.specs import shape
from transport import Link, WireRule


def test_layers_that_are_to_come_from_disk_do_so_from_the_load_on() -> None:
    """A peer's memory may become less while a shard waits for others to be loaded."""
    shard = Shard(
        device="a",
        heads=range(shape(SPEC).num_heads),
        ffn_columns=range(shape(SPEC).ffn_columns),
        vocab=range(SPEC.vocab_size),
    )
    stage = Stage(layers=range(SPEC.num_layers), shards=(shard,))
    reports: SimpleQueue[Event] = SimpleQueue()
    session = ShardSession(
        Assignment(
            session="s",
            model=SPEC,
            plan=Plan(model="m", version=0, stages=(stage,)),
            stage=0,
            rank=0,
            weight_format=weight_format("float32", 32, "fast"),
            manifest_digest="",
            weights_digest="w",
            limits=StepLimits(context_tokens=8, chunk_tokens=8, requests=1, cached_tokens=8),
            kv_dtype="float32",
            wire_rules=WireRules(sums=(WireRule(),), hops=()),
        ),
        reports.put,
    )
    try:
        session.stream(2).result()
        weights = ShardWeights(path=Path(), manifest=Manifest(tensors=(), total_bytes=0))
        backend = MadeUpBackend()
        session.load(backend, weights).result()
        assert backend.programs[0].streamed == 2
    finally:
        session.close()


class HeldBackLink:
    """A link whose sends return only when they are let, though what is sent arrives."""

    def __init__(self, inner: Link, may_return: threading.Event) -> None:
        self._inner = inner
        self._may_return = may_return
        self.peer = inner.peer
        self.receive, self.close = inner.receive, inner.close

    def send(self, array: NDArray[Any]) -> None:
        self._inner.send(array)
        self._may_return.wait(REPORT_WITHIN_S)

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        raise AssertionError("stages only send and receive")


def test_a_step_is_measured_by_every_shard_once_its_token_is_known() -> None:
    """Also by one that has sent its hidden state and not come to count the step."""
    may_return = threading.Event()

    def wrap(link: Link, seat: tuple[int, int]) -> Link:
        return HeldBackLink(link, may_return) if seat == (0, 0) else link

    entry = StepEntry(request="r", position=0, tokens=(1, 2), logit_rows=1)
    with shards([VOCAB], stage_before=True, wrap=wrap) as found:
        try:
            found.begin("r", SamplingParameters())
            assert found.tokens(Step(entries=(entry,))).last
            measured = [session.measure() for session in found.sessions]
        finally:
            may_return.set()
        prompts = [each.result(REPORT_WITHIN_S)[0] for each in measured]
        assert [each.steps for each in prompts] == [1, 1]


def test_measuring_does_not_wait_for_the_end_of_a_run() -> None:
    """The shard tells in the middle of it, and each step once."""
    with shards([VOCAB]) as found:
        (session,) = found.sessions
        found.begin("r", SamplingParameters())
        first = StepEntry(request="r", position=0, tokens=(1,), logit_rows=1)
        second_token = found.tokens(Step(entries=(first,))).tokens[0]
        run = StepEntry(request="r", position=1, tokens=(second_token,), logit_rows=1)
        measured: list[Future[tuple[StepTimes, StepTimes]]] = []
        reports: list[Event] = []

        def report(event: Event) -> None:  # on the compute thread: the run cannot overtake it
            reports.append(event)
            if len(reports) == 2:
                measured.append(session.measure())
            found.reports.put(event)

        session._report = report
        found.step(Step(entries=(run,), run=RUN))
        is_over = False
        while not is_over:
            event = found.reports.get(timeout=REPORT_WITHIN_S)
            assert isinstance(event, Tokens), event
            is_over = event.last
        in_the_middle = measured[0].result(REPORT_WITHIN_S)[1].steps
        rest = session.measure().result(REPORT_WITHIN_S)[1].steps
        assert (in_the_middle, rest) == (1 + 2, RUN - 2)
