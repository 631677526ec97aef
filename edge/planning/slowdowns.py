"""Which devices are busy with something else, by the time of their own part of decode steps. Pure.

A device is compared with its prediction, or with its own usual ratio to that. Only the time that it
computes counts, so a device that waits for a busy one does not look busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

SLOWED_BY = 1.5
"""Ratio of a device's time to its usual time from which it counts as slowed."""

HEALTHY_BY = 1.25
"""The ratio up to which it counts as healthy again."""

WINDOW_S, WINDOW_STEPS = 5.0, 20
"""The least seconds and steps of a window. A device is slowed after two slow windows in a row."""

HEALTHY_S, MOST_HEALTHY_S = 30.0, 600.0
"""Seconds of health after which a device counts as healthy again. Doubled with each slowdown of a
device, up to the second number, because each move to it and away from it costs a pause."""

_USUAL_WINDOWS = 8
"""The latest healthy windows, of which the median is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps:
    """A device's own part of some decode steps."""

    steps: int
    took_s: float
    expected_s: float
    """Predicted, by the rates of the device when nothing else keeps it busy."""


@dataclass(slots=True, kw_only=True)
class _Device:
    begun_s: float | None = None
    """The begin of its current window."""
    steps: int = 0
    took_s: float = 0.0
    expected_s: float = 0.0
    was_slow: bool = False
    """The window before was slow."""
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL_WINDOWS))
    """Ratios to the prediction in healthy windows."""
    factor: float = 1.0
    slowdowns: int = 0
    healthy_since_s: float | None = None

    def begin(self, at_s: float | None) -> None:
        self.begun_s, self.steps, self.took_s, self.expected_s = at_s, 0, 0.0, 0.0

    def judge(self, factor: float, since_s: float, now_s: float) -> None:
        """Judge a window in which it took `factor` times its usual time."""
        if factor >= SLOWED_BY * self.factor:
            if self.was_slow:
                self.slowdowns += self.factor == 1
                self.factor = factor
            self.was_slow = not self.was_slow
        else:
            self.was_slow = False
        if self.factor == 1:
            return
        if factor > HEALTHY_BY:
            self.healthy_since_s = None
            return
        if self.healthy_since_s is None:
            self.healthy_since_s = since_s
        needed_s = min(MOST_HEALTHY_S, HEALTHY_S * 2 ** (self.slowdowns - 1))
        if now_s - self.healthy_since_s >= needed_s:
            self.factor, self.healthy_since_s = 1.0, None


class Slowdowns:
    """The slowed devices among those of a model, whichever plan it runs by."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}

    @property
    def factors(self) -> Mapping[str, float]:
        """For each slowed device (by id), how many times its usual time it takes."""
        return {id: device.factor for id, device in self._devices.items() if device.factor > 1}

    def note(self, parts: Mapping[str, DeviceSteps], *, since_s: float, now_s: float) -> None:
        """Note the devices' parts of the steps from `since_s`, the time of the last call, to
        `now_s`."""
        for id, part in parts.items():
            device = self._devices.setdefault(id, _Device())
            if device.begun_s is None:
                device.begin(since_s)
            device.steps += part.steps
            device.took_s += part.took_s
            device.expected_s += part.expected_s
            assert device.begun_s is not None
            if now_s - device.begun_s < WINDOW_S or device.steps < WINDOW_STEPS:
                continue
            if device.expected_s > 0:
                ratio = device.took_s / device.expected_s
                factor = ratio / median(device.usual or [1.0])
                if factor <= HEALTHY_BY:
                    device.usual.append(ratio)
                device.judge(factor, device.begun_s, now_s)
            device.begin(now_s)

    def pause(self) -> None:
        """Forget windows that are not full: no answer is under way, or another plan runs."""
        for device in self._devices.values():
            device.begin(None)
            device.was_slow = False

    def looked_at(self, id: str, factor: float, *, now_s: float) -> None:
        """Note a measurement of a slowed device without a part: it took `factor` times as long as
        when it was healthy."""
        self._devices[id].judge(factor, now_s, now_s)
