"""Finds the files of a model by its name: on this disk, or in a repository on Hugging Face.

Reads folders only, and nothing over the network.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.errors import CheckpointError, RequestError, printable, shown
from edge.offload import INDEX_FILE, SINGLE_FILE, StoreError, all_parts, first_part, indexed_files
from edge.weights.folder_files import ADDITIONAL_TEMPLATES, SMALL_FILES
from edge.weights.folder_form import CONFIG
from edge.weights.hub_cache import cached_repositories, folder_of, repository_of, snapshots
from edge.weights.mmproj_names import is_mmproj

_DEFAULT_CHOICE = "Q4_K_M"
"""Default choice among several GGUF models, as in other programs."""
_MOST_SHOWN = 8
_HUB = re.compile(r"(?:hf:/{1,2}|(?:https?:/{1,2})?(?:www\.)?(?:huggingface\.co|hf\.co)/)")
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w.-]+))?(?::(?P<choice>[\w./-]+))?/?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryName:
    """A model's name on Hugging Face: org/name, or org/name@revision:choice."""

    repository: str
    revision: str = "main"
    choice: str | None = None
    """The end of the GGUF file's name, such as Q4_K_M."""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repository}{revision}" + (f":{self.choice}" if self.choice else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCached:
    """A repository's model that the cache lacks, wholly or in part."""

    name: RepositoryName
    lacking: str
    """The missing files, for people."""
    near: str
    """A half-sentence with similar cached names; may be empty."""


def find_model(model: str | Path, *, hub_cache: Path) -> Path | NotCached:
    """The folder or GGUF file of a model, by its path or its name on Hugging Face.

    A path is taken before a name. org/name counts as a path if there is a folder `org` here, so a
    mistyped path is never looked up on Hugging Face. hf://org/name is always a name. A folder
    models--org--name stands for the cached part of that repository.

    Raises CheckpointError for a missing path, RequestError for an invalid one.
    """
    try:
        path = Path(model).expanduser()
        path.resolve()  # unlike `exists`, raises for invalid paths
        is_there = path.exists()
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise RequestError(
            f"{shown(model)} is not a path ({error})",
            remedy="give the folder of a Hugging Face checkpoint",
        ) from error
    if is_there:
        return _cached_or_itself(path)
    text = str(model)
    prefix = _HUB.match(text)
    found = _NAME.fullmatch(text[prefix.end() :] if prefix else text)
    if found is None:
        raise _nothing_there(path, text, hub_cache)
    name = RepositoryName(
        repository=found["repository"],
        revision=found["revision"] or "main",
        choice=found["choice"],
    )
    try:
        return _in_repository(hub_cache / folder_of(name.repository), name.revision, name.choice)
    except CheckpointError as error:
        if prefix is None and path.parent.is_dir():
            raise _nothing_there(path, text, hub_cache) from error
        near = _near(name.repository, cached_repositories(hub_cache))
        return NotCached(name=name, lacking=str(error), near=near)


def chosen_gguf(names: Collection[str], choice: str | None) -> str | None:
    """The chosen GGUF file of a repository with these files, or its first part; None: safetensors.

    Raises CheckpointError, with the choices, if none or several match.
    """
    if choice is None and {SINGLE_FILE, INDEX_FILE} & set(names):
        return None
    models = _gguf_models(names)
    if choice is None and len(models) == 1:
        return models[0]
    if not models:
        raise CheckpointError(_no_weights(names))
    meant = [each for each in models if _is_meant(each, choice or _DEFAULT_CHOICE)]
    if len(meant) == 1:
        return meant[0]
    few = _few(meant or models)
    raise CheckpointError(
        f"{len(meant) or 'none'} of its GGUF models {'are' if meant else 'is'} called "
        f"{choice or _DEFAULT_CHOICE}",
        remedy="write org/name:CHOICE with the end of one of these names, or with the whole name: "
        f"{few}",
    )


def cached_models(hub_cache: Path) -> Iterator[tuple[str, Path | str]]:
    """Each cached model by name, with its path, or the reason why it cannot be used."""
    for repository in cached_repositories(hub_cache):
        folder = hub_cache / folder_of(repository)
        snapshot = next(snapshots(folder, "main"), folder)
        names = _files_in(snapshot)
        has_safetensors = not {SINGLE_FILE, INDEX_FILE}.isdisjoint(names)
        models = _gguf_models(names)
        whole = [each for each in models if not lacking_files(snapshot, each)]
        for each in whole:
            is_only = len(models) == 1 and not has_safetensors
            yield repository if is_only else f"{repository}:{_tag(names, each)}", snapshot / each
        if has_safetensors or not whole:
            try:
                yield repository, _in_repository(folder, "main", None)
            except CheckpointError as error:
                yield repository, str(error)


def wanted_files(names: Collection[str], gguf: str | None) -> list[str]:
    """The files to read of such a repository, without the files that an index names."""
    if gguf is not None:
        try:
            parts = [each.as_posix() for each in all_parts(Path(gguf))]
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        beside = [each for each in names if Path(each).parent == Path(gguf).parent]
        return [*parts, *sorted(filter(is_mmproj, beside))[:1]]
    weights = SINGLE_FILE if SINGLE_FILE in names else INDEX_FILE
    templates = sorted(each for each in names if _is_template(each))
    return [each for each in (CONFIG, *SMALL_FILES, *templates, weights) if each in names]


