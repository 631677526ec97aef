"""Which layers stay in memory, and which are read from disk for each step: spread evenly. Pure."""


def is_streamed(index: int, count: int, streamed: int) -> bool:
    """Whether that extent of `count` is one of the `streamed`, which are spread evenly.

    Even gaps keep the disk busy with a window of two: while one streamed extent and the resident
    ones after it are used, the other is read.
    """
    return (index + 1) * streamed // count > index * streamed // count
