"""Descriptions of checkpoints, also of refused ones, without reading weights.

A checkpoint that runs is opened as usual. Of a refused one all readable parts are described, with
the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edge.errors import CheckpointError
from edge.models.families import read_family
from edge.models.gguf import claimed_config
from edge.models.spec import ModelSpec
from edge.models.unchecked_config import Claims, claims_of
from edge.offload import GgufFile, GgufStore, SafetensorsStore, StoreError, is_gguf, open_gguf
from edge.text import read_end_ids, read_tokenizer_files
from edge.text.files import TOKENIZER, read_json
from edge.text.gguf import describe_gguf_tokenizer, gguf_end_ids, gguf_templates, has_tokenizer
from edge.text.tokenizer_facts import TokenizerFacts, describe_tokenizer
from edge.weights.checkpoint import Checkpoint
from edge.weights.encoding import Encoding, Rounded
from edge.weights.folder_form import CONFIG
from edge.weights.fused_rows import FusedStore
from edge.weights.gguf.form import gguf_in, gguf_spec
from edge.weights.hub_cache import display_name
from edge.weights.packed.folder import PackedStore

Form = Literal["folder", "GGUF"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a file. type: in the file's name, such as BF16 or Q4_K."""

    type: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The description of a checkpoint by its own files."""

    path: Path
    """The folder, or the GGUF file or its first existing part."""
    name: str
    form: Form
    num_files: int
    """Files with weights; 0 if none could be read."""
    tensors: tuple[StoredTensor, ...]
    claims: Claims
    spec: ModelSpec | None
    """The model; None if it is not supported."""
    own_encoding: Encoding | Rounded | None
    """The encoding of matrices that are quantised on disk; None for floats."""
    embedding_itemsize: int | None
    """Bytes of a value of the embedding on peers; None for a refused model."""
    problem: str | None
    """Why it does not run, and the remedy; None if it runs."""
    tokenizer: TokenizerFacts | None
    tokenizer_problem: str | None
    """Why its tokenizer is not used; None if it is used, or missing."""


def read_header(path: str | Path) -> Header:
    """Header of a folder, a GGUF file, or a folder with one GGUF model.

    Raises CheckpointError, with file, cause and remedy, if there is nothing to describe;
    RequestError for an invalid path.
    """
    try:
        with Checkpoint.open(path) as checkpoint:
            return _of_checkpoint(checkpoint)
    except CheckpointError as error:
        given = Path(path).expanduser()
        found = (
            _refused_file(given.absolute(), given.name)
            if given.is_file()
            else _refused_folder(given.resolve())
        )
        if found is None:
            raise
        return found.header(str(error))


def _of_checkpoint(checkpoint: Checkpoint) -> Header:
    store = checkpoint.store
    while isinstance(store, PackedStore | FusedStore):
        store = store.stored
    if isinstance(store, GgufStore):
        parts = _of_gguf(store.files, checkpoint.name)
    else:
        assert isinstance(store, SafetensorsStore), "there are only two forms"
        parts = _of_folder(checkpoint.path, checkpoint.config, store)
    return parts.header(None, checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of a header that folders and GGUF files have."""

    path: Path
    name: str
    form: Form
    num_files: int
    tensors: tuple[StoredTensor, ...]
    config: Mapping[str, Any]
    spec: ModelSpec | None
    tokenizer: TokenizerFacts | None
    tokenizer_problem: str | None

    def header(self, problem: str | None, checkpoint: Checkpoint | None = None) -> Header:
        claims = claims_of(self.config if checkpoint is None else checkpoint.config)
        if checkpoint is not None:
            claims = replace(claims, note=checkpoint.note)
        return Header(
            path=self.path,
            name=self.name,
            form=self.form,
            num_files=self.num_files,
            tensors=self.tensors,
            claims=claims,
            spec=self.spec if checkpoint is None else checkpoint.spec,
            own_encoding=None if checkpoint is None else checkpoint.own_encoding,
            embedding_itemsize=None if checkpoint is None else checkpoint.embedding_itemsize,
            problem=problem,
            tokenizer=self.tokenizer,
            tokenizer_problem=self.tokenizer_problem,
        )


