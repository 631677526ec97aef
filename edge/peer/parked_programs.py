"""Parked programs: loaded shards kept for a moment after their session, to be adopted by the
next."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from edge.backends.interface import StageProgram
from edge.concurrency.blocking import run_blocking
from edge.memory.ledger import Ledger, Use
from edge.models.spec import ModelSpec
from edge.protocol.assignment import Assignment
from edge.protocol.session_frames import MADE_UP_WEIGHTS
from edge.protocol.step import StepLimits
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout

PARKED_S = 10.0
"""Seconds; repairing and loading a plan takes less."""

_PREFIX = "parked "


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedKey:
    """What must be equal for adoption. The owner counts too, so that no device learns what others
    run."""

    owner: str | None
    manifest_digest: str
    model: ModelSpec
    layout: ShardLayout
    weight_format: WeightFormat
    limits: StepLimits
    kv_dtype: str

    @classmethod
    def of(cls, owner: str | None, assignment: Assignment) -> ParkedKey | None:
        """None for a shard that must not be parked."""
        if assignment.manifest_digest == MADE_UP_WEIGHTS:
            return None
        return cls(
            owner=owner,
            manifest_digest=assignment.manifest_digest,
            model=assignment.model,
            layout=assignment.layout,
            weight_format=assignment.weight_format,
            limits=assignment.limits,
            kv_dtype=assignment.kv_dtype,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Parked:
    key: ParkedKey
    program: StageProgram
    use: Use
    name: str
    """Its name in the ledger."""
    ends: asyncio.TimerHandle | None = None
    """None: it stays while the coordinator that parked it is connected."""


class ParkedPrograms:
    """The parked programs of one peer. The ledger counts them, and any other use evicts them."""

    def __init__(self, release: Callable[[str], None]) -> None:
        """release: removes a use from the ledger."""
        self._release = release
        self._parked: list[_Parked] = []
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    def park(self, key: ParkedKey, program: StageProgram, use: Use) -> str:
        """Park a program until PARKED_S after `let_go`. Returns the ledger name for `use`, which
        the caller enters."""
        name = f"{_PREFIX}{next(self._numbers)}"
        self._parked.append(_Parked(key=key, program=program, use=use, name=name))
        return name

    def let_go(self, name: str) -> None:
        """Start the PARKED_S of a program whose coordinator disconnected. Unknown names are
        ignored."""
        for each in self._parked:
            if each.name == name and each.ends is None:
                loop = asyncio.get_running_loop()
                each.ends = loop.call_later(PARKED_S, self._expire, name)

    def take(self, key: ParkedKey | None) -> StageProgram | None:
        """A parked program with this key, if any. Its memory is released in the ledger."""
        for each in self._parked:
            if each.key == key:
                self._remove(each)
                self._release(each.name)
                return each.program
        return None

    async def clear(self) -> bool:
        """Free all programs. Returns whether there were any."""
        parked = tuple(self._parked)
        for each in parked:
            self._remove(each)
        await asyncio.gather(*(self._end(each) for each in parked), *self._closing)
        return bool(parked)

    def without(self, ledger: Ledger) -> Ledger:
        """The ledger without the parked programs."""
        for each in self._parked:
            ledger = ledger.without(each.name)
        return ledger

    def _remove(self, parked: _Parked) -> None:
        if parked.ends is not None:
            parked.ends.cancel()
        self._parked.remove(parked)

    def _expire(self, name: str) -> None:
        (parked,) = (each for each in self._parked if each.name == name)
        self._remove(parked)
        task = asyncio.ensure_future(self._end(parked))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, parked: _Parked) -> None:
        try:
            await run_blocking(parked.program.close)
        finally:
            self._release(parked.name)
