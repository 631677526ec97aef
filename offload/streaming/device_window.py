"""Layers copied from host memory to a window of device memory, ahead of their use.

One thread takes extents from a WeightStreamer, in the order of use. It copies each into its place
once the computation is done with the extent before. The place of an extent never changes, because
recorded launches know its address.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from edge.offload.errors import StoreError
from edge.offload.streaming.checked_extents import Memory, closed_error
from edge.offload.streaming.weight_streamer import WeightStreamer

Mark = object
"""A point in the device's stream of work; None: already passed."""


class Copier(Protocol):
    """Fills places of a device's memory. Copies happen in order, while others compute."""

    def copy(self, memory: Memory, place: int, nbytes: int, *, after: Mark) -> Mark:
        """Begin to copy, once `after` is passed; the mark is its end."""

    def used(self) -> Mark:
        """The mark after all launches of the calling thread."""

    def wait(self, mark: Mark) -> None:
        """Wait until it is passed."""

    def close(self) -> None:
        """Waits for the copies that were begun."""


class MemoryCopier:
    """The same where host and device are one: a copy is done when it was begun."""

    def __init__(self, places: Sequence[memoryview]) -> None:
        self._places = places

    def copy(self, memory: Memory, place: int, nbytes: int, *, after: Mark) -> Mark:
        assert after is None
        self._places[place][:nbytes] = memory[0][:nbytes]
        return None

    def used(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        assert mark is None

    def close(self) -> None:
        """Nothing is under way."""


class DeviceWindow:
    """`begin` and `end` enclose each use of an extent, in their cycle, by one thread."""

    def __init__(
        self,
        streamer: WeightStreamer,
        memories: Sequence[Memory],
        sizes: Sequence[int],
        copier: Copier,
        *,
        places: int,
        stays: Callable[[int], bool],
    ) -> None:
        """Begins to copy. Takes streamer and copier over: `close` ends them.

        sizes: bytes of each extent. stays: whether the streamer keeps an extent in its memory; the
        others are let go there as soon as they are copied. ValueError where places are fewer than
        two, or enough for all extents: those would not need to be copied again.
        """
        if not 2 <= places < len(sizes):
            raise ValueError(f"{len(sizes)} extents do not stream through {places} places")
        self._streamer = streamer
        self._memories = memories
        self._sizes = sizes
        self._copier = copier
        self._places = places
        self._stays = stays
        self._changed = threading.Condition()
        self._copied: dict[int, Mark] = {}
        """Marks of copies that are not used yet, by the number of their use."""
        self._used: dict[int, Mark] = {}
        """When the last use of each place is over."""
        self._begun = 0
        self._ended = 0
        self._failure: StoreError | None = None
        self._is_closed = False
        self.wait_s = 0.0
        """Seconds that uses waited for copies."""
        self._thread = threading.Thread(target=self._run, name="edge-copy", daemon=True)
        self._thread.start()

    @property
    def bytes_read(self) -> int:
        """From disk."""
        return self._streamer.bytes_read

    def begin(self, index: int) -> None:
        """Extent `index` is in its place when this returns.

        Raises ValueError when it is not its turn; StoreError when the disk fails, or the window was
        closed.
        """
        number = self._begun
        if index != number % len(self._sizes) or self._begun != self._ended:
            raise ValueError(f"extent {index} is used out of turn")
        start_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._copied or self._failure or self._is_closed
            )
            if number not in self._copied:
                raise self._failure or closed_error()
            mark = self._copied.pop(number)
        self._copier.wait(mark)
        self.wait_s += time.perf_counter() - start_s
        self._begun += 1

    def end(self, index: int) -> None:
        """All that uses the extent is launched: its place is free when that is done."""
        mark = self._copier.used()
        with self._changed:
            self._used[index % self._places] = mark
            self._ended += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading and copying before this returns; waits end with a StoreError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._streamer.close()
        self._thread.join()
        self._copier.close()
        self._failure = None  # its traceback would keep the waiting frames alive

    def _run(self) -> None:
        try:
            for number in count():
                self._bring(number)
        except Exception as error:
            with self._changed:
                if not isinstance(error, StoreError):
                    error = StoreError(f"the weights cannot be copied: {error}")
                self._failure = error
                self._changed.notify_all()

    def _bring(self, number: int) -> None:
        index = number % len(self._sizes)
        place = index % self._places
        with self._streamer.extent(index):
            before = previous_use(number, extents=len(self._sizes), places=self._places)
            with self._changed:
                self._changed.wait_for(lambda: self._ended > before or self._is_closed)
                if self._is_closed:
                    raise closed_error()
                after = self._used.pop(place, None)
            mark = self._copier.copy(self._memories[index], place, self._sizes[index], after=after)
            with self._changed:
                self._copied[number] = mark
                self._changed.notify_all()
            if not self._stays(index):
                self._copier.wait(mark)  # the next one is read into the same memory


def previous_use(number: int, *, extents: int, places: int) -> int:
    """The last use before this one, counted from 0, of the same place; below 0 if there is none.

    Extent i has place i modulo `places`, in every cycle.
    """
    index = number % extents
    if index >= places:
        return number - places
    last = index + (extents - 1 - index) // places * places
    return number - index - extents + last
