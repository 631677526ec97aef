"""A peer's side of one loaded shard: its program, its links, and the one thread that runs both.

Here the data plane lives: blocking links, called from the compute thread only. The control plane
hands it work through a queue and gets events back through a callback.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

import transport
from edge.backends.device_sums import OVER_LINKS, join
from edge.backends.interface import Backend, KvStorage, Logits, ShardWeights, StageProgram
from edge.engine.distributed_sampling import TokenChoice
from edge.engine.kv_calibration import calibration_step
from edge.engine.link_errors import link_error
from edge.engine.prefix_cache import Prefixes
from edge.engine.safe_point import Asides
from edge.engine.timing import SessionTimes, TimedCollective
from edge.errors import PlanError
from edge.protocol import messages
from edge.protocol.assignment import Assignment
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import Event
from edge.protocol.step import SamplingTerms, Step
from edge.protocol.step_times import StepTimes
from edge.protocol.store_errors import map_store_error
from edge.protocol.topology import Seat, neighbours, sampler_seat
from edge.weights.layout import ShardLayout
from kernels.sampling.shortlist import SHORTLIST_TOKENS
from offload import KVTier, PrefixStore, StoreError
from transport import Collective, EncodedHop, Link, SoloCollective, open_mesh

Result = TypeVar("Result")

NO_TERMS: Mapping[str, SamplingTerms] = {}

END_OF_RUN = -1
"""Told instead of a token when a run ends, or a step that is not a run."""

ASK_FOR_LOGITS = -2
"""Told instead of a token to the last stage: send all logits of this step, then listen again."""


class ShardSession:
    """One shard of one model for one coordinator. `report` may be called from any thread."""

    def __init__(
        self,
        assignment: Assignment,
        report: Callable[[Event], None],
        *,
        shortlist_tokens: int = SHORTLIST_TOKENS,
    ) -> None:
        self.assignment = assignment
        self.seat: Seat = (assignment.stage, assignment.rank)
        self.layout: ShardLayout = assignment.layout
        self.sizes = tuple(len(stage.shards) for stage in assignment.plan.stages)
        self.neighbours = neighbours(self.sizes, self.seat)
        self._report = report
        self._program: StageProgram | None = None
        self._links: dict[Seat, Link] = {}
        self._successors: list[Seat] = []
        self._names: dict[Seat, str] = {}
        self._times = SessionTimes()
        self._collective: Collective = SoloCollective()
        self.sums = OVER_LINKS
        """How this shard sums with the others of its stage, for people."""
        self._arriving = EncodedHop(assignment.wire_rules.before(assignment.stage))
        self._leaving = EncodedHop(assignment.wire_rules.after(assignment.stage))
        self._choice = TokenChoice(
            [shard.vocab for shard in assignment.plan.stages[-1].shards],
            assignment.rank,
            shortlist_tokens=shortlist_tokens,
        )
        self._stage_links: list[Link] = []
        self._token = np.zeros(1, np.int64)
        self._must_yield = False
        self._broken = False
        self._prefixes: Prefixes | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asides = Asides()
        self._thread = threading.Thread(
            target=self._run, name=f"edge-compute-{assignment.session[:8]}", daemon=True
        )
        self._thread.start()

    def load(
        self,
        backend: Backend,
        weights: ShardWeights,
        kv_tier: KVTier | None = None,
        prefixes: PrefixStore | None = None,
    ) -> Future[int]:
        """Make the program on the compute thread; the result is the bytes of its weights.

        kv_tier: where keys and values go that are suspended. prefixes: where those of beginnings of
        prompts are kept for other requests.
        """
        if prefixes is not None:
            self._prefixes = Prefixes(prefixes, self.assignment)

        def work() -> int:
            self._program = backend.load(
                self.assignment.model,
                self.layout,
                weights,
                self.assignment.weight_format,
                limits=self.assignment.limits,
                kv_dtype=self.assignment.kv_dtype,
                kv_tier=kv_tier,
            )
            return self._program.weight_bytes

        return self._queue(work)

    def connect(self, links: Mapping[Seat, Link], names: Mapping[Seat, str]) -> None:
        """Take over the links to all neighbours; `names` are their devices', for messages."""
        assert set(links) == self.neighbours
        self._names = dict(names)
        self._links = dict(links)
        stage, rank = self.seat
        size = self.sizes[stage]
        self._successors = [s for s in sorted(links) if s[0] == stage + 1 and s[1] % size == rank]
        mesh = {r: link for (s, r), link in links.items() if s == stage}
        if mesh:
            rule = self.assignment.wire_rules.sums[stage]
            self._collective = TimedCollective(open_mesh(rank, mesh, rule), self._times)
        self._stage_links = list(mesh.values())
        self._choice.collective = self._collective

    def prepare(self) -> Future[None]:
        """Agree how to sum, and let a rounded KV cache be measured; all shards do it together,
        linked, and before any request."""

        def work() -> None:
            assignment, program = self.assignment, self._program
            if program is None:
                return
            if self._collective.size > 1:
                joined, self.sums = join(self._collective, program.device_sums)
                if self.sums != OVER_LINKS:
                    self._collective = TimedCollective(joined, self._times)
            if assignment.kv_dtype != "float32":
                step = calibration_step(assignment.model, assignment.limits)
                self._compute(step)
                program.calibrate(step.entries[0].request)
                self._times.take()

        return self._queue(work)

    def stream(self, layers: int) -> Future[None]:
        """Read so many layers from disk for each step; done between two steps, also of a run."""

        def work() -> None:
            if self._program is not None and not self._broken:  # else it gives all back anyway
                self._program.stream(layers)

        done = self._between_steps(work)
        self.layout = replace(self.layout, streamed_layers=layers)  # of one that is loaded later
        return done

    def measure(self) -> Future[tuple[StepTimes, StepTimes]]:
        """Where the time of prompts and that of decoding went since this was last called, told
        between two steps, also of a run.

        Every step is in it that a token was told of: the shard is in the middle of it, or past it.
        """
        return self._between_steps(self._times.take)

    @property
    def is_sampler(self) -> bool:
        return self.seat == sampler_seat(self.sizes)

    def step(self, step: Step, terms: Mapping[str, SamplingTerms] = NO_TERMS) -> None:
        """Queue a step; its outcome comes through `report`.

        terms: of each request that wants tokens, with its first step; the others' logits are
        reported. Of no consequence but in the last stage, where every shard needs them.
        """
        if self.layout.is_last_stage:
            for request, each in terms.items():
                self._choice.begin(request, each)
        self._work.put(lambda: self._guarded_step(step))

    def yield_run(self) -> None:
        """End the run under way after its current token; others are waiting."""
        self._must_yield = True

    def suspend(self, request: str) -> None:
        """Move the request's keys and values out of memory, until its next step.

        `SwappedOut` is reported, with the reason if there is no room for them.
        """
        self._keep_on_disk(messages.SwappedOut, request, lambda program: program.swap_out(request))

    def reserve(self, request: str, tokens: int) -> None:
        """See to it that so many of the request's tokens have room out of memory; likewise."""
        self._keep_on_disk(
            messages.Reserved, request, lambda program: program.reserve(request, tokens)
        )

    def _keep_on_disk(
        self,
        event: type[messages.SwappedOut | messages.Reserved],
        request: str,
        keep: Callable[[KvStorage], None],
    ) -> None:
        def work() -> None:
            if self._broken or self._program is None:
                return
            why_not = None
            try:
                keep(self._program)
            except StoreError as error:
                why_not = str(error)
            except Exception as error:
                self._fail(error)
                return
            self._report(event(request=request, why_not=why_not))

        self._work.put(work)

    def recall(self, request: str, prompt: Sequence[int]) -> None:
        """Find the prompt's beginning among what is kept of others; `PrefixMatched` is reported."""

        def work() -> None:
            if self._broken or self._program is None:
                return
            found = 0
            try:
                if self.layout.is_last_stage:
                    self._choice.recall(request, prompt)
                if self._prefixes is not None and self._program.cache_digest:
                    found = self._prefixes.recall(self._program, request, prompt)
            except Exception as error:
                self._fail(error)
                return
            self._report(messages.PrefixMatched(request=request, tokens=found))

        self._work.put(work)

    def finish(self, request: str) -> None:
        """Free the request; a run that it is part of ends after its current token."""
        self._choice.cancel(request)

        def work() -> None:
            self._choice.forget(request)
            if self._program is not None:
                if self._prefixes is not None and not self._broken:
                    self._prefixes.forget(self._program, request)
                self._program.release(request)

        self._work.put(work)

    def close(self) -> None:
        """Unblock the compute thread, end it, free everything. Blocks until it is done."""
        self._broken = True
        self._collective.close()
        for link in self._links.values():
            link.close()
        self._work.put(None)
        self._thread.join()

    def _between_steps(self, function: Callable[[], Result]) -> Future[Result]:
        """Have the compute thread call it before its next step, or now if it has none."""
        done = self._asides.put(function)
        self._work.put(self._asides.do)
        if self._broken:  # perhaps there is no thread any more
            self._asides.do()
        return done

    def _queue(self, function: Callable[[], Result]) -> Future[Result]:
        """Have the compute thread call it, unless the future is cancelled before."""
        done: Future[Result] = Future()

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                done.set_result(function())
            except transport.TransportError as error:
                done.set_exception(link_error(error, self._links, self._names))
            except BaseException as error:
                done.set_exception(error)

        self._work.put(work)
        return done

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
        self._collective.close()  # it may be another than when `close` was called
        if self._prefixes is not None:
            self._prefixes.close()
        if self._program is not None:
            self._program.close()
            self._program = None
        self._asides.do()

    def _guarded_step(self, step: Step) -> None:
        """A failed step leaves the shards out of step with each other: nothing runs after it."""
        if self._broken:
            return
        try:
            self._run_step(step)
        except transport.TransportError as error:
            self._fail(link_error(error, self._links, self._names))
        except Exception as error:  # onnxruntime raises plain exceptions
            self._fail(map_store_error(error))

    def _fail(self, error: Exception) -> None:
        if not self._broken:
            self._broken = True
            self._report(Failed.of(error))

    def _run_step(self, step: Step) -> None:
        """The step, and while it is a run those that follow from its tokens."""
        following: Step | None = step
        while following is not None and not self._broken:  # closing ends a run, too
            step = following
            self._asides.do()
            self._times.begin(is_decode=step.num_tokens == 1)
            logits = self._compute(step)
            start_s = time.perf_counter()
            if logits is not None and self.is_sampler:
                following = self._sample_and_tell(step, logits)
            elif logits is not None:
                self._choice.offer(step, logits)
            self._times.now.sample_s += time.perf_counter() - start_s
            if not self.is_sampler:
                following = self._hear(step, logits)
            if self._prefixes is not None and self._program is not None:
                self._prefixes.keep(self._program)

    def _compute(self, step: Step) -> Logits | None:
        """Receive from the stage before, compute, send to the stage after; logits of the last."""
        program = self._program
        if program is None:
            raise PlanError("a step before the shard was loaded")
        stage, rank = self.seat
        hidden: NDArray[np.float32] | None = None
        times = self._times.now
        start_s = time.perf_counter()
        if stage > 0:
            hidden = program.receive_buffer(step)
            link = self._links[(stage - 1, rank % self.sizes[stage - 1])]
            self._arriving.receive(link, hidden)
        received_s, reduced_s = time.perf_counter(), times.reduce_s
        loaded_s = program.disk_wait_s
        is_last = self.layout.is_last_stage
        logits = program.logits(step, hidden, self._collective) if is_last else None
        output = None if is_last else program.forward(step, hidden, self._collective)
        computed_s = time.perf_counter()
        if output is not None and self._successors:
            message = self._leaving.outgoing(output)
            for seat in self._successors:
                self._links[seat].send(message)
        times.steps += 1
        times.receive_s += received_s - start_s
        load_s = program.disk_wait_s - loaded_s
        times.load_s += load_s
        times.compute_s += computed_s - received_s - (times.reduce_s - reduced_s) - load_s
        times.send_s += time.perf_counter() - computed_s
        return logits

    def _hear(self, step: Step, own: Logits | None) -> Step | None:
        """The next step of a run, as the sampler tells it; None at its end.

        Meanwhile the sampler may ask a shard of its stage for `own`, its logits.
        """
        may_ask = self.layout.is_last_stage and self._choice.may_ask(step)
        if step.run == 1 and not may_ask:
            return None
        if self._token.size != step.batch:
            self._token = np.zeros(step.batch, np.int64)
        start_s = time.perf_counter()
        sampler = self._links[sampler_seat(self.sizes)]
        sampler.receive(self._token)
        if own is not None and may_ask and self._token[0] == ASK_FOR_LOGITS:
            self._choice.send_logits(own)
            sampler.receive(self._token)
        self._times.now.receive_s += time.perf_counter() - start_s
        if self._token[0] == END_OF_RUN:
            return None
        return step.following(self._token.tolist())

    def _sample_and_tell(self, step: Step, own: Logits) -> Step | None:
        """Choose tokens, tell the other shards at once, then the coordinator."""
        if self._choice.wants_logits(step):
            self._report_logits(step, self._choice.gather_logits(own))
            return None

        def ask_all() -> None:
            self._tell(self._stage_links, np.full(step.batch, ASK_FOR_LOGITS, np.int64))

        tokens = self._choice.choose(step, own, ask_all)
        chosen_s = time.monotonic()
        ends = self._choice.take(step, tokens)
        last = step.run == 1 or self._must_yield or any(ends) or self._choice.is_cancelled(step)
        told = np.full(step.batch, END_OF_RUN, np.int64) if last else np.asarray(tokens, np.int64)
        if step.run > 1:
            self._tell(self._links.values(), told)
        elif self._choice.may_ask(step):
            self._tell(self._stage_links, told)
        if last:
            self._must_yield = False
        self._report(
            messages.Tokens(tokens=tuple(tokens), ends=tuple(ends), last=last, chosen_s=chosen_s)
        )
        return None if last else step.following(tokens)

    def _tell(self, links: Iterable[Link], told: NDArray[np.int64]) -> None:
        for link in links:
            link.send(told)

    def _report_logits(self, step: Step, logits: NDArray[np.float32]) -> None:
        """Rows of the one request of the step, straight to the coordinator."""
        self._report(messages.Logits(rows=logits[:, : step.logit_rows].tobytes()))
