"""A graph loaded onto the peers of a cluster, for callers with and without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from numpy.typing import ArrayLike, NDArray

from edge.concurrency.blocking import run_blocking
from edge.concurrency.loop_thread import LoopThread
from edge.errors import CapacityError, EdgeError, PlanError, RequestError
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import GraphValue, OnnxFile
from edge.graphs.state import check_state, find_state
from edge.graphs.tiles import TileSize
from edge.partition import GraphEstimate, GraphPlan, Objective
from edge.partition import PlanError as PartitionPlanError
from edge.progress import OnProgress
from edge.protocol.peer_info import PeerInfo, describe_all, with_unique_names
from edge.runs.graphs.agreement import Agreement
from edge.runs.graphs.cut_graph import CutGraph, load_cut_graph
from edge.runs.graphs.graph_options import EarlyExit, GraphOptions
from edge.runs.graphs.inputs import made_up_sample
from edge.runs.graphs.remote_part import Arrays
from edge.runs.graphs.sequences import Sequence as InputSequence
from edge.runs.graphs.sequences import Sequences
from edge.runs.graphs.tiled_graph import TiledGraph, load_tiled_graph

GraphInputs = Mapping[str, ArrayLike]
GraphResults = dict[str, NDArray[Any]]
AskedPlan = Literal["auto"] | GraphPlan | Mapping[str, Any]
AskedState = Literal["auto"] | Mapping[str, str] | None


_PICTURES_AT_ONCE = 2
"""Pictures of a stream that are under way, where each is many tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileFacts:
    """How large pictures are cut into tiles, in pixels."""

    size: int
    overlap: int
    """At least so many pixels are in both of two neighbours."""
    step: int
    """Tiles begin at its multiples."""
    count: int
    """Tiles of a picture as large as the sample."""
    picture_s: float
    """Predicted seconds of such a picture. The estimate of the graph is that of a tile."""
    interval_s: float
    """Predicted seconds between such pictures of a stream."""


class _GraphFacts:
    """What both faces of a loaded graph tell."""

    def __init__(self, graph: CutGraph | TiledGraph) -> None:
        self._tiled = graph if isinstance(graph, TiledGraph) else None
        self._graph = graph.graph if isinstance(graph, TiledGraph) else graph

    @property
    def inputs(self) -> tuple[GraphValue, ...]:
        """Name, type and shape of each input. A dimension is a number, a name, or None. State is
        not among them."""
        return self._graph.inputs

    @property
    def outputs(self) -> tuple[GraphValue, ...]:
        """The same of each output."""
        return tuple(each for each in self._graph.file.outputs if each.name in self._graph.results)

    @property
    def state(self) -> Mapping[str, str]:
        """Outputs that stay on their device, and the inputs whose next values they are."""
        return dict(self._graph.options.state)

    @property
    def plan(self) -> GraphPlan:
        """Which device computes which atoms (runs of nodes that stay together). Another one after
        a device was lost."""
        return self._graph.plan

    @property
    def estimate(self) -> GraphEstimate:
        """Predicted seconds: `latency_s` of one input, `interval_s` between results of a stream,
        and those of each stage."""
        return self._graph.estimate

    @property
    def alone(self) -> tuple[GraphPlan, GraphEstimate] | None:
        """The best plan of one device, and its prediction; None: the graph fits on no single
        one."""
        return self._graph.alone

    @property
    def tiles(self) -> TileFacts | None:
        """How large pictures are cut; None: they are not."""
        tiled = self._tiled
        if tiled is None:
            return None
        tiling = tiled.tiling
        return TileFacts(
            size=tiling.tile.size,
            overlap=tiling.tile.overlap,
            step=tiling.step,
            count=tiled.count,
            picture_s=tiled.picture_s,
            interval_s=tiled.interval_s,
        )

    @property
    def agreement(self) -> Agreement | None:
        """How the cut graph's results compared with those of the uncut one, for the sample, or for
        some of its tiles; None: they were not compared, because the graph has random nodes or was
        only planned."""
        return self._graph.agreement

    @property
    def refused(self) -> tuple[str, ...]:
        """A sentence for each device that was refused, because its results differ."""
        return self._graph.refused

    @property
    def exit_share(self) -> float | None:
        """The share of inputs that have ended early; before there are any, the share of the
        sample's values that would. None: inputs do not end early."""
        graph = self._graph
        if graph.options.exit_when is None:
            return None
        return graph.exits / graph.runs if graph.runs else graph.facts.exit_share

    @property
    def window(self) -> int:
        """Inputs of a stream that are under way at once."""
        return _PICTURES_AT_ONCE if self._tiled is not None else self._graph.window

    def explain(self) -> dict[str, Any]:
        """The plan and its prediction as JSON values: seconds, bytes, and the nodes of each
        stage."""
        graph, estimate = self._graph, self._graph.estimate
        stages = []
        every = [(n, s) for n, copy in enumerate(graph.plan.each_copy) for s in copy.stages]
        for (copy, stage), told in zip(every, estimate.stages, strict=True):
            nodes = [index for number in stage.atoms for index in graph.atoms[number].nodes]
            first, last = (graph.file.nodes[index] for index in (min(nodes), max(nodes)))
            stages.append(
                {
                    **stage.to_json(),
                    "copy": copy,
                    "nodes": len(nodes),
                    "first_node": first.name or first.op_type,
                    "last_node": last.name or last.op_type,
                    "compute_s": told.compute_s,
                    "receive_s": told.receive_s,
                    "send_s": told.send_s,
                    "memory_bytes": told.memory_bytes,
                }
            )
        return {
            "objective": graph.options.objective,
            "latency_s": estimate.latency_s,
            "interval_s": estimate.interval_s,
            "alone": None
            if graph.alone is None
            else {
                "device": graph.alone[0].devices[0],
                "latency_s": graph.alone[1].latency_s,
                "interval_s": graph.alone[1].interval_s,
            },
            "state": dict(graph.options.state),
            "exit_at": graph.facts.exit_at,
            "exit_share": self.exit_share,
            "atoms": len(graph.atoms),
            "cuts": len(graph.facts.cuts),
            "exact": None if graph.agreement is None else graph.agreement.exact,
            "difference": None if graph.agreement is None else graph.agreement.difference,
            "refused": list(graph.refused),
            "tiles": None if self.tiles is None else asdict(self.tiles),
            "stages": stages,
        }

    def __repr__(self) -> str:
        devices = ", ".join(self._graph.plan.devices)
        return f"<{type(self).__name__} {self._graph.file.path.name} on {devices}>"


