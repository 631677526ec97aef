"""The emulated clusters that the planner is held to: data, and the rules it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
MBIT = 125_000
"""Bytes per second."""

CORES = 2
"""The table is made for machines of this many; the coordinator has what devices leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One emulated device."""

    name: str
    cores: float
    """A share of one core, or one."""
    memory_bytes: int = 4 * GIB
    """What its daemon offers."""
    bytes_per_s: float | None = None
    """Of its network, each way; None: as fast as the machine."""
    delay_s: float = 0.0
    """From it to the switch; two such devices are two of these apart."""

    @property
    def words(self) -> str:
        """As `a 0.5 core 4 GiB 100 Mbit/s 0.5 ms`."""
        found = [self.name, f"{self.cores:g} core", f"{self.memory_bytes / GIB:.2g} GiB"]
        if self.bytes_per_s is not None:
            found.append(f"{self.bytes_per_s / MBIT:g} Mbit/s")
        if self.delay_s:
            found.append(f"{1e3 * self.delay_s:g} ms")
        return " ".join(found)

    def __post_init__(self) -> None:
        if not 0.05 <= self.cores <= 1:
            raise ValueError(f"{self.name} has {self.cores} cores; give it 0.05 to 1")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"the rate of {self.name} must be more than 0")
        if self.delay_s < 0:
            raise ValueError(f"the delay of {self.name} must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked of a model."""

    prompt_tokens: int
    output_tokens: int

    @property
    def words(self) -> str:
        return f"{self.prompt_tokens} + {self.output_tokens}"


