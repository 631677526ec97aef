"""Chooses the layers that are read from disk for each step, spread evenly. Pure."""


def is_streamed(index: int, count: int, streamed: int) -> bool:
    """Whether an extent of `count` is one of the `streamed`, which are spread evenly.

    With even gaps a window of two keeps the disk busy: while one streamed extent and the resident
    ones after it are used, the next one is read.
    """
    return (index + 1) * streamed // count > index * streamed // count