class AsyncGraph(_GraphFacts):
    """A loaded graph for one event loop. An asynchronous context manager."""

    def __init__(self, graph: CutGraph | TiledGraph) -> None:
        super().__init__(graph)
        self._sequences = Sequences(self._graph)

    async def run(self, inputs: GraphInputs) -> GraphResults:
        """The outputs for these inputs, by name.

        inputs: an array for each input, of its type and shape. With state, they follow those of the
        last run, also of one that was cancelled; `reset` begins anew. If a device is lost
        meanwhile, the graph is planned again and the input is computed again. Raises RequestError
        for a wrong name, type or shape, which says what is wanted, and for an input that a node
        cannot compute, which names the node; NetworkError or CapacityError if too few devices are
        left.

        With `exit_when`, an input that ends early has the outputs of the stages up to there alone.
        """
        if self.state:
            return await self._sequences.run(inputs)
        return await (self._tiled or self._graph).run(inputs)  # type: ignore[arg-type]

    async def reset(self, initial: GraphInputs | None = None) -> None:
        """Begin a new sequence of `run`: the state is zeros, or `initial` by the names of inputs.

        Runs under way end with a RequestError. Raises RequestError for a state of another form, and
        for a graph without state.
        """
        self._check_state("reset")
        await self._sequences.reset(initial)

    async def stream(
        self,
        inputs: Iterable[GraphInputs] | AsyncIterable[GraphInputs],
        *,
        on_error: Literal["raise", "give"] = "raise",
        initial: GraphInputs | None = None,
    ) -> AsyncGenerator[GraphResults | EdgeError]:
        """The outputs for each of the inputs, in order.

        Up to `window` inputs are under way at once; further ones are taken as results are. A result
        comes as soon as it is there, also while the next input of an async iterable is awaited. An
        input that fails does so alone. on_error: raise its error in its place, which ends the
        stream, or give the error and go on.

        With state, each stream is a sequence of its own: it begins with zeros, or with `initial` by
        the names of inputs. An input that fails leaves the state as it was. Raises CapacityError if
        more than three streams are under way.
        """
        _check_on_error(on_error)
        sequence = self.sequence(initial)
        waiting: deque[asyncio.Task[GraphResults]] = deque()
        coming: asyncio.Task[GraphInputs | None] | None = None
        async with contextlib.aclosing(_each(inputs)) as each_input:
            try:
                has_more = True
                while has_more or waiting:
                    if has_more and coming is None and len(waiting) < self.window:
                        coming = asyncio.create_task(_next(each_input))
                    awaited: list[asyncio.Task[Any]] = [*list(waiting)[:1]]
                    if coming is not None:
                        awaited.append(coming)
                    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                    if coming is not None and coming.done():
                        each, coming = coming.result(), None
                        if each is None:
                            has_more = False
                        else:
                            waiting.append(self.begin(each, sequence))
                    while waiting and waiting[0].done():
                        yield await _outcome(waiting.popleft(), on_error)
            finally:
                try:
                    # The source cannot be closed while its next input is awaited.
                    await _cancelled([*waiting, *([] if coming is None else [coming])])
                finally:
                    await self.end(sequence)

    def sequence(self, initial: GraphInputs | None) -> InputSequence | None:
        """The sequence of a stream, for a graph with state. Close with `end`."""
        if initial is not None:
            self._check_state("initial")
        return self._sequences.begin(initial) if self.state else None

    async def end(self, sequence: InputSequence | None) -> None:
        """Forget the sequence of a stream."""
        if sequence is not None:
            await self._sequences.end(sequence)

    def begin(
        self, inputs: GraphInputs, sequence: InputSequence | None
    ) -> asyncio.Task[GraphResults]:
        """Start to compute an input."""
        return asyncio.create_task((self if sequence is None else sequence).run(inputs))

    async def aclose(self) -> None:
        """Free everything on the peers. May be called again."""
        await self._graph.aclose()
        await self._sequences.aclose()

    def _check_state(self, what: str) -> None:
        if not self.state:
            raise RequestError(
                f"{what} is for a graph with state", remedy='load it with state="auto"'
            )

    async def __aenter__(self) -> AsyncGraph:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Graph(_GraphFacts):
    """A loaded graph; thread-safe. A context manager. See `AsyncGraph` for details and errors."""

    def __init__(self, graph: AsyncGraph, loop: LoopThread) -> None:
        super().__init__(graph._tiled or graph._graph)
        self._own, self._loop = graph, loop

    def run(self, inputs: GraphInputs) -> GraphResults:
        """The outputs for these inputs, by name: an array for each input, of its type and shape."""
        return self._loop.run(self._own.run(inputs))

    def reset(self, initial: GraphInputs | None = None) -> None:
        """Begin a new sequence of `run`: the state is zeros, or `initial` by names of inputs."""
        self._loop.run(self._own.reset(initial))

    def stream(
        self,
        inputs: Iterable[GraphInputs],
        *,
        on_error: Literal["raise", "give"] = "raise",
        initial: GraphInputs | None = None,
    ) -> Generator[GraphResults | EdgeError]:
        """The outputs for each of the inputs, in order; see `AsyncGraph.stream`.

        The iterable is read in the caller's thread. So results that are there are given when its
        next input has come.
        """
        _check_on_error(on_error)
        waiting: deque[asyncio.Task[GraphResults]] = deque()
        sequence = self._loop.run(self._sequence(initial))
        try:
            for each in inputs:
                waiting.append(self._loop.run(self._begin(each, sequence)))
                while waiting and (len(waiting) >= self.window or waiting[0].done()):
                    yield self._loop.run(_outcome(waiting.popleft(), on_error))
            while waiting:
                yield self._loop.run(_outcome(waiting.popleft(), on_error))
        finally:
            if waiting or sequence is not None:
                with contextlib.suppress(RequestError):  # the cluster was closed
                    self._loop.run(_cancelled(waiting))
                    self._loop.run(self._own.end(sequence))

    async def _sequence(self, initial: GraphInputs | None) -> InputSequence | None:
        return self._own.sequence(initial)

    async def _begin(
        self, inputs: GraphInputs, sequence: InputSequence | None
    ) -> asyncio.Task[GraphResults]:
        return self._own.begin(inputs, sequence)

    def close(self) -> None:
        """Free everything on the peers. May be called again."""
        self._loop.run(self._own.aclose())

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _each(
    inputs: Iterable[GraphInputs] | AsyncIterable[GraphInputs],
) -> AsyncGenerator[GraphInputs]:
    if isinstance(inputs, AsyncIterable):
        async for each in inputs:
            yield each
    else:
        for each in inputs:
            yield each
            await asyncio.sleep(0)


