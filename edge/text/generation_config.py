"""A checkpoint's own settings for generating: where answers end, how its publisher samples."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown

from edge.errors import CheckpointError
from edge.text.files import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The publisher's defaults. None means that nothing was said.

    eos_token_ids: every token that ends an answer; empty where none is known.
    do_sample and what follows it are kept for information: what a user asks for goes first.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(path: Path) -> GenerationDefaults:
    """Read generation_config.json of a checkpoint's folder; what it leaves open, from config.json.

    Raises CheckpointError where neither file exists, or naming the file and the field where a value
    is of another kind.
    """
    generation_file, config_file = path / "generation_config.json", path / "config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    config = read_json(config_file) if config_file.is_file() or not generation else {}
    text_config = config.get("text_config")  # where models of several modalities keep theirs
    sources: list[tuple[Mapping[str, object], Path]] = [
        (generation, generation_file),
        (config, config_file),
        (text_config if isinstance(text_config, Mapping) else {}, config_file),
    ]

    def find(name: str) -> tuple[object, Path]:
        for source, file in sources:
            if (value := source.get(name)) is not None:
                return value, file
        return None, config_file

    return GenerationDefaults(
        eos_token_ids=_ids("eos_token_id", *find("eos_token_id")),
        bos_token_id=_first(_ids("bos_token_id", *find("bos_token_id"))),
        pad_token_id=_first(_ids("pad_token_id", *find("pad_token_id"))),
        do_sample=_flag("do_sample", *find("do_sample")),
        temperature=_number("temperature", *find("temperature")),
        top_k=_first(_ids("top_k", *find("top_k"))),
        top_p=_number("top_p", *find("top_p")),
        min_p=_number("min_p", *find("min_p")),
        repetition_penalty=_number("repetition_penalty", *find("repetition_penalty")),
    )


def _ids(name: str, value: object, file: Path) -> tuple[int, ...]:
    """One whole number or a list of them; duplicates once, in the order given."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    found: dict[int, None] = {}
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or not -1 <= item < 2**31:
            raise _wrong(name, value, file, "whole numbers of at least 0")
        if item >= 0:  # some publishers write -1 for "none"
            found[item] = None
    return tuple(found)


def _first(values: tuple[int, ...]) -> int | None:
    return values[0] if values else None


def _number(name: str, value: object, file: Path) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, file, "a number")
    if not abs(value) <= sys.float_info.max:  # also NaN, and integers too large for a float
        raise _wrong(name, value, file, "a finite number")
    return float(value)


def _flag(name: str, value: object, file: Path) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, file, "true or false")
    return bool(value)


def _wrong(name: str, value: object, file: Path, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {name} must be {wanted}, not {shown(value)}; correct the file or download it "
        "again"
    )
