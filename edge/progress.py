"""Progress of long work as data; who shows it decides how."""

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
    """`done` of `total` units of one phase on one device: bytes (of logits in "evaluate"), weights
    while quantising, tensors in "hash", answers in "generate", tokens in "observe", matrices in
    "allot", links.

    `peer` is empty for work of the coordinator itself; in "download" it is the model's name.
    """

    phase: Phase
    peer: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """For callers that want silence."""
