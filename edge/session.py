"""A peer's side of one loaded shard: its program, its links, and the one thread that runs both.

Here the data plane lives: blocking links, called from the compute thread only. The control plane
hands it work through a queue and gets events back through a callback.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import transport
from edge.backends.base import Backend, ShardWeights, StageProgram, Step
from edge.errors import EdgeError, PeerError, PeerLostError, PlanError, ProtocolError
from edge.layout import ShardLayout, shard_layout
from edge.step_times import StepTimes, TimedCollective
from edge.wire import Assignment, SamplingTerms, error_to_header
from kernels.sampling.reference import sample
from transport import Collective, Frame, Link, MeshCollective, SoloCollective

END_OF_RUN = -1
"""Told instead of a token when a run ends."""

Seat = tuple[int, int]
"""(stage, rank): a place in the plan."""


def neighbours(plan_sizes: tuple[int, ...], seat: Seat) -> frozenset[Seat]:
    """The seats that `seat` has a link to; symmetric.

    Ranks of a stage are a full mesh. Rank j of a stage hears from rank j mod n of the stage before,
    whose n shards all hold the same hidden state. The sampler tells every seat its tokens.
    """
    stage, rank = seat
    sampler = sampler_seat(plan_sizes)
    if seat == sampler:
        every = {(s, r) for s, size in enumerate(plan_sizes) for r in range(size)}
        return frozenset(every - {seat})
    found = {(stage, other) for other in range(plan_sizes[stage]) if other != rank}
    if stage > 0:
        found.add((stage - 1, rank % plan_sizes[stage - 1]))
    if stage + 1 < len(plan_sizes):
        size = plan_sizes[stage]
        found.update((stage + 1, j) for j in range(plan_sizes[stage + 1]) if j % size == rank)
    return frozenset(found | {sampler})


def sampler_seat(plan_sizes: tuple[int, ...]) -> Seat:
    """Where tokens are chosen: rank 0 of the last stage."""
    return (len(plan_sizes) - 1, 0)


@dataclass(slots=True)
class _Request:
    """What the sampler needs to know of a request."""

    terms: SamplingTerms
    history: list[int] = field(default_factory=list)
    new_tokens: int = 0
    is_cancelled: bool = False
    """Set from the control plane's thread; read between the steps of a run."""

    def take(self, token: int) -> bool:
        """Count a sampled token. True if it is the request's last."""
        self.new_tokens += 1
        return token in self.terms.end_ids or self.new_tokens >= self.terms.max_new_tokens


