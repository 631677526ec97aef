"""The models on this disk: what each is, what it takes, and whether and how fast it would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.api.hub_download import model_path_now
from edge.errors import CheckpointError, EdgeError, printable
from edge.host.free_memory import usable_memory_bytes
from edge.offload import first_part
from edge.planning.proposal import Proposal
from edge.studies.inspection import Inspection, describe
from edge.weights.folder_form import CONFIG
from edge.weights.header import read_header
from edge.weights.model_names import cached_models


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model would run on the peers, by what is remembered of them."""

    devices: tuple[str, ...]
    """Names of those that would have a part of it; empty where it does not fit."""
    streamed: bool
    """Layers are read from disk for each token."""
    tokens_per_s: float | None
    """Predicted; None where not every device was measured for this model."""
    tokens_per_s_range: tuple[float, float] | None
    """What slow and fast minutes would make it."""
    problem: str | None
    """Why it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that is here, whole or not."""

    name: str
    """As every command takes it."""
    path: Path | None
    """None where it is not whole."""
    inspection: Inspection | None
    problem: str | None
    """Why it does not run; None where it does."""
    fit: Fit | None = None
    """None where no peers were asked."""


def models_here(folders: Sequence[Path], *, hub_cache: Path) -> Iterator[tuple[str, Path | str]]:
    """Names and places: those of the Hugging Face cache, then what is in these folders or is one.

    A text instead of a place is the reason why it is not whole. Raises CheckpointError for a folder
    that is not there.
    """
    yield from cached_models(hub_cache)
    for folder in folders:
        given = folder.expanduser()
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
    """What a model is: a folder, a GGUF file, or org/name. Reads no weights, but fetches what is
    not there.

    One that Edge does not run is described, too; its `problem` says why. Raises CheckpointError
    where there is nothing to describe, RequestError for what is no path.
    """
    found = model_path_now(path)
    try:
        header = read_header(found)
    except CheckpointError as error:
        raise CheckpointError(printable(str(error))) from error
    return describe(header, usable_bytes=usable_memory_bytes())


def describe_model(
    name: str, place: Path | str, propose: Callable[[Path], Proposal] | None
) -> KnownModel:
    """Reads its header. `propose`: plans for the peers; None where there are none."""
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
    except EdgeError as error:  # a lack of memory, or of peers by now
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
    """A file or folder that is one, or the GGUF models in a folder, by their first parts."""
    if not place.is_dir():
        return [place] if place.suffix.lower() == ".gguf" and first_part(place) == place else []
    if (place / CONFIG).is_file():
        return [place]
    return [each for file in sorted(place.glob("*.gguf")) for each in _models_in(file)]