DECODE = Work(prompt_tokens=16, output_tokens=32)
PREFILL = Work(prompt_tokens=256, output_tokens=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCluster:
    """Devices, a model and work for them."""

    name: str
    devices: tuple[Device, ...]
    shape: Literal["tiny", "H", "W"]
    work: Work
    everything: bool = False
    """Whether every arrangement that fits is run, not only the chosen one and single devices."""
    shares: bool = False
    """Whether slices by speed are compared with equal slices."""


TURNS = 0.5
"""What graphs of several devices may take in all, of one core: they take turns, and who waits for
its turn is not late by it."""


def cores_of(devices: Sequence[Device], *, num_cores: int) -> list[tuple[int, ...]]:
    """The cores of each device: one of its own, or all for all where devices are more than cores.

    Raises ValueError when several want more than there is for those who take turns.
    """
    total = sum(device.cores for device in devices)
    if len(devices) > 1 and total > TURNS + 1e-9:
        raise ValueError(
            f"{len(devices)} devices with {total:g} cores take turns, which leaves them {TURNS:g}"
        )
    if len(devices) <= num_cores:
        return [(core,) for core in range(len(devices))]
    return [tuple(range(num_cores))] * len(devices)


def _device(
    index: int,
    cores: float,
    *,
    gib: float = 4,
    mbit: float | None = None,
    ms: float = 0,
) -> Device:
    """`ms` is the way from one device to another that is as far from the switch."""
    return Device(
        name="abcde"[index],
        cores=cores,
        memory_bytes=int(gib * GIB),
        bytes_per_s=None if mbit is None else mbit * MBIT,
        delay_s=ms / 2 / 1000,
    )


def _devices(*cores: float, **options: float) -> tuple[Device, ...]:
    """One for each share of a core, otherwise alike."""
    return tuple(_device(index, share, **options) for index, share in enumerate(cores))


CLUSTERS: tuple[EmulatedCluster, ...] = (
    # One device: nothing but its own speed.
    EmulatedCluster(name="solo", devices=_devices(0.8), shape="W", work=DECODE),
    EmulatedCluster(name="solo-slow", devices=_devices(0.5), shape="H", work=DECODE),
    # Two alike, over faster and slower networks.
    EmulatedCluster(
        name="twins", devices=_devices(0.25, 0.25), shape="W", work=DECODE, everything=True
    ),
    EmulatedCluster(
        name="twins-gigabit",
        devices=_devices(0.25, 0.25, mbit=1000),
        shape="W",
        work=DECODE,
        everything=True,
    ),
    EmulatedCluster(
        name="twins-100mbit-1ms",
        devices=_devices(0.25, 0.25, mbit=100, ms=1),
        shape="W",
        work=DECODE,
        everything=True,
    ),
    EmulatedCluster(
        name="twins-10mbit",
        devices=_devices(0.25, 0.25, mbit=10),
        shape="W",
        work=DECODE,
    ),
    EmulatedCluster(
        name="twins-small", devices=_devices(0.25, 0.25), shape="H", work=DECODE, everything=True
    ),
    # Two unlike.
    EmulatedCluster(
        name="two-to-one",
        devices=_devices(0.32, 0.16),
        shape="W",
        work=DECODE,
        everything=True,
        shares=True,
    ),
    EmulatedCluster(
        name="two-to-one-gigabit-1ms",
        devices=_devices(0.32, 0.16, mbit=1000, ms=1),
        shape="W",
        work=DECODE,
        everything=True,
    ),
    EmulatedCluster(
        name="four-to-one-gigabit", devices=_devices(0.4, 0.1, mbit=1000), shape="W", work=DECODE
    ),
    EmulatedCluster(
        name="wifi", devices=_devices(0.32, 0.16, mbit=30, ms=5), shape="H", work=DECODE
    ),
    EmulatedCluster(
        name="weak-helper", devices=_devices(0.42, 0.07, mbit=1000), shape="H", work=DECODE
    ),
    # Too little memory for one.
    EmulatedCluster(
        name="split-gigabit",
        devices=_devices(0.25, 0.25, mbit=1000, gib=0.5),
        shape="W",
        work=DECODE,
        everything=True,
    ),
    EmulatedCluster(
        name="split-10mbit-5ms",
        devices=_devices(0.25, 0.25, mbit=10, ms=5, gib=0.5),
        shape="W",
        work=DECODE,
        everything=True,
    ),
    EmulatedCluster(
        name="split-three",
        devices=_devices(0.2, 0.1, 0.05, mbit=1000, gib=0.4),
        shape="W",
        work=DECODE,
    ),
    EmulatedCluster(
        name="fast-but-small",
        devices=(_device(0, 0.16, gib=0.35), _device(1, 0.06), _device(2, 0.06)),
        shape="H",
        work=DECODE,
    ),
    # Three and more.
    EmulatedCluster(
        name="four-two-one", devices=_devices(0.2, 0.1, 0.05), shape="W", work=DECODE, shares=True
    ),
    EmulatedCluster(
        name="three-gigabit",
        devices=_devices(0.1, 0.1, 0.1, mbit=1000),
        shape="H",
        work=DECODE,
        everything=True,
    ),
    EmulatedCluster(
        name="one-on-wifi",
        devices=(
            _device(0, 0.1, mbit=1000),
            _device(1, 0.1, mbit=1000),
            _device(2, 0.1, mbit=30, ms=5),
        ),
        shape="W",
        work=DECODE,
    ),
    EmulatedCluster(name="four", devices=_devices(0.12, 0.12, 0.12, 0.12), shape="W", work=DECODE),
    EmulatedCluster(
        name="five-gigabit",
        devices=_devices(0.15, 0.11, 0.08, 0.08, 0.08, mbit=1000, ms=0.2),
        shape="W",
        work=DECODE,
    ),
    # Mostly prompt.
    EmulatedCluster(
        name="prompt-twins-gigabit",
        devices=_devices(0.25, 0.25, mbit=1000),
        shape="W",
        work=PREFILL,
    ),
    EmulatedCluster(
        name="prompt-two-to-one-100mbit-1ms",
        devices=_devices(0.32, 0.16, mbit=100, ms=1),
        shape="W",
        work=PREFILL,
    ),
    EmulatedCluster(name="prompt-three", devices=_devices(0.2, 0.1, 0.05), shape="H", work=PREFILL),
)
"""Twenty-four, of two to ten minutes each."""

QUICK = ("twins-small", "wifi")
"""A glance: one cluster that gains by its second device and one that must not use it."""
