"""Runs of a part of a graph over its link: what a coordinator asks, and what its peer answers.

A run is two messages each way: a head of whole numbers, and a blob of tensors
(edge/graphs/tensors.py). A peer reads no tensor itself: the process that computes the part does.
Answers come in the order of their runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edge.transport import Link, ProtocolError
from edge.transport.frame import Buffer

RUNS_AT_ONCE = 3
"""Runs of one part that a coordinator has under way: one is computed while others come and go."""

STILL_HERE = -1
"""The number of a head without a run, which keeps an idle link open."""

HELLO = "part"
"""The field of a link's hello that names the part's session."""

_ASKED, _ANSWERED = 2, 4


class PartAnswer(NamedTuple):
    """What came of one run."""

    number: int
    failed: bool
    """`content` is the cause, as text."""
    computed_s: float
    """Seconds from the begin of its computation to its end, by the peer's clock."""
    content: memoryview


def ask(link: Link, number: int, blob: Buffer) -> None:
    """Send the inputs of a run. Raises the errors of `Link.send`."""
    link.send(np.array([number, len(blob)], np.int64))
    if len(blob):
        link.send(np.frombuffer(blob, np.uint8))


def receive_asked(link: Link, most_bytes: int) -> tuple[int, int]:
    """The number of the next run, and the bytes of its inputs, which `receive_content` receives.

    Raises ProtocolError for more bytes than a part may have, and the errors of `Link.receive`.
    """
    head = np.zeros(_ASKED, np.int64)
    link.receive(head)
    number, nbytes = map(int, head)
    _check(link, nbytes, most_bytes)
    return number, nbytes


def receive_content(link: Link, nbytes: int) -> memoryview:
    """The blob behind a head. Raises the errors of `Link.receive`."""
    content = np.empty(nbytes, np.uint8)
    if nbytes:
        link.receive(content)
    return content.data


def answer(link: Link, found: PartAnswer) -> None:
    """Send what came of a run. Raises the errors of `Link.send`."""
    nanoseconds = int(found.computed_s * 1e9)
    head = [found.number, found.failed, len(found.content), nanoseconds]
    link.send(np.array(head, np.int64))
    if len(found.content):
        link.send(np.frombuffer(found.content, np.uint8))


def receive_answer(link: Link, most_bytes: int) -> PartAnswer:
    """What came of the next run. Raises as `receive_asked`."""
    head = np.zeros(_ANSWERED, np.int64)
    link.receive(head)
    number, failed, nbytes, nanoseconds = map(int, head)
    _check(link, nbytes, most_bytes if number != STILL_HERE else 0)
    if nanoseconds < 0:
        raise ProtocolError(f"{link.peer} sends {nanoseconds} nanoseconds")
    return PartAnswer(number, bool(failed), nanoseconds / 1e9, receive_content(link, nbytes))


def _check(link: Link, nbytes: int, most_bytes: int) -> None:
    if not 0 <= nbytes <= most_bytes:
        raise ProtocolError(f"{link.peer} sends {nbytes:,} bytes, and {most_bytes:,} are the most")
