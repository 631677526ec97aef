"""The models on this disk: description, memory, and whether and how fast each would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.api.hub_download import model_path_now
from edge.errors import CheckpointError, EdgeError, printable
from edge.host import block_kernels
from edge.host.free_memory import usable_memory_bytes
from edge.host.home import expanded
from edge.offload import first_part
from edge.planning.proposal import Proposal
from edge.studies.inspection import Inspection, describe
from edge.weights.folder_form import CONFIG
from edge.weights.header import read_header
from edge.weights.model_names import cached_models


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model would run on the peers, by their remembered measurements."""

    devices: tuple[str, ...]
    """Names of the peers that would have a part of it; empty: it does not fit."""
    streamed: bool
    """Layers are read from disk for each token."""
    tokens_per_s: float | None
    """Predicted; None: not every device was measured for this model."""
    tokens_per_s_range: tuple[float, float] | None
    """The rate in slow and in fast minutes of the devices."""
    problem: str | None
    """Why it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model on this disk, complete or not."""

    name: str
    """The name that every command accepts."""
    path: Path | None
    """None: it is incomplete."""
    inspection: Inspection | None
    problem: str | None
    """Why it does not run; None: it runs."""
    fit: Fit | None = None
    """None: no peers were asked."""


def models_here(folders: Sequence[Path], *, hub_cache: Path) -> Iterator[tuple[str, Path | str]]:
    """Names and places of models: those of the Hugging Face cache, then those in the folders.

    A text in place of a path is the reason why a model is incomplete. Raises CheckpointError for a
    folder that does not exist.
    """
    yield from cached_models(hub_cache)
    for folder in folders:
        given = expanded(folder)
        if not given.exists():
            raise CheckpointError(
                f"{given} is not there", remedy="give a model, or a folder with models in it"
            )
        found = _models_in(given)
        if given.is_dir() and given not in found:
            folders_there = (each for each in sorted(given.iterdir()) if each.is_dir())
            found += [model for each in folders_there for model in _models_in(each)]
        yield from ((str(each), each) for each in found)


def inspect(path: str | Path) -> Inspection:
    """Describe a model: a folder, a GGUF file, or org/name. Reads no weights, but downloads a model
    that is not here.

    `problem` of the result says why Edge does not run a model. Raises CheckpointError if there is
    no model, RequestError for an invalid path.
    """
    found = model_path_now(path)
    try:
        header = read_header(found)
    except CheckpointError as error:
        raise CheckpointError(printable(str(error))) from error
    return describe(
        header, usable_bytes=usable_memory_bytes(), packs_blocks=block_kernels.library() is None
    )


def describe_model(
    name: str, place: Path | str, propose: Callable[[Path], Proposal] | None
) -> KnownModel:
    """Describe a model by its header. propose: plans it for the peers; None: there are none."""
    if isinstance(place, str):
        return KnownModel(name=name, path=None, inspection=None, problem=printable(place))
    try:
        found = inspect(place)
    except EdgeError as error:
        return KnownModel(name=name, path=place, inspection=None, problem=str(error))
    fit = None
    if propose is not None and found.problem is None:
        fit = _fit(place, propose)
    return KnownModel(name=name, path=place, inspection=found, problem=found.problem, fit=fit)


def _fit(place: Path, propose: Callable[[Path], Proposal]) -> Fit | None:
    try:
        proposal = propose(place)
    except EdgeError as error:  # too little memory, or no peers any more
        return Fit(
            devices=(),
            streamed=False,
            tokens_per_s=None,
            tokens_per_s_range=None,
            problem=str(error),
        )
    predicted = proposal.choice.predicted
    return Fit(
        devices=tuple(dict.fromkeys(row.name for row in proposal.rows)),
        streamed=proposal.streaming is not None,
        tokens_per_s=None if predicted is None else predicted.tokens_per_s,
        tokens_per_s_range=None if predicted is None else predicted.tokens_per_s_range,
        problem=None,
    )


def _models_in(place: Path) -> list[Path]:
    """The model at a path, or the GGUF models in a folder, by their first parts."""
    if not place.is_dir():
        return [place] if place.suffix.lower() == ".gguf" and first_part(place) == place else []
    if (place / CONFIG).is_file():
        return [place]
    return [each for file in sorted(place.glob("*.gguf")) for each in _models_in(file)]
