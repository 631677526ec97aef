"""Progress of long work, as data. Callers decide how to show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "download",
    "measure",
    "quantise",
    "hash",
    "send",
    "load",
    "generate",
    "evaluate",
    "observe",
    "allot",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`done` of `total` units of one phase on one device.

    The unit is bytes (of logits in "evaluate"), with these exceptions: weights in "quantise",
    tensors in "hash", answers in "generate", tokens in "observe", matrices in "allot", and in
    "measure" 1 for a device, or the links where `peer` is empty.

    `peer` is empty for work of the coordinator itself; in "download" it is the model's name.
    """

    phase: Phase
    peer: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """Ignores progress."""
