"""A graph while it runs on its peers: planned, opened, fed, and planned again after a loss."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.errors import CapacityError, EdgeError, NetworkError, PeerError, PlanError, RequestError
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_file import GraphValue, OnnxFile
from edge.graphs.parts import TensorKind, cut_part
from edge.graphs.state import zeros
from edge.host.free_memory import format_size
from edge.partition import (
    GraphEstimate,
    GraphFacts,
    GraphPlan,
    GraphStage,
    choose_graph_plan,
    estimate_graph,
)
from edge.partition import PlanError as PartitionPlanError
from edge.progress import OnProgress, Progress
from edge.protocol.part_runs import RUNS_AT_ONCE
from edge.protocol.peer_info import PeerInfo
from edge.runs.graphs.agreement import Agreement, compare
from edge.runs.graphs.graph_options import GraphOptions
from edge.runs.graphs.inputs import checked
from edge.runs.graphs.measured_peers import (
    HELD_BYTES,
    HELD_RUNS,
    LEAST_BUFFER_BYTES,
    RECEIVED_COPIES,
    SENT_COPIES,
    MeasuredPeers,
)
from edge.runs.graphs.opened_parts import OpenedParts
from edge.runs.graphs.remote_part import (
    Arrays,
    DeviceGoneError,
    PartTerms,
    RemotePart,
)

_LARGEST_WINDOW = 64

_log = logging.getLogger(__name__)


class CutGraph:
    """One loaded graph; for one event loop. Made by `load_cut_graph`. Close with `aclose`."""

    def __init__(
        self,
        file: OnnxFile,
        atoms: Atoms,
        options: GraphOptions,
        measured: MeasuredPeers,
        on_progress: OnProgress,
    ) -> None:
        self.file, self.atoms, self.options = file, atoms, options
        self.agreement: Agreement | None = None
        """How the cut graph compared with the uncut one; None: it was not compared."""
        self.refused: tuple[str, ...] = ()
        """A sentence for each device that was refused because its results differ."""
        self.alone: tuple[GraphPlan, GraphEstimate] | None = None
        """The best plan of a single device, if the graph fits on one."""
        self.runs = self.exits = 0
        """Inputs that were computed, and those of them that ended early."""
        self._results = [each.name for each in file.outputs]
        self._on_progress = on_progress
        self.measured = measured
        self._facts: GraphFacts | None = None
        self._chosen: tuple[GraphPlan, GraphEstimate] | None = None
        self._opened: OpenedParts | None = None
        self._replanning = asyncio.Lock()
        self._failure: EdgeError | None = None
        self._is_closed = False
        self._is_planned_only = False
        self._was_planned = False

    @property
    def facts(self) -> GraphFacts:
        """What the plan follows from; devices by their names."""
        assert self._facts is not None, "measured"
        return self._facts

    @property
    def plan(self) -> GraphPlan:
        """The present plan, or the last one; devices by their names."""
        assert self._chosen is not None, "planned"
        return self._chosen[0]

    @property
    def estimate(self) -> GraphEstimate:
        assert self._chosen is not None, "planned"
        return self._chosen[1]

    @property
    def inputs(self) -> tuple[GraphValue, ...]:
        """What every input of the graph has: all but its state."""
        states = self.options.state.values()
        return tuple(each for each in self.file.inputs if each.name not in states)

    @property
    def results(self) -> list[str]:
        """The outputs that are given: all but the state."""
        return [name for name in self._results if name not in self.options.state]

    @property
    def window(self) -> int:
        """Inputs that are worth having under way at once."""
        return _window(self.plan, self.estimate)

    def choose(self) -> tuple[GraphPlan, GraphEstimate]:
        """The plan for the devices that are left. Raises CapacityError or PlanError."""
        self._facts = facts = self.measured.facts()
        choice = choose_graph_plan(facts, self.options.objective)
        self.alone = None if choice is None else choice.alone
        given = self.options.plan
        missing = (
            set() if given is None else set(given.devices) - {each.name for each in facts.devices}
        )
        # Later a device of the plan may be lost, and the best plan takes the place of the given.
        if missing and not self._was_planned:
            raise PlanError(
                f"the plan names {', '.join(sorted(missing))}, which the cluster does not have, or "
                "which has no room"
            )
        self._was_planned = True
        if given is not None and not missing:
            try:
                given.check(facts)
            except PartitionPlanError as error:
                raise PlanError(str(error), error.problems) from error
            return given, estimate_graph(facts, given)
        if choice is None:
            raise _no_room(facts)
        return choice.plan, choice.estimate

    async def only_plan(self) -> None:
        """Have a plan without opening it."""
        self._chosen = await run_blocking(self.choose)
        self._is_planned_only = True

    async def begin(self) -> None:
        """Open the parts of the best plan; after a loss or a refusal, of another one."""
        while True:
            plan, estimate = await run_blocking(self.choose)
            try:
                self._opened = await self._open(plan, estimate)
                self._chosen = plan, estimate
                return
            except DeviceGoneError as error:
                _log.warning("a graph is planned without a device: %s", error)
                self.measured.lose(error.device)
                if not self.measured.ids and isinstance(error.__cause__, EdgeError):
                    raise error.__cause__ from None

    async def check(self, sample: Arrays) -> None:
        """Compare the cut graph with the uncut one; refuse a device whose results differ.

        Raises PeerError if no other device is left, and PlanError if no single device is to blame.
        """
        if self.atoms.is_random:
            return
        inputs = checked(self.file.inputs, sample)
        while True:
            opened = await self.current()
            try:
                copy, self.agreement = await least_alike(self, opened, inputs)
                if self.agreement.problem is None:
                    return
                blamed = await find_wrong(self, copy, inputs)
            except DeviceGoneError as gone:
                await uninterrupted(self.lost(opened, gone))
                continue
            if blamed is None:
                raise PlanError(
                    f"cut by this plan, the graph gives other results: {self.agreement.problem}",
                    remedy="load it with a plan of one device",
                )
            peer, problem = blamed
            error = PeerError(
                peer.name, f"computes other results than {self.measured.trusted.name}"
            )
            self.refused += (f"{error}: {problem}",)
            _log.warning("%s", self.refused[-1])
            self.measured.refuse(peer.id)
            if not self.measured.ids or self.options.plan is not None:
                raise error
            await self._end()
            await self.begin()

    async def run(self, arrays: Arrays, *, ends_early: bool = True) -> dict[str, NDArray[Any]]:
        """The outputs for these inputs. If a device is lost, they are computed again.

        Raises RequestError for inputs of another form, and for those that a node cannot compute.
        """
        inputs = checked(self.file.inputs, arrays)
        exits = self.options.exit_when if ends_early else None
        while True:
            opened = await self.current()
            try:
                found = await opened.compute(inputs, self._results, exits)
                self.runs += ends_early
                self.exits += len(found) < len(self._results)
                return found
            except DeviceGoneError as error:
                if self._is_closed:
                    raise RequestError("the graph is closed") from error
                await uninterrupted(self.lost(opened, error))

    async def aclose(self) -> None:
        """Free everything on the peers. May be called again. Inputs under way end with an error."""
        self._is_closed = True
        async with self._replanning:
            await self._end()

    async def current(self) -> OpenedParts:
        """The open parts, once the graph is planned again after a loss. Raises its failure."""
        if self._is_closed:
            raise RequestError("the graph is closed; load it again")
        if self._is_planned_only:
            raise RequestError("the graph is planned only; load it without plan_only to run it")
        if self._opened is None:
            async with self._replanning:
                pass
        if self._failure is not None:
            raise self._failure
        if self._opened is None:
            raise RequestError("the graph is closed; load it again")
        return self._opened

    async def lost(self, opened: OpenedParts, error: DeviceGoneError) -> None:
        """Plan again without the lost device, unless another input has seen to it already."""
        async with self._replanning:
            if self._opened is not opened or self._is_closed:
                return
            _log.warning("a graph is planned again: %s", error)
            self.measured.lose(error.device)
            await self._end()
            try:
                if not self.measured.ids:
                    raise NetworkError(f"no device is left that could run the graph: {error}")
                await self.begin()
            except EdgeError as failure:
                self._failure = failure

    async def _end(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()

    async def _open(self, plan: GraphPlan, estimate: GraphEstimate) -> OpenedParts:
        first, *others = [
            OpenedParts(copy, each)
            for copy, each in zip(plan.each_copy, estimate.copies or (estimate,), strict=True)
        ]
        first.copies = others
        stages = [(copy, stage) for copy in first.each_copy for stage in copy.plan.stages]
        try:
            for number, (copy, stage) in enumerate(stages):
                self._on_progress(
                    Progress(phase="load", peer=stage.device, done=number, total=len(stages))
                )
                peer = self.measured.named(stage.device)
                try:
                    copy.parts.append(await self.open_stage(stage, peer, number))
                except (CapacityError, PeerError) as error:
                    # Others may do without this device, but the user's plan does not.
                    if plan == self.options.plan:
                        raise
                    raise DeviceGoneError(peer.id, error) from error
        except BaseException:
            await uninterrupted(first.aclose())
            raise
        return first

    async def open_stage(self, stage: GraphStage, peer: PeerInfo, number: int = 0) -> RemotePart:
        kinds = self.measured.kinds
        part = await run_blocking(lambda: cut_part(self.file, self.atoms, stage.atoms, kinds))
        came, gone = (_bytes_of(names, kinds) for names in (part.inputs, part.outputs))
        buffers = self.measured.buffer_bytes(stage.atoms)
        buffers += RECEIVED_COPIES * came + SENT_COPIES * gone
        return await RemotePart.open(
            part,
            peer,
            terms=PartTerms(
                model=self.file.path.name,
                stage=number,
                buffer_bytes=max(LEAST_BUFFER_BYTES, buffers),
                held_bytes=HELD_BYTES + HELD_RUNS * (came + gone),
                run_limit_s=self.options.run_limit_s,
            ),
            on_progress=self._on_progress,
        )


def _bytes_of(names: Sequence[str], kinds: Mapping[str, TensorKind]) -> int:
    return sum(kinds[name].nbytes for name in names if name in kinds)


async def least_alike(
    graph: CutGraph, opened: OpenedParts, inputs: Arrays
) -> tuple[OpenedParts, Agreement]:
    """The copy whose results differ most from the uncut graph's."""
    measured, names, compared = graph.measured, [e.name for e in graph.file.outputs], []
    for copy in opened.each_copy:
        found = await copy.compute_here(inputs, names, None)
        compared.append((copy, compare(found, measured.results, tolerance=measured.tolerance)))
    return max(compared, key=lambda each: (not each[1].exact, each[1].difference))


