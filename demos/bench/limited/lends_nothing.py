"""`edge`, whose peers leave idle what memory a step leaves unused: what lending is compared with.

python -m edge.demos.bench.limited.lends_nothing peer
"""

from __future__ import annotations

import runpy

from edge.memory.lending import Lending


def lend_nothing() -> None:
    """In this process, from now on."""

    def unused_bytes(*_: object) -> int:
        return 0

    setattr(Lending, "unused_bytes", unused_bytes)  # noqa: B010 - a method is replaced


if __name__ == "__main__":
    lend_nothing()
    runpy.run_module("edge", run_name="__main__", alter_sys=True)
