"""What may happen to the peers of a running model, and how it is made to happen.

Connections are hurt in relays, which all of them lead through; processes by signals.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from edge.demos.fleet import Fleet
from edge.demos.relay import Passage, Relay
from edge.membership.current import CurrentMembership
from edge.protocol.peer_info import describe_peer, kept_by

Kind = str

WEIGHTS: Mapping[Kind, float] = {
    **{"killed": 0.6, "told to leave": 0.6},
    **{"stopped 1 s": 0.5, "stopped 5 s": 0.2, "stopped 30 s": 0.03},
    **{"link reset": 1.0, "control reset": 1.0, "link garbled": 1.0, "control garbled": 1.0},
    **{"link half-open": 0.3, "control half-open": 0.2, "link swallowed": 0.3},
    **{"delay x 100": 0.3, "rate / 100": 0.3, "joined": 0.3, "killed, caches full": 0.3},
    **{"weights cut": 0.3, "weights garbled": 0.3},
}
"""How often each happens, against the others: what lasts long is rarer."""

KINDS = tuple(WEIGHTS)

ENDED = ("killed", "told to leave", "killed, caches full")
"""After which a process is gone, or going."""

_STOPPED_S: Mapping[Kind, float] = {"stopped 1 s": 1.0, "stopped 5 s": 5.0, "stopped 30 s": 30.0}
_SLOW_S = 2.0
_SLOW_DELAY_S = 10e-3
"""A hundred times that of a local network."""
_SLOW_BYTES_PER_S = 1.25e6
"""A hundredth of 1 Gbit/s."""


def applies(kind: Kind, *, plan_devices: int, spares: int, has_small_disks: bool) -> bool:
    """Whether it can happen to such a plan."""
    if kind.startswith("link"):
        return plan_devices > 1
    if kind == "joined":
        return spares > 0
    if kind == "killed, caches full":
        return has_small_disks and plan_devices + spares > 2
    return True


class Injection:
    """One fault: `prepare`, then `happen` in the midst of replies, then `mend`."""

    def __init__(
        self,
        kind: Kind,
        victim: str,
        *,
        fleet: Fleet,
        relays: Mapping[str, Relay],
        spares: Sequence[str],
        plan_devices: int,
        dice: random.Random,
    ) -> None:
        """spares: peers that have no part in the plan, in any order."""
        self.kind = kind
        self.victim = victim
        self._fleet, self._relays = fleet, relays
        self._spares = spares
        self._plan_devices = plan_devices
        self._dice = dice
        self._later: asyncio.Task[None] | None = None
        self._fillers: list[Path] = []

    async def prepare(self) -> None:
        if self.kind == "joined":
            self._fleet.kill(self._spares[0])
        elif self.kind == "killed, caches full":
            for name in self._full:
                await emptied(self._relays[name].address)

    @property
    def _full(self) -> Sequence[str]:
        """Whose caches are: one peer is left to take the whole model."""
        return self._spares[1:] if self._plan_devices == 1 else self._spares

    def happen(self) -> None:
        """From the event loop; returns at once."""
        kind, fleet, relay = self.kind, self._fleet, self._relays[self.victim]
        if kind == "killed":
            fleet.kill(self.victim)
        elif kind == "told to leave":
            fleet.leave(self.victim)
        elif kind in _STOPPED_S:
            fleet.stop(self.victim)
            self._do_later(_STOPPED_S[kind], partial(fleet.go_on, self.victim))
        elif kind == "joined":
            self._do_later(0.0, fleet.renew)
        elif kind == "killed, caches full":
            self._fillers = [filled(fleet.folder / name) for name in self._full]
            fleet.kill(self.victim)
        elif kind.startswith("weights"):
            for path in (fleet.folder / self.victim / "shards").glob("*/weights"):
                damage(path, self._dice, is_cut=kind == "weights cut")
        elif kind == "delay x 100":
            relay.slow(delay_s=_SLOW_DELAY_S)
            self._do_later(_SLOW_S, relay.slow)
        elif kind == "rate / 100":
            relay.slow(bytes_per_s=_SLOW_BYTES_PER_S)
            self._do_later(_SLOW_S, relay.slow)
        elif (passage := self._passage()) is not None:
            relay = next(each for each in self._relays.values() if passage in each.passages)
            if kind.endswith("reset"):
                relay.reset(passage)
            elif kind.endswith("garbled"):
                content = self._dice.randbytes(self._dice.randrange(1, 200))
                relay.garble(passage, content, to_target=self._dice.random() < 0.5)
            elif kind.endswith("swallowed"):
                relay.swallow(passage)
            else:
                relay.vanish(passage)

    async def mend(self) -> None:
        """Afterwards every peer is there again, and unhurt."""
        if self._later is not None:
            await self._later
        for filler in self._fillers:
            filler.unlink()
        if self.kind in ENDED:
            await asyncio.to_thread(self._fleet.processes[self.victim].wait)
        await asyncio.to_thread(self._fleet.renew)

    def _passage(self) -> Passage | None:
        """One of the victim's connections: one of ours, or, of links, any that it accepted; a plan
        may have all of its links made by the victim itself, so then any link."""
        is_link = self.kind.startswith("link")
        own = {each.laddr.port for each in psutil.Process().net_connections("tcp")}
        for name in (self.victim, *self._relays):
            found = [
                each
                for each in self._relays[name].open_passages()
                if (each.source_port not in own) == is_link
            ]
            if found:
                return self._dice.choice(found)
        return None

    def _do_later(self, wait_s: float, call: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(wait_s)
            await asyncio.to_thread(call)

        self._later = asyncio.create_task(wait())


async def emptied(address: str) -> None:
    """The peer keeps no weights."""
    credentials = await asyncio.to_thread(lambda: CurrentMembership("faults").credentials())
    peer = await describe_peer(address, credentials)
    await kept_by(peer, [each.name for each in await kept_by(peer)])


def damage(path: Path, dice: random.Random, *, is_cut: bool) -> None:
    """Half of the file is gone, or some of its bytes are others."""
    size = path.stat().st_size
    if is_cut:
        os.truncate(path, size // 2)
        return
    with path.open("r+b", buffering=0) as file:
        for _number in range(20):
            file.seek(dice.randrange(size))
            file.write(dice.randbytes(min(64, size)))


def filled(folder: Path) -> Path:
    """The file that takes all that is free there."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
    return path
