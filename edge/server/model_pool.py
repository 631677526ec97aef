"""The models of a server: loads them on demand, and unloads idle ones to make room."""

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
"""Most requests that wait for a model to be loaded; further ones are refused."""

_NEWEST = ":latest"
"""The suffix that Ollama's clients add to a name without a version."""

Load = Callable[[str, bool], Awaitable[AsyncModel]]
"""Loads a model by name; with True only if all of it fits into memory. Raises CapacityError if it
does not fit beside the loaded models."""


@dataclass(slots=True, eq=False)
class ModelPlace:
    """A model of the pool, loaded or not."""

    name: str
    model: AsyncModel | None = None
    users: int = 0
    used_s: float = 0.0
    """When the last user left."""
    timer: asyncio.TimerHandle | None = None
    stays_s: float | None = None
    """Seconds that it stays loaded without users; None: until another model needs the memory."""

    @property
    def is_idle(self) -> bool:
        return self.model is not None and not self.users


def first_to_go(places: Iterable[ModelPlace], wanted: ModelPlace) -> ModelPlace | None:
    """The model to unload for another one: the least recently used one without users."""
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
        """loaded: models that are loaded already, by name. keep_alive_s: seconds that a model
        without users stays; None: until another needs its memory. aliases: further names of the
        first model."""
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
        """A pool of one model that stays loaded."""

        async def load(_name: str, _whole: bool) -> AsyncModel:
            return model

        return cls([name], load, loaded={name: model})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models, in the order in which they were given."""
        return tuple(self._places)

    @property
    def known_as(self) -> tuple[str, ...]:
        """Names of the models, and the aliases of the first."""
        return (*self._places, *self._aliases)

    @property
    def loaded(self) -> Mapping[str, AsyncModel]:
        """Loaded models by name, the most recently used first."""
        found = [each for each in self._places.values() if each.model is not None]
        found.sort(key=lambda each: (each.users > 0, each.used_s), reverse=True)
        return {each.name: each.model for each in found if each.model is not None}

    def stays_s(self, name: str) -> float | None:
        """Seconds that a loaded model stays without new users; None: no limit."""
        place = self._places[name]
        if place.stays_s is None or place.users:
            return place.stays_s
        return max(0.0, place.used_s + place.stays_s - time.monotonic())

    def find(self, asked: str) -> str:
        """The model's name for a name in a request: the name itself, its last part if that is
        unique, an alias, or `default`; each also with Ollama's `:latest`. Raises Refusal for other
        names."""
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
        """The model, loaded if need be. It stays loaded while the context is open.

        Cancelling a wait for the load ends the load. Raises Refusal if too many requests wait, and
        the errors of loading.
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
        """Keep the model for `stays_s` seconds from now, or from the end of its last use; None:
        until another needs its memory. The next use resets this to the pool's setting."""
        place = self._places[name]
        place.stays_s, place.used_s = stays_s, time.monotonic()
        if not place.users:
            self._leave(place)

    async def aclose(self) -> None:
        """Stop unloading idle models. Models are closed with their cluster."""
        for place in self._places.values():
            _stop(place)
        await asyncio.gather(*self._unloading, return_exceptions=True)

    async def _model_of(self, place: ModelPlace) -> AsyncModel:
        if place.model is not None and not self._must_load(place):
            return place.model
        if self._waiting >= self._most_waiting:
            raise Refusal(
                503,
                f"{self._waiting} requests wait for models to be loaded, which is the limit; "
                f"try {place.name!r} again soon",
            )
        self._waiting += 1
        try:
            async with self._one_at_a_time:  # in the order of arrival
                if self._must_load(place):
                    if place.model is not None:
                        await self._unload(place)
                    place.model = await self._load_making_room(place)
                assert place.model is not None
                return place.model
        finally:
            self._waiting -= 1

    def _must_load(self, place: ModelPlace) -> bool:
        """Whether the model is not loaded, or has ended and can be loaded again."""
        return place.model is None or (len(self._places) > 1 and place.model.is_over)

    async def _load_making_room(self, place: ModelPlace) -> AsyncModel:
        while True:
            self._somebody_left.clear()
            victim = first_to_go(self._places.values(), place)
            others = any(each.model is not None for each in self._places.values())
            try:
                # Unload idle models before any layer of this one is left on disk.
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
                if place.is_idle:  # it may be in use again
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
    """Cancel the timer that would unload the model."""
    if place.timer is not None:
        place.timer.cancel()
        place.timer = None
