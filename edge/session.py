"""A peer's side of one loaded shard: its program, its links, and the one thread that runs both.

Here the data plane lives: blocking links, called from the compute thread only. The control plane
hands it work through a queue and gets events back through a callback.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import transport
from edge.backends.base import Backend, ShardWeights, StageProgram, Step
from edge.errors import EdgeError, PeerError, PeerLostError, PlanError, ProtocolError
from edge.layout import ShardLayout, shard_layout
from edge.wire import Assignment, error_to_header
from kernels.sampling.reference import SamplingParameters, sample
from transport import Collective, Frame, Link, MeshCollective, SoloCollective

Seat = tuple[int, int]
"""(stage, rank): a place in the plan."""


def neighbours(plan_sizes: tuple[int, ...], seat: Seat) -> frozenset[Seat]:
    """The seats that `seat` has a link to; symmetric.

    Ranks of a stage are a full mesh. Rank j of a stage hears from rank j mod n of the stage before,
    whose n shards all hold the same hidden state.
    """
    stage, rank = seat
    found = {(stage, other) for other in range(plan_sizes[stage]) if other != rank}
    if stage > 0:
        found.add((stage - 1, rank % plan_sizes[stage - 1]))
    if stage + 1 < len(plan_sizes):
        size = plan_sizes[stage]
        found.update((stage + 1, j) for j in range(plan_sizes[stage + 1]) if j % size == rank)
    return frozenset(found)


@dataclass(slots=True)
class _Request:
    """What sampling needs to know of a request; kept where the last stage samples."""

    sampling: SamplingParameters
    history: list[int] = field(default_factory=list)


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
        self._names: dict[Seat, str] = {}
        self._collective: Collective = SoloCollective()
        self._requests: dict[str, _Request] = {}
        self._gathered: list[NDArray[np.float32]] = []
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
                    context_tokens=self.assignment.context_tokens,
                    chunk_tokens=self.assignment.chunk_tokens,
                )
                done.set_result(self._program.weight_bytes)
            except BaseException as error:
                done.set_exception(error)

        self._work.put(work)
        return done

    def connect(self, links: Mapping[Seat, Link], names: Mapping[Seat, str]) -> None:
        """Take over the links to all neighbours; `names` are their devices', for messages."""
        assert set(links) == self.neighbours
        self._links = dict(links)
        self._names = dict(names)
        stage, rank = self.seat
        mesh = {r: link for (s, r), link in links.items() if s == stage}
        if mesh:
            self._collective = MeshCollective(rank, mesh)

    def begin(self, request: str, sampling: SamplingParameters) -> None:
        self._work.put(lambda: self._requests.update({request: _Request(sampling)}))

    def step(self, step: Step) -> None:
        """Queue a step; its outcome comes through `report`."""
        self._work.put(lambda: self._guarded_step(step))

    def finish(self, request: str) -> None:
        """Free the request's KV cache, once the steps before this are done."""

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
            self._step(step)
        except transport.TransportError as error:
            self._fail(step, self._map_link_error(error))
        except Exception as error:
            self._fail(step, error)

    def _fail(self, step: Step, error: Exception) -> None:
        if not self._broken:
            self._broken = True
            self._report(
                Frame(kind="failed", header={"request": step.request, **error_to_header(error)})
            )

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

    def _step(self, step: Step) -> None:
        program = self._program
        if program is None:
            raise PlanError("a step before the shard was loaded")
        stage, rank = self.seat
        hidden: NDArray[np.float32] | None = None
        if stage > 0:
            hidden = program.receive_buffer(step.num_tokens)
            self._links[(stage - 1, rank % self.sizes[stage - 1])].receive(hidden)
        output = program.forward(step, hidden, self._collective)
        if not self.layout.is_last_stage:
            for seat, link in self._links.items():
                if seat[0] == stage + 1:
                    link.send(output)
            return
        request = self._requests.get(step.request)
        if request is not None:
            request.history.extend(step.tokens)
        if step.logit_rows:
            logits = self._gather_logits(output)
            if logits is not None:
                self._answer(step, request, logits)
        elif rank == 0:
            self._report(Frame("done", self._answer_header(step)))

    def _gather_logits(self, own: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Every shard's columns side by side on rank 0 [rows, vocab]; None elsewhere."""
        if self._collective.size == 1:
            return own
        if self._collective.rank != 0:
            self._collective.gather(np.ascontiguousarray(own), None, root=0)
            return None
        rows = own.shape[0]
        shards = self.assignment.plan.stages[-1].shards
        if not self._gathered or self._gathered[0].shape[0] != rows:
            self._gathered = [np.empty((rows, len(s.vocab)), np.float32) for s in shards]
        self._collective.gather(own, self._gathered, root=0)
        return np.concatenate(self._gathered, axis=1)

    def _answer(self, step: Step, request: _Request | None, logits: NDArray[np.float32]) -> None:
        header = self._answer_header(step)
        if request is None:
            self._report(Frame("logits", header, np.ascontiguousarray(logits).tobytes()))
            return
        try:
            token = sample(
                logits[-1],
                history=request.history,
                parameters=request.sampling,
                position=step.position + step.num_tokens,
            )
        except ValueError as error:
            raise PeerError("sampler", str(error)) from error
        self._report(Frame("token", {**header, "token": token}))

    def _answer_header(self, step: Step) -> dict[str, Any]:
        return {"request": step.request, "position": step.position + step.num_tokens}
