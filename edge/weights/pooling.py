"""A model's own pooling of embeddings: of sentence-transformers in a folder, or of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from edge import offload
from edge.errors import CheckpointError, shown
from edge.text.files import read_json, read_text

Pooling = Literal["mean", "last"]
"""The embedding of a text from its hidden states: their mean, or the last one."""

MODULES, POOLING = "modules.json", "1_Pooling/config.json"

_KNOWN: dict[str, Pooling] = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
_MODE = "pooling_mode"
_HARMLESS = ("Transformer", "Normalize")
"""Modules to ignore: the model itself, and normalization, which embeddings always have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakersPooling:
    """The pooling of a model, if it has one."""

    kind: Pooling | None = None
    why_not: str = ""
    """The reason why its pooling is not supported."""


def read_pooling(folder: Path) -> MakersPooling:
    """Pooling by modules.json and the file that it names. Raises CheckpointError for damaged
    files."""
    place = PurePosixPath(POOLING)
    if (folder / MODULES).is_file():
        found = None
        for kind, path in _modules(folder / MODULES):
            if kind == "Pooling":
                found = path / "config.json"
            elif kind not in _HARMLESS:
                return MakersPooling(
                    why_not=f"its {MODULES} has a module {shown(kind)}, which is not computed"
                )
        if found is None:
            return MakersPooling()
        place = found
    file = folder / place
    try:
        if not file.is_file():
            return MakersPooling()
    except OSError as error:  # for example a name that is too long
        raise _damaged(
            folder / MODULES, f"the path {shown(str(place))} cannot be used ({error.strerror})"
        ) from error
    values = read_json(file)
    modes = [name.removeprefix(f"{_MODE}_") for name, value in values.items() if value is True]
    modes = [name for name in modes if f"{_MODE}_{name}" in values]
    if isinstance(said := values.get(_MODE), str):
        modes = [said]
    if len(modes) == 1 and modes[0] in _KNOWN:
        return MakersPooling(kind=_KNOWN[modes[0]])
    return MakersPooling(
        why_not=f"{place} pools by {shown(' and '.join(modes) or 'nothing')}; computed are the "
        "mean and the last token"
    )


def gguf_pooling(kind: object) -> MakersPooling:
    """Pooling by the key `pooling_type` of a GGUF file; None: the file has no such key."""
    known: dict[object, Pooling] = {1: "mean", 3: "last"}
    if kind is None or kind == 0:
        return MakersPooling()
    if type(kind) is int and kind in known:
        return MakersPooling(kind=known[kind])
    names = {2: "its first token", 4: "a rank of two texts"}
    said = names.get(kind, shown(kind)) if type(kind) is int else shown(kind)
    return MakersPooling(
        why_not=f"the file pools by {said}; computed are the mean and the last token"
    )


def _modules(file: Path) -> list[tuple[str, PurePosixPath]]:
    """(type, folder) of each module, in order. Folders are within the model's."""
    try:
        values: Any = offload.parse_json(read_text(file))
    except ValueError as error:
        raise _damaged(file, f"it is not JSON that is read here ({error})") from error
    if not isinstance(values, list):
        raise _damaged(file, "it holds no list of modules")
    found = []
    for each in values:
        kind, path = (
            (each.get(name) for name in ("type", "path")) if isinstance(each, dict) else ("", "")
        )
        if not isinstance(kind, str) or not isinstance(path, str) or not kind:
            raise _damaged(file, "a module of it has no type, or no path")
        inside = PurePosixPath(path)
        if inside.is_absolute() or ".." in inside.parts:
            raise _damaged(file, f"the path {shown(path)} leads out of the folder")
        found.append((kind.rpartition(".")[2], inside))
    return found


def _damaged(file: Path, cause: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {cause}", remedy="download it again")
