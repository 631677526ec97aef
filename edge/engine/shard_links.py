"""One shard's links to its neighbours, and the messages of a step.

Hidden states pass from stage to stage; sums stay within a stage; the sampler sends the token to
all.
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
    """The links of one shard. Once connected, only the compute thread uses them, except `close`."""

    def __init__(self, assignment: Assignment, times: ShardCounters) -> None:
        self.seat: Seat = (assignment.stage, assignment.rank)
        self._sizes = tuple(len(stage.shards) for stage in assignment.plan.stages)
        self.neighbours = neighbours(self._sizes, self.seat)
        self.collective: Collective = SoloCollective()
        """The shards of this stage, for sums."""
        self.sums = OVER_LINKS
        """How they sum, for display."""
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
        """Take over the links to all neighbours. `names`: their devices' names, for messages."""
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
        """Agree with the other shards of the stage how to sum. All of them call it together."""
        if self.collective.size > 1:
            joined, self.sums = join(self.collective, own)
            if self.sums != OVER_LINKS:
                self.collective = TimedCollective(joined, self._times)

    def receive_hidden(self, into: NDArray[np.float32]) -> None:
        """Receive [batch, tokens, hidden] from a shard of the previous stage."""
        stage, rank = self.seat
        self._arriving.receive(self._links[(stage - 1, rank % self._sizes[stage - 1])], into)

    def send_hidden(self, hidden: NDArray[np.float32]) -> None:
        """Send to the shards of the next stage that receive from this one."""
        if self._successors:
            _send(self._successors, self._leaving.outgoing(hidden))

    def hear(self, tokens: NDArray[np.int64]) -> None:
        """Receive tokens from the sampler."""
        self._links[self._sampler_seat].receive(tokens)

    def tell_all(self, tokens: NDArray[np.int64]) -> None:
        """On the sampler: send to every shard of the plan."""
        _send(self._links.values(), tokens)

    def tell_stage(self, tokens: NDArray[np.int64]) -> None:
        """On the sampler: send to every shard of the last stage."""
        _send(self._of_stage, tokens)

    def error(self, error: transport.TransportError) -> EdgeError:
        """The error as one of `edge.errors`, with the name of the device at the link's other
        end."""
        if not isinstance(error, transport.PeerLostError):
            return ProtocolError(str(error))
        for seat, link in self._links.items():
            if link.peer == error.peer:
                return PeerLostError(self._names[seat], error.reason)
        return PeerLostError(error.peer, error.reason)

    def state(self, seat: Seat) -> LinkState:
        """State of the link to a neighbour; zeros before it is connected. Raises ProtocolError if
        `seat` is no neighbour. For any thread."""
        if seat not in self.neighbours:
            raise ProtocolError(f"the shard in seat {seat} is no neighbour")
        link = self._links.get(seat)
        return LinkState(sent=0, received=0, silent_s=0.0) if link is None else link.state()

    def silent(self, *, at_least_s: float) -> dict[Seat, LinkState]:
        """Links on which a receiver has waited this long. For any thread."""
        states = {seat: link.state() for seat, link in self._links.items()}
        return {seat: each for seat, each in states.items() if each.silent_s >= at_least_s}

    def close(self) -> None:
        """Close the links, which ends every wait for a neighbour. For any thread; may be called
        again."""
        self.collective.close()
        for link in self._links.values():
            link.close()


def _send(links: Iterable[Link], array: NDArray[Any]) -> None:
    for link in links:
        link.send(array)