def lacking_files(folder: Path, gguf: str | None) -> list[str]:
    """Missing files of a model. Raises CheckpointError for a damaged index."""
    if gguf is not None:
        needed = wanted_files((), gguf)
    elif (folder / SINGLE_FILE).is_file():
        needed = [CONFIG]
    elif (folder / INDEX_FILE).is_file():
        try:
            needed = [CONFIG, *indexed_files(folder / INDEX_FILE)]
        except StoreError as error:
            raise CheckpointError(str(error)) from error
    else:
        needed = [CONFIG, SINGLE_FILE]
    return [each for each in needed if not (folder / each).is_file()]


def _cached_or_itself(path: Path) -> Path:
    repository = repository_of(path)
    if repository is None or not (path / "snapshots").is_dir():
        return path
    try:
        return _in_repository(path, "main", None)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: {error}", remedy=f"to fetch what is missing, give {repository} instead"
        ) from error


def _in_repository(folder: Path, revision: str, choice: str | None) -> Path:
    """The model in a repository's folder. Raises CheckpointError with the missing files."""
    problem = f"nothing of it is in the cache {folder.parent}"
    for snapshot in snapshots(folder, revision):
        names = _files_in(snapshot)
        try:
            gguf = chosen_gguf(names, choice)
            missing = lacking_files(snapshot, gguf)
        except CheckpointError as error:
            problem = f"{snapshot} is incomplete: {error}"
            continue
        if not missing:
            return snapshot if gguf is None else snapshot / gguf
        problem = f"{snapshot} lacks {_few(missing)}"
    raise CheckpointError(problem)


def _files_in(snapshot: Path) -> list[str]:
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


def _gguf_models(names: Collection[str]) -> list[str]:
    """Names of GGUF models; of split ones the first part."""
    return sorted(
        {
            str(first_part(Path(each)))
            for each in names
            if each.lower().endswith(".gguf")
            and not is_mmproj(each)
            and not Path(each).name.startswith("imatrix")
        }
    )


def _tag(names: Collection[str], gguf: str) -> str:
    """The shortest choice that selects this file only."""
    stem = re.sub(r"(?:-\d{5}-of-\d{5})?\.gguf$", "", gguf, flags=re.IGNORECASE)
    ends = [stem[found.end() :] for found in re.finditer(r"[-/]|\.(?=[A-Za-z])", stem)]
    for end in reversed(ends):
        with contextlib.suppress(CheckpointError):
            if chosen_gguf(names, end) == gguf:
                return end
    return gguf


def _is_meant(name: str, choice: str) -> bool:
    """Whether a choice is the file's name, or ends it before the number of its part."""
    if name.lower() == choice.lower():
        return True
    stem = re.sub(r"(?:-\d{5}-of-\d{5})?\.gguf$", "", name.lower())
    return stem == choice.lower() or stem.endswith(tuple(f"{c}{choice.lower()}" for c in "-._/"))


def _is_template(name: str) -> bool:
    parent, _, file = name.rpartition("/")
    return parent == ADDITIONAL_TEMPLATES and file.endswith(".jinja")


def _no_weights(names: Collection[str]) -> str:
    if any(each.endswith("adapter_config.json") for each in names):
        return "it is a LoRA adapter: give the model that it was made for, and its folder by --lora"
    if pickles := sorted(each for each in names if each.endswith((".bin", ".pt", ".pth"))):
        return (
            f"its weights are a pickle ({printable(pickles[0], 200)}), which is never read, as it "
            "can run any program: name a repository with safetensors or GGUF"
        )
    return f"it has no {SINGLE_FILE}, no {INDEX_FILE} and no GGUF file: name a model's repository"


def _nothing_there(path: Path, text: str, hub_cache: Path) -> CheckpointError:
    beside: list[str] = []
    with contextlib.suppress(OSError):
        beside = [str(each) for each in path.parent.iterdir() if not each.name.startswith(".")]
    near = _near(text, [*beside, *cached_repositories(hub_cache)])
    hub = f", or hf://{text} to look there" if _NAME.fullmatch(text) else ""
    return CheckpointError(
        f"{path.absolute()} is not there{near}",
        remedy="give the folder of a Hugging Face checkpoint (config.json, *.safetensors, "
        f"tokenizer.json), a GGUF file, or the name of a model on Hugging Face as org/name{hub}",
    )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(printable(each, 200) for each in names[:_MOST_SHOWN])
    return f"{shown}, …" if len(names) > _MOST_SHOWN else shown


def _near(text: str, names: Collection[str]) -> str:
    """A half-sentence with names whose last part is similar or begins with this one; or ""."""
    by_last = {each.lower().rpartition("/")[2]: each for each in names}
    last = text.lower().rpartition("/")[2]
    longer = sorted(each for each in by_last if each.startswith(last))
    found = list(dict.fromkeys([*difflib.get_close_matches(last, by_last, 3), *longer]))[:3]
    near = ", ".join(printable(by_last[each], 200) for each in found)
    return f" (near: {near})" if near else ""