async def find_wrong(
    graph: CutGraph, opened: OpenedParts, sample: Arrays
) -> tuple[PeerInfo, str] | None:
    """The first device of a copy whose part the trusted device computes otherwise."""
    measured, trusted = graph.measured, graph.measured.trusted
    known = dict(sample)
    for stage, remote in zip(opened.plan.stages, opened.parts, strict=True):
        found = await remote.run(known)
        if remote.peer.id != trusted.id and trusted.id in measured.ids:
            other = await graph.open_stage(stage, trusted)
            try:
                expected = await other.run(known)
            finally:
                await other.aclose()
            agreement = compare(found, expected, tolerance=measured.tolerance)
            if agreement.problem is not None:
                return remote.peer, agreement.problem
        known |= found
    return None


async def measured_graph(
    file: OnnxFile,
    peers: Sequence[PeerInfo],
    sample: Arrays,
    options: GraphOptions,
    on_progress: OnProgress,
) -> CutGraph:
    """Measure a graph with a complete sample. Opens nothing."""
    exits = options.exit_when
    atoms = await run_blocking(lambda: Atoms(file, None if exits is None else exits.output))
    measured = MeasuredPeers(file, atoms, peers, on_progress, options)
    await measured.measure(checked(file.inputs, sample))
    if atoms.exit_at is not None and atoms.exit_at not in measured.facts().cuts:
        raise RequestError(
            f"the graph cannot be cut behind {exits.output if exits else None!r:.80}, so no input "
            "can end there",
            remedy="load it without exit_when",
        )
    return CutGraph(file, atoms, options, measured, on_progress)


