"""Inputs that, when they were tried, reached a branch of Edge that none before them had.

`scripts/fuzz-guided` finds and keeps them, in `tests/corpus`. Tests try them again as they are, and
start from them when they change what is sound.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

MOST_BYTES = 1 << 14
"""Of one that is kept."""

_FOLDER = Path(__file__).parents[1] / "corpus"

Input = tuple[str, bytes]
"""What kind it is, which says who reads it; and its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whatever reads input from outside, as it is fuzzed."""

    sound: Sequence[Input]
    lasting: Callable[[str], bool]
    """Of these kinds the sound input is the same at each start; others are not kept."""
    changed: Callable[[bytes, Random], bytes]
    outcome: Callable[[str, bytes], str]
    """What became of one, in a few words. Raises what should not be raised."""


def kept(target: str, kinds: Container[str]) -> tuple[Input, ...]:
    """Those of frames, files or talks, without those of kinds that there are no more."""
    lines = lzma.decompress((_FOLDER / f"{target}.xz").read_bytes()).decode().splitlines()
    found = map(json.loads, lines)
    return tuple((kind, text.encode("latin-1")) for kind, text in found if kind in kinds)


def keep(target: str, inputs: Iterable[Input]) -> int:
    """In the place of what was kept; how many bytes that takes."""
    lines = [json.dumps((kind, content.decode("latin-1"))) for kind, content in sorted(inputs)]
    packed = lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    return (_FOLDER / f"{target}.xz").write_bytes(packed)


def joined(kind: str, content: bytes) -> bytes:
    """As one run of bytes, for a fuzzer that knows of nothing else."""
    return kind.encode() + b"\0" + content


def parted(data: bytes) -> Input:
    """What `joined` made."""
    kind, _, content = data.partition(b"\0")
    return kind.decode(), content
