"""Clusters of pinned peers that the planner is held to: data. All of it is real time.

A device is an `edge peer` on one core, or on a part of it where its steps are long against the
period of the quota; its network is a wire with a rate and a distance; its memory has a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge.partition import Parallel

GIB = 1 << 30
MBIT = 125_000
"""Bytes per second."""

CORES = 2
"""The table is made for machines of this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One peer."""

    name: str
    core: int
    """Which of the machine's."""
    quota: float = 1.0
    """How much of it."""
    memory_bytes: int = 4 * GIB
    """What its daemon offers."""
    bytes_per_s: float | None = None
    """Rate of its network, each way; None: as fast as the machine."""
    delay_s: float = 0.0
    """From it to the switch; two such devices are two of these apart."""

    @property
    def words(self) -> str:
        """As `a core 0 x 0.5 4 GiB 100 Mbit/s 0.5 ms`."""
        found = [self.name, f"core {self.core}"]
        if self.quota < 1:
            found.append(f"x {self.quota:g}")
        found.append(f"{self.memory_bytes / GIB:.2g} GiB")
        if self.bytes_per_s is not None:
            found.append(f"{self.bytes_per_s / MBIT:g} Mbit/s")
        if self.delay_s:
            found.append(f"{1e3 * self.delay_s:g} ms")
        return " ".join(found)

    def __post_init__(self) -> None:
        if not 0.05 <= self.quota <= 1:
            raise ValueError(f"{self.name} has {self.quota} of a core; give it 0.05 to 1")
        if self.core < 0:
            raise ValueError(f"{self.name} is on core {self.core}")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"the rate of {self.name} must be more than 0")
        if self.delay_s < 0:
            raise ValueError(f"the delay of {self.name} must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Devices, a model, and plans that are asked for."""

    name: str
    devices: tuple[Device, ...]
    shape: Literal["M", "H", "W"]
    asked: tuple[Parallel, ...] = ("auto", "tensor", "pipeline")


def _pair(bytes_per_s: float | None = None, delay_s: float = 0.0) -> tuple[Device, Device]:
    first, second = (
        Device(name=name, core=core, bytes_per_s=bytes_per_s, delay_s=delay_s)
        for core, name in enumerate("ab")
    )
    return first, second


def _halves(
    count: int, bytes_per_s: float | None = None, delay_s: float = 0.0, *, core: int | None = None
) -> tuple[Device, ...]:
    """Devices of half a core, two on each."""
    return tuple(
        Device(
            name="bcde"[number],
            core=number // 2 if core is None else core,
            quota=0.5,
            bytes_per_s=bytes_per_s,
            delay_s=delay_s,
        )
        for number in range(count)
    )


CASES = (
    Case(name="one", devices=_pair()[:1], shape="M", asked=("auto",)),
    Case(name="two", devices=_pair(), shape="H"),
    Case(name="two-gigabit", devices=_pair(1000 * MBIT), shape="M"),
    Case(name="two-100-mbit", devices=_pair(100 * MBIT), shape="M"),
    Case(name="two-far", devices=_pair(1000 * MBIT, 0.0005), shape="W"),
    Case(name="two-10-mbit", devices=_pair(10 * MBIT), shape="M"),
    Case(name="two-near", devices=_pair(1000 * MBIT, 0.00005), shape="H"),
    Case(name="two-wide-100-mbit", devices=_pair(100 * MBIT, 0.0005), shape="W"),
    Case(
        name="two-5-ms",
        devices=_pair(1000 * MBIT, 0.0025),
        shape="W",
        asked=("auto", "pipeline"),
    ),
    Case(
        name="two-20-ms",
        devices=_pair(100 * MBIT, 0.01),
        shape="M",
        asked=("auto", "pipeline"),
    ),
    Case(
        name="two-far-and-slow",
        devices=_pair(10 * MBIT, 0.01),
        shape="H",
        asked=("auto", "pipeline"),
    ),
    # With a quota only whole layers are tried: between two sums lies less than a period.
    Case(name="half", devices=_halves(1), shape="W", asked=("auto",)),
    Case(name="three-halves", devices=_halves(3), shape="W", asked=("auto", "pipeline")),
    Case(name="four-halves", devices=_halves(4), shape="W", asked=("auto", "pipeline")),
    Case(
        name="three-halves-100-mbit",
        devices=_halves(3, 100 * MBIT, 0.0005),
        shape="W",
        asked=("auto", "pipeline"),
    ),
    Case(
        name="four-halves-gigabit",
        devices=_halves(4, 1000 * MBIT, 0.0001),
        shape="W",
        asked=("auto", "pipeline"),
    ),
    Case(
        name="one-and-two-halves",
        devices=(Device(name="a", core=0), *_halves(2, core=1)),
        shape="W",
        asked=("auto", "pipeline"),
    ),
    Case(
        name="two-to-one",
        devices=(Device(name="a", core=0), Device(name="b", core=1, quota=0.5)),
        shape="W",
        asked=("pipeline",),
    ),
    Case(
        name="four-to-one",
        devices=(Device(name="a", core=0), Device(name="b", core=1, quota=0.25)),
        shape="W",
        asked=("pipeline",),
    ),
    Case(
        name="neither-has-the-memory",
        devices=tuple(
            Device(name=name, core=core, memory_bytes=5 * GIB // 8)
            for core, name in enumerate("ab")
        ),
        shape="W",
    ),
)