async def _next(inputs: AsyncGenerator[GraphInputs]) -> GraphInputs | None:
    """The next input; None: there is none."""
    return await anext(inputs, None)


def _check_on_error(on_error: object) -> None:
    if on_error not in ("raise", "give"):
        raise RequestError("on_error must be raise or give")


async def _outcome(
    task: asyncio.Task[GraphResults], on_error: Literal["raise", "give"]
) -> GraphResults | EdgeError:
    try:
        return await task
    except EdgeError as error:
        if on_error == "raise":
            raise
        return error


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class MoreGraphTerms(TypedDict, total=False):
    """Terms that few calls give, as keyword arguments; see `AsyncCluster.load_graph`."""

    time_limit_s: float
    plan_only: bool
    exit_when: tuple[str, float] | None
    tiles: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAsked:
    """What a caller asks for; see `AsyncCluster.load_graph`."""

    plan: AskedPlan = "auto"
    objective: Objective = "latency"
    sample: GraphInputs | None = None
    state: AskedState = None
    time_limit_s: float = 60.0
    plan_only: bool = False
    exit_when: tuple[str, float] | None = None
    tiles: tuple[int, int] | None = None

    def options(self, file: OnnxFile) -> GraphOptions:
        """Checked, for this file."""
        if self.objective not in ("latency", "throughput"):
            raise RequestError("objective must be latency or throughput")
        if not 0 < self.time_limit_s <= 3600:
            raise RequestError("time_limit_s must be above 0, and at most 3600")
        if self.tiles is not None and (self.state, self.exit_when) != (None, None):
            raise RequestError("tiles do not go with state or exit_when", remedy="give one of them")
        return GraphOptions(
            plan=asked_plan(self.plan),
            # Tiles are a stream, whichever the objective of pictures.
            objective=self.objective if self.tiles is None else "throughput",
            run_limit_s=float(self.time_limit_s),
            state=_asked_state(file, self.state),
            exit_when=self._exit(file),
        )

    def _exit(self, file: OnnxFile) -> EarlyExit | None:
        if self.exit_when is None:
            return None
        name, least = self.exit_when
        outputs = {each.name: each for each in file.outputs}
        if name not in outputs or not outputs[name].dtype.startswith(("float", "int", "uint")):
            raise RequestError(
                f"{name!r:.80} is no output of numbers, by which inputs could end",
                remedy=f"give one of {', '.join(map(repr, outputs))}",
            )
        if not math.isfinite(least):
            raise RequestError("exit_when needs a finite number", remedy="give one such as 0.9")
        if self.state is not None:
            raise RequestError(
                "an input that ends early leaves no state", remedy="give state or exit_when"
            )
        return EarlyExit(output=name, least=float(least))


