"""Measures a graph on its peers: the time of each atom, the kinds of tensors, the ways between.

A peer that has no room for the whole graph computes it in sections, one after the other.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.concurrency.blocking import run_blocking
from edge.errors import CapacityError, EdgeError, PeerError
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_file import NUMPY_NAMES, ONNX_TYPES, OnnxFile
from edge.graphs.parts import (
    INSIDE,
    GraphPart,
    TensorKind,
    cut_part,
    echo_part,
    feasible_cuts,
)
from edge.graphs.tensors import DTYPES
from edge.host.free_memory import format_size
from edge.progress import OnProgress, Progress
from edge.protocol.graph_frames import PACKED, PROCESS_BYTES, PROFILE_BYTES
from edge.protocol.part_runs import RUNS_AT_ONCE
from edge.protocol.peer_info import PeerInfo, gather_all
from edge.runs.graphs.remote_part import Arrays, DeviceGoneError, PartTerms, RemotePart

TENSORS_AT_ONCE = 4
"""Times the bytes of the tensors that are there at one time that are reserved: ONNX Runtime takes
memory in steps that grow, and lays out the next run in memory of its own."""

MOST_SAMPLE_BUFFER_BYTES = 4 << 30

_RUNS, _MOST_RUN_S = 6, 3.0
"""Runs of the sample that are timed; fewer if they take so many seconds."""
_ECHOES = 9
"""Likewise, of a part that changes nothing."""
_TOGETHER = 30
_ECHO_BYTES = 1 << 20
_WAITS_BELOW = 1.5
"""Runs that are under way together wait for messages if the time of one is below so many times its
share of the way."""

_MOST_MICROS = 1e12
_NODE = re.compile(r"edge(\d+)node")
_IN_BLOCKS = "_nchwc"
"""The end of the names of ONNX Runtime's own nodes for channels in blocks, behind the name of the
tensor that they give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayToPeer:
    """What it takes to ask a peer, and to move tensors to it and back."""

    latency_s: float
    overhead_s: float
    """What a run takes of the peer beside its nodes, while others are under way."""
    bytes_per_s: float
    handling_s_per_byte: float
    """What a byte that comes or goes takes of the process that computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGraph:
    """What was seen of a graph on one peer."""

    seconds: tuple[float, ...]
    """The time of each atom."""
    kinds: Mapping[str, TensorKind]
    """The kinds of all tensors between nodes, and of inputs and outputs."""
    node_bytes: tuple[int, ...]
    """Bytes of the tensors that each node of the file gives."""
    results: Arrays
    """Outputs of the uncut graph for the sample."""


def room_bytes(peer: PeerInfo) -> int:
    """Memory of a peer for weights and tensors of one part."""
    return max(0, min(peer.free_now_bytes, peer.model_free_bytes) - PROCESS_BYTES)


async def measure_way(peer: PeerInfo, on_progress: OnProgress) -> WayToPeer:
    """Have a part that changes nothing run on the peer, with little and with much."""
    part = echo_part()
    remote = await RemotePart.open(
        part,
        peer,
        terms=PartTerms(
            model="measurement", buffer_bytes=32 << 20, held_bytes=16 << 20, run_limit_s=60.0
        ),
        on_progress=on_progress,
    )
    try:
        small, small_s = await _times_s(remote, 1)
        large, large_s = await _times_s(remote, _ECHO_BYTES)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        tiny = {"x": np.zeros(1, np.uint8)}
        await gather_all(remote.run(tiny) for _ in range(_TOGETHER))
        together_s = (loop.time() - began_s) / _TOGETHER
    finally:
        await remote.aclose()
    moved_s = max(min(large) - min(small), 1e-5)  # what else the devices do only adds to it
    latency_s = statistics.median(small)
    # On a long way runs wait for messages, during which nodes would be computed.
    waits = together_s * RUNS_AT_ONCE < _WAITS_BELOW * latency_s
    return WayToPeer(
        latency_s=latency_s,
        overhead_s=small_s if waits else together_s,
        bytes_per_s=2 * _ECHO_BYTES / moved_s,
        handling_s_per_byte=max(0.0, large_s - small_s) / (2 * _ECHO_BYTES),
    )


async def _times_s(remote: RemotePart, nbytes: int) -> tuple[list[float], float]:
    """Seconds of runs, and the median of those by the peer's clock."""
    inputs = {"x": np.zeros(nbytes, np.uint8)}
    await remote.run(inputs)
    loop, times = asyncio.get_running_loop(), list[float]()
    while len(times) < _ECHOES and (len(times) < 2 or sum(times) < _MOST_RUN_S):
        began_s = loop.time()
        await remote.run(inputs)
        times.append(loop.time() - began_s)
    return times, statistics.median(remote.computed_s[-len(times) :])


