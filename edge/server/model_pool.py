"""The models of a server: what is loaded, who uses it, and who goes when another needs room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from edge.api.async_model import AsyncModel
from edge.errors import CapacityError, EdgeError
from edge.server.refusals import Refusal

_log = logging.getLogger(__name__)

MOST_WAITING = 32
"""Requests that wait for a model to be loaded; further ones are told to come again."""

_NEWEST = ":latest"
"""What Ollama's clients put behind a name that has no version."""

Load = Callable[[str, bool], Awaitable[AsyncModel]]
"""Loads the model of a name; with True only where all of it fits into memory. Raises CapacityError
where it does not fit next to what is loaded."""


@dataclass(slots=True, eq=False)
class ModelPlace:
    """One model's place."""

    name: str
    model: AsyncModel | None = None
    users: int = 0
    used_s: float = 0.0
    """When somebody left last."""
    timer: asyncio.TimerHandle | None = None
    stays_s: float | None = None
    """For how long once nobody uses it; None: until another needs its room."""

    @property
    def is_idle(self) -> bool:
        return self.model is not None and not self.users


def first_to_go(places: Iterable[ModelPlace], wanted: ModelPlace) -> ModelPlace | None:
    """Who makes room for another one: of those that nobody uses, who was used least lately."""
    idle = (each for each in places if each.is_idle and each is not wanted)
    return min(idle, key=lambda each: each.used_s, default=None)


class ModelPool:
    """Loads models when they are asked for, one at a time and in the order of asking.

    `default` stands for the first. Used from one event loop.
    """

    def __init__(
        self,
        names: Iterable[str],
        load: Load,
        *,
        keep_alive_s: float | None = None,
        most_waiting: int = MOST_WAITING,
        loaded: Mapping[str, AsyncModel] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """loaded: by name, what is there already. keep_alive_s: how long a model that nobody uses
        stays; None: until another needs its room. aliases: further names of the first."""
        there = loaded or {}
        self._places = {
            name: ModelPlace(name, there.get(name), stays_s=keep_alive_s) for name in names
        }
        self._aliases = tuple(aliases)
        self._load = load
        self._keep_alive_s = keep_alive_s
        self._most_waiting = most_waiting
        self._waiting = 0
        self._one_at_a_time = asyncio.Lock()
        self._somebody_left = asyncio.Event()
        self._unloading: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, model: AsyncModel, name: str) -> ModelPool:
        """A pool of one model, which stays."""

        async def load(_name: str, _whole: bool) -> AsyncModel:
            return model

        return cls([name], load, loaded={name: model})

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were given."""
        return tuple(self._places)

    @property
    def known_as(self) -> tuple[str, ...]:
        """Likewise, and what else the first is called."""
        return (*self._places, *self._aliases)

    @property
    def loaded(self) -> Mapping[str, AsyncModel]:
        """By name, who was used last comes first."""
        found = [each for each in self._places.values() if each.model is not None]
        found.sort(key=lambda each: (each.users > 0, each.used_s), reverse=True)
        return {each.name: each.model for each in found if each.model is not None}

    def stays_s(self, name: str) -> float | None:
        """How long a model that is loaded stays if nobody comes; None: for as long as may be."""
        place = self._places[name]
        if place.stays_s is None or place.users:
            return place.stays_s
        return max(0.0, place.used_s + place.stays_s - time.monotonic())

    def find(self, asked: str) -> str:
        """The name that is meant: it itself, the last part of it if that is of one only, an
        alias, or `default`; of each its newest version, as Ollama says it. Raises Refusal for
        another one."""
        for name in (asked, asked.removesuffix(_NEWEST)):
            if name in self._places:
                return name
            if name == "default" or name in self._aliases:
                return next(iter(self._places))
            ends = [each for each in self._places if each.rpartition("/")[2] == name]
            if len(ends) == 1:
                return ends[0]
        here = ", ".join(map(repr, self.known_as))
        raise Refusal(
            404,
            f"the model {asked!r:.200} is not here; this server has {here}",
            param="model",
            code="model_not_found",
        )

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[AsyncModel]:
        """The model, which stays for as long; it is loaded first if need be.

        Who is cancelled meanwhile ends the loading that it waits for, and leaves nothing behind.
        Raises Refusal where too many wait, and what loading raises.
        """
        place = self._places[name]
        place.users += 1
        place.stays_s = self._keep_alive_s
        _stop(place)
        try:
            yield await self._model_of(place)
        finally:
            place.users -= 1
            place.used_s = time.monotonic()
            if not place.users:
                self._somebody_left.set()
                self._leave(place)

    def keep(self, name: str, stays_s: float | None) -> None:
        """The model stays for so long from now on, or once nobody uses it, unless somebody comes
        first, who has it stay as usual; None: until another needs its room."""
        place = self._places[name]
        place.stays_s, place.used_s = stays_s, time.monotonic()
        if not place.users:
            self._leave(place)

    async def aclose(self) -> None:
        """Nothing is unloaded by itself any more. Models are closed with their cluster."""
        for place in self._places.values():
            _stop(place)
        await asyncio.gather(*self._unloading, return_exceptions=True)

    async def _model_of(self, place: ModelPlace) -> AsyncModel:
        if place.model is not None and not self._must_load(place):
            return place.model
        if self._waiting >= self._most_waiting:
            raise Refusal(
                503,
                f"{self._waiting} requests wait for models to be loaded, and that is the most; "
                f"try {place.name!r} again soon",
            )
        self._waiting += 1
        try:
            async with self._one_at_a_time:  # whoever came first goes on first
                if self._must_load(place):
                    if place.model is not None:
                        await self._unload(place)
                    place.model = await self._load_making_room(place)
                assert place.model is not None
                return place.model
        finally:
            self._waiting -= 1

    def _must_load(self, place: ModelPlace) -> bool:
        """Not there, or ended, where that is not the end of the server."""
        return place.model is None or (len(self._places) > 1 and place.model.is_over)

    async def _load_making_room(self, place: ModelPlace) -> AsyncModel:
        while True:
            self._somebody_left.clear()
            victim = first_to_go(self._places.values(), place)
            others = any(each.model is not None for each in self._places.values())
            try:
                # Before any of a model is left on disk, others that nobody uses go.
                return await self._load(place.name, others)
            except CapacityError as error:
                if victim is not None:
                    _log.info("%s makes room for %s", victim.name, place.name)
                    await self._unload(victim)
                elif others:
                    await self._somebody_left.wait()
                else:
                    raise CapacityError(f"the model {place.name!r}: {error}") from error

    def _leave(self, place: ModelPlace) -> None:
        _stop(place)
        if place.model is None or place.stays_s is None:
            return
        if not place.stays_s:
            self._let_go(place)
            return
        loop = asyncio.get_running_loop()
        place.timer = loop.call_later(place.stays_s, self._let_go, place)

    def _let_go(self, place: ModelPlace) -> None:
        _stop(place)

        async def unload() -> None:
            async with self._one_at_a_time:
                if place.is_idle:  # else somebody came meanwhile
                    await self._unload(place)

        task = asyncio.ensure_future(unload())
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unload(self, place: ModelPlace) -> None:
        model, place.model = place.model, None
        if model is None:
            return
        try:
            await asyncio.shield(model.aclose())
        except EdgeError as error:
            _log.info("%s was not freed everywhere: %s", place.name, error)


def _stop(place: ModelPlace) -> None:
    """Nobody waits any more for it to go."""
    if place.timer is not None:
        place.timer.cancel()
        place.timer = None
