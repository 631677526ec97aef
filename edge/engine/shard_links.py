"""One shard's links to its neighbours, and what goes over them in a step.

Hidden states come from the stage before and leave for the stage after; sums are taken within the
stage; the sampler tells all shards the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge import transport
from edge.backends.device_sums import OVER_LINKS, DeviceSums, join
from edge.engine.timing import ShardCounters, TimedCollective
from edge.errors import EdgeError, PeerLostError, ProtocolError
from edge.protocol.assignment import Assignment
from edge.protocol.topology import Seat, neighbours, sampler_seat
from edge.transport import Collective, EncodedHop, Link, LinkState, SoloCollective, open_mesh


class ShardLinks:
    """Used by the compute thread once it is connected, but for `close`."""

    def __init__(self, assignment: Assignment, times: ShardCounters) -> None:
        self.seat: Seat = (assignment.stage, assignment.rank)
        self._sizes = tuple(len(stage.shards) for stage in assignment.plan.stages)
        self.neighbours = neighbours(self._sizes, self.seat)
        self.collective: Collective = SoloCollective()
        """The stage's shards, to sum with."""
        self.sums = OVER_LINKS
        """How they sum, for people."""
        self._sampler_seat = sampler_seat(self._sizes)
        self._rules = assignment.wire_rules
        self._times = times
        self._links: dict[Seat, Link] = {}
        self._names: dict[Seat, str] = {}
        self._of_stage: list[Link] = []
        self._successors: list[Link] = []
        self._arriving = EncodedHop(self._rules.before(assignment.stage))
        self._leaving = EncodedHop(self._rules.after(assignment.stage))

    @property
    def is_sampler(self) -> bool:
        return self.seat == self._sampler_seat

    def connect(self, links: Mapping[Seat, Link], names: Mapping[Seat, str]) -> None:
        """Take over the links to all neighbours; `names` are their devices', for messages."""
        assert set(links) == self.neighbours
        self._names, self._links = dict(names), dict(links)
        stage, rank = self.seat
        size = self._sizes[stage]
        self._successors = [
            links[seat] for seat in sorted(links) if seat[0] == stage + 1 and seat[1] % size == rank
        ]
        mesh = {r: link for (s, r), link in links.items() if s == stage}
        self._of_stage = list(mesh.values())
        if mesh:
            opened = open_mesh(rank, mesh, self._rules.sums[stage])
            self.collective = TimedCollective(opened, self._times)

    def sum_on_devices(self, own: DeviceSums | None) -> None:
        """Agree with the others of the stage how to sum; all of them do it together."""
        if self.collective.size > 1:
            joined, self.sums = join(self.collective, own)
            if self.sums != OVER_LINKS:
                self.collective = TimedCollective(joined, self._times)

    def receive_hidden(self, into: NDArray[np.float32]) -> None:
        """[batch, tokens, hidden] of the stage before, from one of its shards."""
        stage, rank = self.seat
        self._arriving.receive(self._links[(stage - 1, rank % self._sizes[stage - 1])], into)

    def send_hidden(self, hidden: NDArray[np.float32]) -> None:
        """To those shards of the stage after that have it from this one."""
        if self._successors:
            _send(self._successors, self._leaving.outgoing(hidden))

    def hear(self, tokens: NDArray[np.int64]) -> None:
        """What the sampler tells."""
        self._links[self._sampler_seat].receive(tokens)

    def tell_all(self, tokens: NDArray[np.int64]) -> None:
        """For the sampler: tell every shard of the plan."""
        _send(self._links.values(), tokens)

    def tell_stage(self, tokens: NDArray[np.int64]) -> None:
        """For the sampler: tell every shard of the last stage."""
        _send(self._of_stage, tokens)

    def error(self, error: transport.TransportError) -> EdgeError:
        """As an error of ours, by the name of the device at the link's other end."""
        if not isinstance(error, transport.PeerLostError):
            return ProtocolError(str(error))
        for seat, link in self._links.items():
            if link.peer == error.peer:
                return PeerLostError(self._names[seat], error.reason)
        return PeerLostError(error.peer, error.reason)

    def state(self, seat: Seat) -> LinkState:
        """State of the link to a neighbour; before it is there, nothing has moved. From any thread.
        Raises ProtocolError for a seat that is not linked to this one."""
        if seat not in self.neighbours:
            raise ProtocolError("a link to a shard that is no neighbour")
        link = self._links.get(seat)
        return LinkState(sent=0, received=0, silent_s=0.0) if link is None else link.state()

    def silent(self, *, at_least_s: float) -> dict[Seat, LinkState]:
        """Links at which somebody has waited in vain for so long; from any thread."""
        states = {seat: link.state() for seat, link in self._links.items()}
        return {seat: each for seat, each in states.items() if each.silent_s >= at_least_s}

    def close(self) -> None:
        """Whoever waits for a neighbour hears that it is over. From any thread, more than once."""
        self.collective.close()
        for link in self._links.values():
            link.close()


def _send(links: Iterable[Link], array: NDArray[Any]) -> None:
    for link in links:
        link.send(array)
