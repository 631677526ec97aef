"""The peers of one graph, as they were measured, and the facts for its plan."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from edge.errors import CapacityError, NetworkError
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_file import OnnxFile
from edge.graphs.parts import TensorKind, feasible_cuts
from edge.graphs.state import closed_places
from edge.partition import AtomFacts, GraphDevice, GraphFacts
from edge.progress import OnProgress
from edge.protocol.graph_frames import PACKED, PROCESS_BYTES
from edge.protocol.part_runs import RUNS_AT_ONCE
from edge.protocol.peer_info import PeerInfo
from edge.runs.graphs.agreement import tolerance_of
from edge.runs.graphs.graph_options import GraphOptions
from edge.runs.graphs.measuring import (
    TENSORS_AT_ONCE,
    MeasuredGraph,
    WayToPeer,
    measure_graph,
    measure_ways,
    room_bytes,
)
from edge.runs.graphs.remote_part import Arrays, DeviceGoneError

LEAST_BUFFER_BYTES = 48 << 20
"""Memory for tensors of the smallest part: ONNX Runtime takes its memory in steps."""

HELD_RUNS = RUNS_AT_ONCE + 1
"""Runs whose inputs and results a peer has room for."""
RECEIVED_COPIES, SENT_COPIES = 1, 2
"""So many times the process of a part has what comes and what goes, beside its tensors."""

HELD_BYTES = 4 << 20
"""Memory of a peer for small inputs and results that wait; more is counted from the sample."""

_log = logging.getLogger(__name__)


class MeasuredPeers:
    """The peers that a graph may use; those that are lost or refused are forgotten."""

    def __init__(
        self,
        file: OnnxFile,
        atoms: Atoms,
        peers: Sequence[PeerInfo],
        on_progress: OnProgress,
        options: GraphOptions,
    ) -> None:
        self.losses = 0
        """Peers that were lost, or had no room."""
        self._file, self._atoms = file, atoms
        self._peers = {peer.id: peer for peer in peers}
        self._on_progress = on_progress
        self._options, self._state = options, options.state
        self._ways: dict[str, WayToPeer] = {}
        self._measured: dict[str, MeasuredGraph] = {}
        """By the id of the peer; peers that are set up alike have the same."""
        self._first: MeasuredGraph | None = None
        self._trusted: PeerInfo | None = None

    @property
    def ids(self) -> Collection[str]:
        """Ids of the peers that are left."""
        return self._measured.keys()

    @property
    def trusted(self) -> PeerInfo:
        """The peer that computed the uncut graph."""
        assert self._trusted is not None, "measured"
        return self._trusted

    @property
    def results(self) -> Arrays:
        """The outputs of the uncut graph for the sample."""
        assert self._first is not None, "measured"
        return self._first.results

    @property
    def tolerance(self) -> float:
        """By how much results may differ; see `compare`."""
        return tolerance_of(self._file, self.kinds)

    @property
    def kinds(self) -> Mapping[str, TensorKind]:
        """The kinds of all tensors."""
        assert self._first is not None, "measured"
        return self._first.kinds

    async def computed(self, inputs: Arrays) -> Arrays:
        """Outputs of the uncut graph for other inputs, by the first device that is not lost
        meanwhile. Raises the errors of `measure_graph`."""
        while True:
            ids = [self.trusted.id, *self._measured]
            peer = self._peers[next(each for each in ids if each in self._measured)]
            try:
                found = await measure_graph(
                    self._file,
                    self._atoms,
                    peer,
                    inputs,
                    known=self._first,
                    run_limit_s=self._options.run_limit_s,
                    on_progress=self._on_progress,
                    runs=1,
                )
            except DeviceGoneError as error:
                self.lose(peer.id)
                if not self._measured:
                    raise NetworkError(
                        f"no device is left that could run the graph: {error}"
                    ) from error
            else:
                return found.results

    async def measure(self, sample: Arrays) -> None:
        """Measure the graph on every peer. Peers of one machine with one setup share times."""
        shared: dict[tuple[str | None, str], MeasuredGraph] = {}
        for peer in sorted(self._peers.values(), key=room_bytes, reverse=True):
            setup = peer.host, str(peer.identity)
            if setup not in shared:
                try:
                    shared[setup] = await measure_graph(
                        self._file,
                        self._atoms,
                        peer,
                        sample,
                        known=self._first,
                        run_limit_s=self._options.run_limit_s,
                        on_progress=self._on_progress,
                    )
                except DeviceGoneError:
                    self.lose(peer.id)
                    continue
                except CapacityError as error:
                    _log.warning("%s is left out: %s", peer.name, error)
                    self.lose(peer.id)
                    continue
                if self._first is None:
                    self._first, self._trusted = shared[setup], peer
            self._measured[peer.id] = shared[setup]
        if self._first is None:
            raise CapacityError("no device has room to run this graph once")
        ids = list(self._measured)
        ways = await measure_ways([self._peers[id] for id in ids], self._on_progress)
        for id, way in zip(ids, ways, strict=True):
            if isinstance(way, WayToPeer):
                self._ways[id] = way
                continue
            _log.warning("%s is left out: %s", self._peers[id].name, way)
            self.lose(id)
        if not self._measured:
            raise CapacityError("no device is left that could run this graph")

    def named(self, name: str) -> PeerInfo:
        """The peer of this name, which is left."""
        return next(peer for peer in self._peers.values() if peer.name == name)

    def lose(self, device: str) -> None:
        """Forget a peer that is gone, or has no room."""
        if self._peers.pop(device, None) is not None:
            self.losses += 1
        self._measured.pop(device, None)

    def refuse(self, device: str) -> None:
        """Use this peer no more."""
        del self._measured[device]

    def buffer_bytes(self, atoms: Collection[int]) -> int:
        """Memory for the tensors of a stage, beside those that come and go."""
        live = self._live_bytes()
        return max(live[number] for number in atoms) + sum(map(self._kept_bytes, atoms))

    def _kept_bytes(self, number: int) -> int:
        """Memory for the state that stays with an atom."""
        names = [name for name in self._atoms[number].outputs if name in self._state]
        return 2 * self._options.sequences * sum(self._bytes_of(name) for name in names)

    def _live_bytes(self) -> list[int]:
        """Memory for the tensors that are there while each atom is computed."""
        assert self._first is not None, "measured"
        results = {each.name for each in self._file.outputs}
        users, count = self._atoms.users, len(self._atoms)
        last = {name: max(each) for name, each in users.items()} | dict.fromkeys(results, count)
        made = {name for atom in self._atoms for name in atom.outputs}
        waiting = sum(self._bytes_of(name) for name in last if name not in made)
        found = []
        for number, atom in enumerate(self._atoms):
            own = sum(self._first.node_bytes[index] for index in atom.nodes)
            found.append(TENSORS_AT_ONCE * (waiting + own))
            waiting += sum(self._bytes_of(n) for n in atom.outputs if last.get(n, -1) > number)
            ended = [name for name in atom.inputs if last[name] == number]
            waiting -= sum(self._bytes_of(name) for name in ended)
        return found

    def _bytes_of(self, name: str) -> int:
        return self.kinds[name].nbytes if name in self.kinds else 0

    def facts(self) -> GraphFacts:
        """What a plan follows from, of the peers that are left."""
        kinds, live, weight_bytes = self.kinds, self._live_bytes(), self._file.weight_bytes
        users = Counter(name for atom in self._atoms for name in atom.weights)
        shared = [tuple(n for n in atom.weights if users[n] > 1) for atom in self._atoms]
        names = {name for atom in self._atoms for name in (*atom.inputs, *atom.outputs)}
        states = self._options.held.union(self._state.values())
        closed = closed_places(self._atoms, self._state)
        exits = self._options.exit_when
        apart = LEAST_BUFFER_BYTES + HELD_BYTES
        apart += PACKED * self._file.graph_bytes
        return GraphFacts(
            atoms=tuple(
                AtomFacts(
                    # State does not come and go: no cut parts its producer from its users.
                    inputs=tuple(name for name in atom.inputs if name not in states),
                    outputs=atom.outputs,
                    memory_bytes=PACKED
                    * (atom.weight_bytes - sum(map(weight_bytes, shared[number])))
                    + self._kept_bytes(number),
                    live_bytes=live[number],
                    shared=shared[number],
                )
                for number, atom in enumerate(self._atoms)
            ),
            shared_bytes={
                name: PACKED * weight_bytes(name) for name in {n for each in shared for n in each}
            },
            tensor_bytes={name: kinds[name].nbytes if name in kinds else 0 for name in names},
            results=(frozenset(each.name for each in self._file.outputs) & names)
            - self._state.keys(),
            cuts=tuple(each for each in feasible_cuts(self._atoms, kinds) if each not in closed),
            devices=tuple(
                GraphDevice(
                    name=self._peers[id].name,
                    seconds=measured.seconds,
                    memory_bytes=max(0, room_bytes(self._peers[id]) - apart),
                    part_bytes=PROCESS_BYTES + apart,
                    latency_s=self._ways[id].latency_s,
                    overhead_s=self._ways[id].overhead_s,
                    bytes_per_s=self._ways[id].bytes_per_s,
                    handling_s_per_byte=self._ways[id].handling_s_per_byte,
                )
                for id, measured in self._measured.items()
            ),
            at_once=RUNS_AT_ONCE,
            exit_at=self._atoms.exit_at,
            may_copy=not states,
            received_copies=HELD_RUNS + RECEIVED_COPIES,
            sent_copies=HELD_RUNS + SENT_COPIES,
            exit_share=0.0 if exits is None else exits.share(self.results[exits.output]),
        )