class ShardSession:
    """One shard of one model for one coordinator. `report` may be called from any thread."""

    def __init__(self, assignment: Assignment, report: Callable[[Frame], None]) -> None:
        self.assignment = assignment
        self.seat: Seat = (assignment.stage, assignment.rank)
        self.layout: ShardLayout = shard_layout(
            assignment.model, assignment.plan, stage=assignment.stage, rank=assignment.rank
        )
        self.sizes = tuple(len(stage.shards) for stage in assignment.plan.stages)
        self.neighbours = neighbours(self.sizes, self.seat)
        self._report = report
        self._program: StageProgram | None = None
        self._links: dict[Seat, Link] = {}
        self._successors: list[Seat] = []
        self._names: dict[Seat, str] = {}
        self._times = StepTimes()
        self._collective: Collective = SoloCollective()
        self._requests: dict[str, _Request] = {}
        self._gathered: list[NDArray[np.float32]] = []
        self._token = np.zeros(1, np.int64)
        self._must_yield = False
        self._broken = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"edge-compute-{assignment.session[:8]}", daemon=True
        )
        self._thread.start()

    def load(self, backend: Backend, weights: ShardWeights) -> Future[int]:
        """Make the program on the compute thread; the result is the bytes of its weights."""
        done: Future[int] = Future()

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                self._program = backend.load(
                    self.assignment.model,
                    self.layout,
                    weights,
                    self.assignment.weight_format,
                    limits=self.assignment.limits,
                )
                done.set_result(self._program.weight_bytes)
            except BaseException as error:
                done.set_exception(error)

        self._work.put(work)
        return done

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
            self._collective = TimedCollective(MeshCollective(rank, mesh), self._times)

    def take_times(self) -> dict[str, float]:
        """Where the time went since this was last called."""
        return self._times.take()

    @property
    def is_sampler(self) -> bool:
        return self.seat == sampler_seat(self.sizes)

    def begin(self, request: str, terms: SamplingTerms) -> None:
        """Announce a request that wants tokens; without it a request's logits are sent back."""
        self._requests[request] = _Request(terms)

    def step(self, step: Step) -> None:
        """Queue a step; its outcome comes through `report`."""
        self._work.put(lambda: self._guarded_step(step))

    def yield_run(self) -> None:
        """End the run under way after its current token; others are waiting."""
        self._must_yield = True

    def finish(self, request: str) -> None:
        """Free the request; a run that it is part of ends after its current token."""
        known = self._requests.get(request)
        if known is not None:
            known.is_cancelled = True

        def work() -> None:
            self._requests.pop(request, None)
            if self._program is not None:
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

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
        if self._program is not None:
            self._program.close()
            self._program = None
        self._requests.clear()

    def _guarded_step(self, step: Step) -> None:
        """A failed step leaves the shards out of step with each other: nothing runs after it."""
        if self._broken:
            return
        try:
            self._run_step(step)
        except transport.TransportError as error:
            self._fail(self._map_link_error(error))
        except Exception as error:  # onnxruntime raises plain exceptions
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._broken:
            self._broken = True
            self._report(Frame("failed", error_to_header(error)))

    def _map_link_error(self, error: transport.TransportError) -> EdgeError:
        if isinstance(error, transport.PeerLostError):
            return PeerLostError(self._neighbour(error.peer), error.reason)
        return ProtocolError(str(error))

    def _neighbour(self, link_peer: str) -> str:
        """The device behind a link, by the link's own name for it."""
        for seat, link in self._links.items():
            if link.peer == link_peer:
                return self._names[seat]
        return link_peer

    def _run_step(self, step: Step) -> None:
        """The step, and while it is a run those that follow from its tokens."""
        following: Step | None = step
        while following is not None and not self._broken:  # closing ends a run, too
            step = following
            output = self._compute(step)
            if self.is_sampler:
                start_s = time.perf_counter()
                following = self._sample_and_tell(step, output)
                self._times.sample_s += time.perf_counter() - start_s
            elif self.layout.is_last_stage and step.logit_rows:
                self._collective.gather(np.ascontiguousarray(output), None, root=0)
                following = self._hear(step)
            else:
                following = self._hear(step)

    def _compute(self, step: Step) -> NDArray[np.float32]:
        """Receive from the stage before, compute, send to the stage after."""
        program = self._program
        if program is None:
            raise PlanError("a step before the shard was loaded")
        stage, rank = self.seat
        hidden: NDArray[np.float32] | None = None
        times = self._times
        start_s = time.perf_counter()
        if stage > 0:
            hidden = program.receive_buffer(step)
            self._links[(stage - 1, rank % self.sizes[stage - 1])].receive(hidden)
        received_s, reduced_s = time.perf_counter(), times.reduce_s
        output = program.forward(step, hidden, self._collective)
        computed_s = time.perf_counter()
        for seat in self._successors:
            self._links[seat].send(output)
        times.steps += 1
        times.receive_s += received_s - start_s
        times.compute_s += computed_s - received_s - (times.reduce_s - reduced_s)
        times.send_s += time.perf_counter() - computed_s
        return output

    def _hear(self, step: Step) -> Step | None:
        """The next step of a run, as the sampler tells it; None at its end."""
        if step.run == 1:
            return None
        if self._token.size != step.batch:
            self._token = np.zeros(step.batch, np.int64)
        start_s = time.perf_counter()
        self._links[sampler_seat(self.sizes)].receive(self._token)
        self._times.receive_s += time.perf_counter() - start_s
        if self._token[0] == END_OF_RUN:
            return None
        return step.following(self._token.tolist())

    def _sample_and_tell(self, step: Step, own: NDArray[np.float32]) -> Step | None:
        """Choose tokens, tell the other shards at once, then the coordinator."""
        logits = self._gather_logits(own) if step.logit_rows else own
        requests = [self._requests.get(entry.request) for entry in step.entries]
        if any(request is None for request in requests) and step.logit_rows:
            self._report_logits(step, logits)
            return None
        tokens: list[int] = []
        ends = step.run == 1 or self._must_yield
        for index, (entry, request) in enumerate(zip(step.entries, requests, strict=True)):
            if request is None:
                continue
            request.history.extend(entry.tokens)
            if entry.logit_rows:
                token = self._sample(request, logits[index, -1], entry.end)
                tokens.append(token)
                ends = request.take(token) or request.is_cancelled or ends
        if step.run > 1:
            told = np.asarray(tokens, np.int64)
            if ends:
                told[0] = END_OF_RUN
            for link in self._links.values():
                link.send(told)
        if ends:
            self._must_yield = False
        self._report(Frame("tokens", {"tokens": tokens, "last": ends}))
        return None if ends else step.following(tokens)

    def _sample(self, request: _Request, logits: NDArray[np.float32], position: int) -> int:
        try:
            return sample(
                logits,
                history=request.history,
                parameters=request.terms.sampling,
                position=position,
            )
        except ValueError as error:
            raise PeerError("sampler", str(error)) from error

    def _gather_logits(self, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """Every shard's columns side by side [batch, rows, vocab]."""
        if self._collective.size == 1:
            return own
        shards = self.assignment.plan.stages[-1].shards
        shapes = [(*own.shape[:2], len(shard.vocab)) for shard in shards]
        if [each.shape for each in self._gathered] != shapes:
            self._gathered = [np.empty(shape, np.float32) for shape in shapes]
        self._collective.gather(np.ascontiguousarray(own), self._gathered, root=0)
        return np.concatenate(self._gathered, axis=-1)

    def _report_logits(self, step: Step, logits: NDArray[np.float32]) -> None:
        """Rows of the one request of the step, straight to the coordinator."""
        rows = np.ascontiguousarray(logits[:, : step.logit_rows])
        self._report(Frame("logits", payload=rows.tobytes()))
