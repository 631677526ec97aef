"""Speed of adapter and processor: `python -m edge.backends.adapter_speed`.

`edge.backends.registry` runs it and reads its JSON. In a daemon that computes on the processor, no
driver is loaded.
"""

from __future__ import annotations

import sys
from typing import Protocol, cast

from edge.backends.interface import Backend
from edge.backends.registry import Speeds, open_backend
from edge.host.child_answers import answer_parent


class _Timed(Backend, Protocol):
    """A back end whose device may be one of several of this host."""

    def decode_seconds(self) -> float: ...


def speeds_or_why_not(threads: int) -> Speeds | str:
    try:
        adapter_s, processor_s = (
            cast("_Timed", open_backend(name, threads=threads)).decode_seconds()
            for name in ("webgpu", "ort")
        )
    except Exception as error:  # onnxruntime raises plain exceptions
        return " ".join(str(error).split())[:1000]
    return Speeds(adapter_s=adapter_s, processor_s=processor_s)


if __name__ == "__main__":
    answer_parent(lambda: speeds_or_why_not(int(sys.argv[1])))