async def load_graph(
    path: str | Path, peers: Sequence[PeerInfo], on_progress: OnProgress, asked: GraphAsked
) -> AsyncGraph:
    """See `AsyncCluster.load_graph`. Peers are described anew; those of a GPU are left out."""
    file = await run_blocking(lambda: open_onnx(Path(path)))
    options = asked.options(file)
    peers = await cpu_peers(peers)
    if asked.tiles is not None:
        if asked.sample is None:
            raise RequestError("tiles need a sample", remedy="give a picture larger than a tile")
        tile, picture = TileSize.checked(asked.tiles), cast("Arrays", asked.sample)
        return AsyncGraph(
            await load_tiled_graph(
                file, peers, picture, options, on_progress, tile, plan_only=asked.plan_only
            )
        )
    inputs: Any = made_up_sample(file.inputs) if asked.sample is None else asked.sample
    return AsyncGraph(
        await load_cut_graph(file, peers, inputs, options, on_progress, plan_only=asked.plan_only)
    )


async def cpu_peers(peers: Sequence[PeerInfo]) -> list[PeerInfo]:
    """The peers as they are now, those that compute in their machine's memory. Raises CapacityError
    if there are none."""
    known, _failures = await describe_all({each.address: each.credentials for each in peers})
    peers = [each for each in with_unique_names(known, peers) if each.host_memory_bytes is None]
    if not peers:
        raise CapacityError(
            "no peer is there that computes in its machine's memory",
            remedy="graphs run on CPUs: start a peer with --backend ort",
        )
    return peers


def _asked_state(file: OnnxFile, state: AskedState) -> dict[str, str]:
    if state is None:
        return {}
    if isinstance(state, str):
        if state != "auto":
            raise RequestError('state must be "auto", or outputs and their inputs: {"hn": "h"}')
        return find_state(file)
    check_state(file, state)
    return dict(state)


def asked_plan(plan: AskedPlan) -> GraphPlan | None:
    if isinstance(plan, str):
        if plan != "auto":
            raise RequestError('plan must be "auto", a GraphPlan, or its JSON')
        return None
    try:
        # A GraphPlan may have been put together by hand: from_json checks it for gaps.
        value = plan.to_json() if isinstance(plan, GraphPlan) else dict(plan)
        return GraphPlan.from_json(value)
    except PartitionPlanError as error:
        raise PlanError(str(error), error.problems) from error
