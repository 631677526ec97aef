"""Memory as direct reads want it."""

import mmap

PAGE = 4096


def page_memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)).cast("B")