async def load_cut_graph(
    file: OnnxFile,
    peers: Sequence[PeerInfo],
    sample: Arrays,
    options: GraphOptions,
    on_progress: OnProgress,
    *,
    plan_only: bool = False,
) -> CutGraph:
    """Measure a graph, plan it, open it and compare it with the uncut one.

    plan_only: nothing is opened behind the measurement. Raises the errors of `CutGraph`; nothing is
    left on the peers then.
    """
    states = [each for each in file.inputs if each.name in options.state.values()]
    missing = [each for each in states if each.name not in sample]
    sample = {**zeros(missing, file.inputs, sample, {}), **sample}
    graph = await measured_graph(file, peers, sample, options, on_progress)
    try:
        if plan_only:
            await graph.only_plan()
        else:
            await graph.begin()
            await graph.check(sample)
    except BaseException:
        await uninterrupted(graph.aclose())
        raise
    return graph


def _window(plan: GraphPlan, estimate: GraphEstimate) -> int:
    """See `CutGraph.window`: so many that no device waits while the slowest copy computes one."""
    usual = RUNS_AT_ONCE * len(plan.devices)
    if not estimate.copies or not estimate.interval_s:
        return usual
    slowest_s = max(max(each.latency_s, each.interval_s) for each in estimate.copies)
    held_up = math.ceil(slowest_s / estimate.interval_s) + len(estimate.copies)
    return max(usual, min(_LARGEST_WINDOW, held_up))


def _no_room(facts: GraphFacts) -> CapacityError:
    needed = facts.memory(range(len(facts.atoms)))
    had = ", ".join(f"{each.name} {format_size(each.memory_bytes)}" for each in facts.devices)
    return CapacityError(
        f"the graph needs {format_size(needed)} with its tensors, and these have room: "
        f"{had or 'none'}",
        remedy="give the peers more --memory, or use more peers",
    )
