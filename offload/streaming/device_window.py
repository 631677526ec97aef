"""Copies layers from host memory to a window of device memory, ahead of their use.

One thread takes extents from a WeightStreamer, in the order of use. It copies each into its place
once the computation with the place's last extent is over. The place of an extent never changes,
because recorded launches have its address.
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
    """Fills places of a device's memory. Copies are in order and overlap computation."""

    def copy(self, memory: Memory, place: int, nbytes: int, *, after: Mark) -> Mark:
        """Begin to copy once `after` is passed. Returns the mark of the copy's end."""

    def used(self) -> Mark:
        """The mark after all launches of the calling thread."""

    def wait(self, mark: Mark) -> None:
        """Wait until a mark is passed."""

    def close(self) -> None:
        """Wait for all copies that have begun."""


class MemoryCopier:
    """A copier for a device that shares the host's memory. Copies are done at once."""

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
        """Does nothing, because all copies are done."""


class DeviceWindow:
    """A window of device memory. `begin` and `end` enclose each use of an extent, in the cycle, by
    one thread."""

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
        """Begin to copy. Owns streamer and copier, and closes them.

        sizes: bytes of each extent. stays: whether the streamer keeps an extent in its memory;
        others are released there once they are copied. Raises ValueError for fewer than two places,
        or places for all extents, which would need no copies.
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
        """Marks of the end of the last use of each place."""
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
        """Bytes read from disk."""
        return self._streamer.bytes_read

    def begin(self, index: int) -> None:
        """Wait until extent `index` is in its place.

        Raises ValueError if it is not its turn, StoreError if the disk fails or the window is
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
        """Release the extent after all its launches. Its place is free once they are done."""
        mark = self._copier.used()
        with self._changed:
            self._used[index % self._places] = mark
            self._ended += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading and copying. Waits end with a StoreError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._streamer.close()
        self._thread.join()
        self._copier.close()
        self._failure = None  # its traceback would keep waiting frames alive

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
    """The number of the last earlier use of the same place; below 0 if there is none.

    Uses are counted from 0. Extent i has place i modulo `places`, in every cycle.
    """
    index = number % extents
    if index >= places:
        return number - places
    last = index + (extents - 1 - index) // places * places
    return number - index - extents + last
