"""Which layers stay in memory, and which are read from disk for each step: spread evenly. Pure."""


def is_streamed(index: int, count: int, streamed: int) -> bool:
    """Whether that extent of `count` is one of the `streamed`, which lie as evenly as can be.

    Between two of them then lies the computing of as few others as can be, and a window of two
    keeps the disk busy wherever any window could: while one is used, and the resident ones behind
    it, the other is read. Where that takes the disk less time, it is not what the step waits for.
    """
    return (index + 1) * streamed // count > index * streamed // count