def _refused_folder(folder: Path) -> _Parts | None:
    """The parts of a refused folder; None without a description."""
    if not any(folder.glob("*.safetensors")):
        with suppress(CheckpointError):
            if (gguf := gguf_in(folder)) is not None:
                return _refused_file(gguf, folder.name)
    config: Mapping[str, Any] = {}
    with ExitStack() as stack:
        with suppress(CheckpointError):
            config = read_json(folder / CONFIG)
        store: SafetensorsStore | None = None
        with suppress(StoreError):
            store = stack.enter_context(SafetensorsStore(folder))
        return _of_folder(folder, config, store) if config or store is not None else None


def _refused_file(path: Path, name: str) -> _Parts | None:
    if not is_gguf(path):
        return None
    with ExitStack() as stack:
        try:
            files = open_gguf(path)
        except StoreError:  # other parts may be missing
            try:
                files = [GgufFile(path)]
            except StoreError:
                return None
        for file in files:
            stack.callback(file.close)
        return _of_gguf(files, name)


def _of_folder(folder: Path, config: Mapping[str, Any], store: SafetensorsStore | None) -> _Parts:
    places = [] if store is None else [store.place(name) for name in store.names()]
    spec = None
    with suppress(CheckpointError):
        _family, spec = read_family(config, source=str(folder / CONFIG))
    end_ids: tuple[int, ...] = ()
    with suppress(CheckpointError):  # this is then the reason of the refusal
        end_ids = read_end_ids(folder)
    tokenizer, problem = None, None
    try:
        if (folder / TOKENIZER).is_file():
            tokenizer = describe_tokenizer(read_tokenizer_files(folder), end_ids)
    except CheckpointError as error:
        problem = str(error)
    return _Parts(
        path=folder,
        name=display_name(folder),
        form="folder",
        num_files=0 if store is None else store.num_files,
        tensors=tuple(
            StoredTensor(type=each.dtype, shape=each.shape, nbytes=each.end - each.begin)
            for each in places
        ),
        config=config,
        spec=spec,
        tokenizer=tokenizer,
        tokenizer_problem=problem,
    )


def _of_gguf(files: Sequence[GgufFile], name: str) -> _Parts:
    first = files[0]
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    spec = None
    with suppress(CheckpointError, StoreError):
        _model, spec = gguf_spec(files)
    tokenizer, problem = _gguf_tokenizer(first)
    return _Parts(
        path=first.path,
        name=name,
        form="GGUF",
        num_files=len(files),
        tensors=tuple(
            StoredTensor(type=each.type.name, shape=each.shape, nbytes=each.end - each.begin)
            for each in tensors.values()
        ),
        config=claimed_config(first.metadata, shapes, source=str(first.path)),
        spec=spec,
        tokenizer=tokenizer,
        tokenizer_problem=problem,
    )


def _gguf_tokenizer(file: GgufFile) -> tuple[TokenizerFacts | None, str | None]:
    """The file's tokenizer, or that of tokenizer.json beside it, and the problem with it."""
    metadata, path = file.metadata, file.path
    end_ids = gguf_end_ids(metadata)
    problem: str | None = None
    if has_tokenizer(metadata):
        try:
            return describe_gguf_tokenizer(metadata, path, end_ids), None
        except CheckpointError as error:
            problem = str(error)
    if path.with_name(TOKENIZER).is_file():
        try:
            found = describe_tokenizer(read_tokenizer_files(path.parent), end_ids)
        except CheckpointError as error:
            return None, str(error)
        own = {name: text for name, (text, _origin) in gguf_templates(metadata, path).items()}
        return replace(found, chat_templates=found.chat_templates or own), None
    return None, problem
