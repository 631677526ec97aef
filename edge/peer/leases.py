"""Leases of the sessions on this peer: a later term of a run ends and refuses earlier ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edge.errors import RequestError
from edge.protocol.heartbeat import CUT_OFF_AFTER_S
from edge.protocol.lease import Lease

MOST_RUNS = 64
"""Runs of one owner whose latest terms are remembered."""
MOST_OWNERS = 256
"""Owners whose latest terms are remembered. Open sessions are never forgotten."""

Owner = str | None
"""A device's id. None for all devices of a peer without keys."""

End = Callable[[RequestError], Awaitable[None]]
"""Ends a session and tells its coordinator why; returns when its memory is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    owner: Owner
    lease: Lease
    end: End
    silent_s: Callable[[], float]


class Leases:
    """The leases of one peer. Runs of different devices are different, even with the same name."""

    def __init__(self) -> None:
        self._terms: OrderedDict[Owner, OrderedDict[str, int]] = OrderedDict()
        """The highest term seen of each run."""
        self._open: dict[str, _Open] = {}
        """Open sessions by key."""

    async def take(
        self, owner: Owner, lease: Lease, session: str, end: End, *, silent_s: Callable[[], float]
    ) -> None:
        """Begin a session. Sessions that it replaces end first, as in `take_over`: it may need
        their memory.

        silent_s: seconds since the coordinator was last heard on this session's connection. Raises
        RequestError if a later term was seen; nothing is taken on an error or a cancellation.
        """
        self.check(owner, lease)
        self._open[session] = _Open(owner=owner, lease=lease, end=end, silent_s=silent_s)
        try:
            await self._end_replaced(owner, lease, by=session)
        except BaseException:
            self.give_back(session)
            raise

    def give_back(self, session: str) -> None:
        """End a session's lease. Unknown sessions are ignored."""
        self._open.pop(session, None)

    async def take_over(self, owner: Owner, lease: Lease) -> None:
        """End the sessions of earlier terms of the run, and refuse those terms from now on.

        Sessions of the same term end if their connection is silent: the coordinator has
        reconnected. Raises RequestError if a later term was seen.
        """
        self.check(owner, lease)
        await self._end_replaced(owner, lease)

    async def _end_replaced(self, owner: Owner, lease: Lease, by: str | None = None) -> None:
        self._remember(owner, lease)
        for session, held in list(self._open.items()):
            if session == by or held.owner != owner or held.lease.run != lease.run:
                continue
            if held.lease.term < lease.term:
                self.give_back(session)
                await held.end(replaced_by(lease))
            elif held.silent_s() >= CUT_OFF_AFTER_S:
                self.give_back(session)
                await held.end(RequestError("its coordinator was cut off and has reconnected"))

    def check(self, owner: Owner, lease: Lease) -> None:
        """Raises RequestError if a later term was seen."""
        terms = [
            held.lease.term
            for held in self._open.values()
            if held.owner == owner and held.lease.run == lease.run
        ]
        if owner in self._terms:
            terms.append(self._terms[owner].get(lease.run, 0))
        if (newest := max(terms, default=0)) > lease.term:
            raise replaced_by(Lease(run=lease.run, term=newest))

    def _remember(self, owner: Owner, lease: Lease) -> None:
        runs = self._terms.setdefault(owner, OrderedDict())
        runs[lease.run] = lease.term
        runs.move_to_end(lease.run)
        self._terms.move_to_end(owner)
        if len(runs) > MOST_RUNS:
            runs.popitem(last=False)
        if len(self._terms) > MOST_OWNERS:
            self._terms.popitem(last=False)


def replaced_by(lease: Lease) -> RequestError:
    """The error for a coordinator whose run was taken over."""
    return RequestError(
        f"another coordinator has taken over this run (term {lease.term}): its answers go on "
        "there, and end here"
    )