async def measure_graph(
    file: OnnxFile,
    atoms: Atoms,
    peer: PeerInfo,
    sample: Arrays,
    *,
    known: MeasuredGraph | None,
    run_limit_s: float,
    on_progress: OnProgress,
    runs: int = 1 + _RUNS,
) -> MeasuredGraph:
    """Run the sample on the peer, timed node by node.

    known: what another peer has shown; then only times and results are new. Raises CapacityError if
    one atom alone has no room, and the errors of `RemotePart`.
    """
    kinds = dict(known.kinds if known else {name: kind_of(array) for name, array in sample.items()})
    seconds = [0.0] * len(atoms)
    node_bytes = list(known.node_bytes) if known else [0] * len(file.nodes)
    tensors: dict[str, NDArray[Any]] = dict(sample)
    sections = await run_blocking(partial(_sections, file, atoms, peer))
    for number, section in enumerate(sections):
        on_progress(Progress(phase="measure", peer=peer.name, done=number, total=len(sections)))
        part = await run_blocking(partial(cut_part, file, atoms, section, kinds))
        left = room_bytes(peer) - PROFILE_BYTES - PACKED * part.manifest.total_bytes
        buffer_bytes = max(0, min(MOST_SAMPLE_BUFFER_BYTES, left * 3 // 4))

        timing = _Timing(file, part, peer, buffer_bytes, run_limit_s, on_progress)
        if known is None:
            seen, types = await timing.run(tensors, plain=True, runs=1)
            see_kinds(file, seen, types, kinds, node_bytes, peer.name)
            kinds |= {name: kind_of(tensors[name]) for name in part.outputs}
        timed, _types = await timing.run(tensors, plain=False, runs=runs)
        _add_times(file, atoms, section, timed, seconds, peer.name)
    if known is None:
        infer_unseen(file, atoms, kinds, node_bytes)
    results = {each.name: tensors[each.name] for each in file.outputs}
    return MeasuredGraph(
        seconds=tuple(seconds), kinds=kinds, node_bytes=tuple(node_bytes), results=results
    )


@dataclass(frozen=True, slots=True)
class _Timing:
    """Runs of one section on one peer."""

    file: OnnxFile
    part: GraphPart
    peer: PeerInfo
    buffer_bytes: int
    run_limit_s: float
    on_progress: OnProgress

    async def run(
        self, tensors: dict[str, NDArray[Any]], *, plain: bool, runs: int
    ) -> tuple[list[Any], dict[str, Any]]:
        """Add the outputs to `tensors`; see `RemotePart.profile`."""
        remote = await RemotePart.open(
            self.part,
            self.peer,
            terms=PartTerms(
                model=self.file.path.name,
                buffer_bytes=self.buffer_bytes,
                held_bytes=self.buffer_bytes // 3,
                run_limit_s=self.run_limit_s,
                profile=True,
                plain=plain,
            ),
            on_progress=self.on_progress,
        )
        loop = asyncio.get_running_loop()
        try:
            began_s = loop.time()
            for number in range(runs):
                tensors.update(await remote.run(tensors))
                if number and loop.time() - began_s > _MOST_RUN_S:
                    break
            return await remote.profile()
        finally:
            await remote.aclose()


async def measure_ways(
    peers: Sequence[PeerInfo], on_progress: OnProgress
) -> list[WayToPeer | EdgeError]:
    """The way to each peer, all at once; the error of one that is gone or has no room."""

    async def one(peer: PeerInfo) -> WayToPeer | EdgeError:
        try:
            return await measure_way(peer, on_progress)
        except (DeviceGoneError, CapacityError) as error:
            return error

    return await gather_all(map(one, peers))


def _sections(file: OnnxFile, atoms: Atoms, peer: PeerInfo) -> list[range]:
    """Runs of atoms whose weights take at most two thirds of a peer's room, if the graph can be cut
    there: all that crosses travels, as far as types are known before a run."""
    most = room_bytes(peer) * 2 // 3
    needed = [PACKED * atom.weight_bytes for atom in atoms]
    if max(needed) > most:
        raise CapacityError(
            f"{peer.name} has {format_size(room_bytes(peer))} for a graph, and one node with "
            f"its weights needs {format_size(max(needed))}",
            remedy="give the peer more --memory",
        )
    if sum(needed) <= most:
        return [range(len(atoms))]
    types = file.inferred_types()
    kinds = {
        name: TensorKind(dtype=NUMPY_NAMES.get(types[name], "none"), shape=(), nbytes=0)
        if name in types
        else TensorKind(dtype="float32", shape=(), nbytes=0)
        for atom in atoms
        for name in atom.outputs
    }
    sections, start, place = [], 0, 0
    for end in (*feasible_cuts(atoms, kinds), len(atoms)):
        if sum(needed[start:end]) > most and place > start:
            sections.append(range(start, place))
            start = place
        place = end
    return [*sections, range(start, len(atoms))]


def kind_of(array: NDArray[Any]) -> TensorKind:
    """The kind of an input or output."""
    dtype = "string" if array.dtype.kind in "OUS" else array.dtype.name
    nbytes = sum(4 + len(str(each)) for each in array.flat) if dtype == "string" else array.nbytes
    return TensorKind(dtype=dtype, shape=array.shape, nbytes=nbytes)


_ITEM_BYTES = {"bool": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "string": 16}


def see_kinds(
    file: OnnxFile,
    seen: Sequence[Any],
    types: Mapping[str, Any],
    kinds: dict[str, TensorKind],
    node_bytes: list[int],
    peer: str,
) -> None:
    """Add the kinds of the tensors that each node gave on the peer of this name, and their bytes.

    seen, types: the profile of a run of the graph as it is written; see `RemotePart.profile`.
    """
    for index, _micros, told in _events(seen, peer, file):
        if index is None or index >= len(file.nodes):
            continue
        outputs = [name for name in file.nodes[index].output if name]
        found = [_told_kind(each) for each in told]
        node_bytes[index] = sum(each.nbytes for each in found if each is not None)
        if len(outputs) != len(found):
            continue  # something else than tensors is among them
        for name, kind in zip(outputs, found, strict=True):
            if kind is not None:
                told_type = types.get(name, kind.dtype)
                kinds[name] = _told_kind((told_type, kind.shape)) or kind


def infer_unseen(
    file: OnnxFile, atoms: Atoms, kinds: dict[str, TensorKind], node_bytes: list[int]
) -> None:
    """Add the kinds of tensors between atoms that a run has not shown, where they follow from
    others.

    ONNX Runtime has no kernel for some nodes, and computes others in their place: all functions of
    ONNX, and many nodes in float16.
    """
    unseen = {name for atom in atoms for name in atom.outputs if name not in kinds}
    if not unseen:
        return
    known = {
        name: (ONNX_TYPES[kind.dtype], kind.shape) for name, kind in kinds.items() if kind.travels
    }
    inferred = file.inferred_sizes(known)
    for index, node in enumerate(file.nodes):
        for name in unseen.intersection(node.output) & inferred.keys():
            number, shape = inferred[name]
            kind = _told_kind((NUMPY_NAMES.get(number), shape))
            if kind is not None:
                kinds[name] = kind
                node_bytes[index] += kind.nbytes


def _told_kind(told: Any) -> TensorKind | None:
    try:
        dtype, shape = told
        sizes = tuple(int(size) for size in shape)
        if dtype not in (*DTYPES, "bfloat16") or min(sizes, default=0) < 0:
            return None
        item = _ITEM_BYTES.get(dtype) or np.dtype(dtype).itemsize
        return TensorKind(
            dtype=dtype, shape=sizes, nbytes=min(1 << 50, item * int(np.prod(sizes, dtype=float)))
        )
    except (TypeError, ValueError, OverflowError):
        return None


def _add_times(
    file: OnnxFile,
    atoms: Atoms,
    section: range,
    timed: Sequence[Any],
    seconds: list[float],
    peer: str,
) -> None:
    """Add the median of each node's times to its atom, as a share of what whole runs take: where
    a device is held up now and then, a pause lies in few nodes of a run, but in most runs.

    ONNX Runtime joins nodes. A joined node has the name of one of them, that of a tensor, or a name
    of its own; then its time belongs to the atom of the node before.
    """
    runs: dict[str, list[float]] = defaultdict(list)
    of_name: dict[str, int] = {}
    current = section.start
    for (index, micros, _told), event in zip(_events(timed, peer, file), timed, strict=True):
        name = event[0]
        if INSIDE in name:
            continue  # the control flow node has its time
        current = atoms.of_node.get(index, current) if index is not None else current
        of_name.setdefault(name, current)
        runs[name].append(micros / 1e6)
    later = {name: each[1:] or each for name, each in runs.items()}  # the first is not typical
    medians = {name: statistics.median(each) for name, each in later.items()}
    scale = _whole_run_s(later.values()) / (sum(medians.values()) or 1.0)
    for name, median_s in medians.items():
        seconds[of_name[name]] += scale * median_s


def _whole_run_s(times: Iterable[Sequence[float]]) -> float:
    """The median of the sums of runs; of nodes that were not in every run, their medians."""
    listed = list(times)
    count = max(map(len, listed), default=0)
    always = [each for each in listed if len(each) == count]
    others = [statistics.median(each) for each in listed if len(each) < count]
    sums = [sum(each) for each in zip(*always, strict=True)]
    return sum(others) + (statistics.median(sums) if sums else 0.0)


def _events(
    events: Sequence[Any], peer: str, file: OnnxFile
) -> list[tuple[int | None, float, list[Any]]]:
    """The index of the node in the file, microseconds and kinds. Raises PeerError for other
    values."""
    makers = {name: index for index, node in enumerate(file.nodes) for name in node.output if name}
    found = []
    for event in events:
        try:
            name, micros, told = event
            match = _NODE.findall(name)
            if not 0.0 <= (taken := float(micros)) < _MOST_MICROS:
                raise ValueError(f"{taken} microseconds")
            index = int(match[-1][:9]) if match else makers.get(name.removesuffix(_IN_BLOCKS))
            found.append((index, taken, list(told)))
        except (TypeError, ValueError, OverflowError) as error:
            raise PeerError(peer, "sent times of nodes that make no sense") from error
    return found
