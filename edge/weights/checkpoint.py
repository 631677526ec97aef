"""A checkpoint on disk, in any of its forms: checked, described, and read by slices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edge.errors import CheckpointError, RequestError
from edge.models.families import read_family
from edge.models.further_head import FURTHER_FAMILIES, further_head
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.models.towers.tower import Tower
from edge.offload import StoreError, is_gguf, note_model
from edge.progress import OnProgress
from edge.text import Tokenizer, TokenizerFiles
from edge.text.files import read_json
from edge.weights.encoding import Encoding, Rounded
from edge.weights.folder_form import CONFIG, open_folder
from edge.weights.foreign_folders import check_folder
from edge.weights.form import CheckpointForm
from edge.weights.formats import WeightFormat
from edge.weights.gguf.form import gguf_in, open_gguf_model
from edge.weights.hub_cache import display_name, name_of_file
from edge.weights.lora import with_adapter
from edge.weights.matrix_kind import CheckpointTensors, WeightSource
from edge.weights.picture_files import PictureFiles
from edge.weights.tower import TowerForm, check_tower, matrix_roles


class Checkpoint:
    """An open checkpoint. Close it, or use it as a context manager."""

    def __init__(self, form: CheckpointForm, *, name: str) -> None:
        self.path = form.path
        self.config = form.config
        self.spec = form.spec
        self.store = form.store
        self.name = name
        self.sampling = form.sampling
        self.unused_settings = form.unused_settings
        self.pooling = form.pooling
        self.note = form.note
        self.norm_offset = form.norm_offset
        self._form = form
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def open(
        cls, path: str | Path, *, lora: str | Path | None = None, further_head: bool = False
    ) -> Checkpoint:
        """Open a folder in Hugging Face's format, a GGUF file, or a folder with one GGUF model.

        lora: the folder of an adapter that changes its weights; see `edge/weights/lora.py`.
        further_head: have its further head computed, too. Raises CheckpointError with the file, its
        fault and the remedy; RequestError for an invalid path, or a model without such a head.
        """
        try:
            given = Path(path).expanduser()
            folder = given.resolve()
            is_file = _is_gguf_file(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(
                f"{path!r} is not a path ({error})",
                remedy="give the folder of a Hugging Face checkpoint",
            ) from error
        form = open_gguf_model(given.absolute()) if is_file else _open_folder(folder)
        try:
            this = cls(form, name=name_of_file(given.name if is_file else display_name(folder)))
            this._check_tensors(form.spec, form.tensor_name)
            if lora is not None:
                this = cls(_adapted(form, lora), name=this.name)
            if further_head:
                this._add_further_head()
        except BaseException:
            form.store.close()
            raise
        return this

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer: those of the configuration, and the tokenizer's own."""
        found = {*self._form.end_ids}
        with contextlib.suppress(CheckpointError):  # a damaged tokenizer is reported at its use
            is_folder = self._form.described_in == CONFIG  # a GGUF file has all its end tokens
            end_id = self.tokenizer.end_id if is_folder and self.has_tokenizer else None
            found |= set() if end_id is None else {end_id}
        return frozenset(each for each in found if each < self.spec.vocab_size)

    @property
    def has_tokenizer(self) -> bool:
        return self._form.read_tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Tokens beyond the model's rows must not be in prompts. Raises
        CheckpointError if it is missing or damaged."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.tokenizer_files())
        return self._tokenizer

    def tokenizer_files(self) -> TokenizerFiles:
        """The files of the tokenizer. Raises CheckpointError if it is missing or damaged."""
        if self._form.read_tokenizer is None:
            raise CheckpointError(
                f"{self.path} has no tokenizer", remedy="put tokenizer.json there"
            )
        return self._form.read_tokenizer()

    @property
    def own_encoding(self) -> Encoding | Rounded | None:
        """The encoding of matrices that are quantised on disk; None for floats."""
        return self._form.own_encoding

    @property
    def embedding_itemsize(self) -> int:
        return self.store.dtype(self.tensor_name("embedding")).itemsize

    def tensor_name(self, role: str) -> str:
        """The checkpoint's name for a weight; a tied head is the embedding."""
        return self._form.tensor_name(role)

    def source(
        self, weight_format: WeightFormat, *, cache_root: Path, on_progress: OnProgress
    ) -> WeightSource:
        """The weights in a format. Slow conversions are cached."""
        tensors = self._tensors(weight_format.graded(self.spec), self.tensor_name)
        assert weight_format.open_source is not None, "made by weight_format"
        source = weight_format.open_source(tensors, cache_root=cache_root, on_progress=on_progress)
        for folder in cache_root.glob(f"{self.store.fingerprint}-*"):
            note_model(folder, self.name)
        return source

    def _add_further_head(self) -> None:
        """Raises RequestError if the checkpoint has none."""
        if self._form.further_name is None:
            families = ", ".join(FURTHER_FAMILIES)
            raise RequestError(
                f"{self.name} has no further head to guess with (speculate mtp)",
                remedy=f"some folders of {families} have one; other models guess with speculate "
                "auto or lookup",
            )
        self._check_tensors(further_head(self.spec), self._form.further_name)
        self.spec = replace(self.spec, has_further_head=True)

    def further_source(
        self, weight_format: WeightFormat, *, cache_root: Path, on_progress: OnProgress
    ) -> WeightSource:
        """The weights of the further head, in this format, if it was opened with one."""
        assert self._form.further_name is not None
        assert weight_format.open_source is not None
        tensors = self._tensors(further_head(self.spec), self._form.further_name)
        return weight_format.open_source(tensors, cache_root=cache_root, on_progress=on_progress)

    @property
    def tower(self) -> Tower | None:
        """The tower (vision encoder); None: the model reads no pictures, or has a tower that is not
        known. Reads headers only. Raises CheckpointError for an invalid one."""
        return None if self._tower is None else self._tower.tower

    @functools.cached_property
    def _tower(self) -> TowerForm | None:
        return None if self._form.open_tower is None else self._form.open_tower()

    @property
    def picture_files(self) -> PictureFiles:
        """How pictures are prepared for the tower, if there is one."""
        assert self._tower is not None
        return self._tower.files

    @property
    def tower_fingerprint(self) -> str:
        """A hash that changes with the files of the tower's weights, if there is one. They may be
        others than the model's."""
        assert self._tower is not None
        return self._tower.store.fingerprint

    def tower_source(
        self, weight_format: WeightFormat, *, cache_root: Path, on_progress: OnProgress
    ) -> WeightSource:
        """The weights of the tower, if there is one, in a format of `tower_format`. Raises
        CheckpointError for tensors that are missing or of another size."""
        form = self._tower
        assert form is not None
        assert weight_format.open_source is not None
        check_tower(form, self.path)
        tensors = CheckpointTensors(
            store=form.store, tensor_name=form.tensor_name, matrices=matrix_roles(form.tower)
        )
        return weight_format.open_source(tensors, cache_root=cache_root, on_progress=on_progress)

    def _tensors(self, spec: ModelSpec, tensor_name: Callable[[str], str]) -> CheckpointTensors:
        return CheckpointTensors(
            store=self.store,
            tensor_name=tensor_name,
            matrices={
                role: spec.layer(int(role.split(".")[1])).grade if role.startswith("layers.") else 0
                for role, shape in tensor_shapes(spec).items()
                if len(shape) == 2 and role not in TABLES
            },
            norm_offset=self._form.norm_offset,
        )

    def close(self) -> None:
        if (form := self.__dict__.get("_tower")) is not None:
            form.store.close()
        self.store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_tensors(self, spec: ModelSpec, tensor_name: Callable[[str], str]) -> None:
        present = set(self.store.names())
        for role, shape in tensor_shapes(spec).items():
            name = tensor_name(role)
            if name not in present:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is missing, so the files are not all there, or "
                    f"not of family {self.spec.family}",
                    remedy="download the model again",
                )
            found = self.store.shape(name)
            if found != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has shape {list(found)}",
                    remedy=f"{self._form.described_in} makes it {list(shape)}: they belong to "
                    "different checkpoints, download all of one again",
                )
            try:
                dtype = self.store.dtype(name)
            except StoreError as error:
                raise CheckpointError(str(error)) from error
            if dtype.name not in ("float32", "float16", "bfloat16"):
                raise CheckpointError(
                    f"{self.path}: tensor {name} is {dtype.name}",
                    remedy="float32, float16 and bfloat16 are supported",
                )


def _adapted(form: CheckpointForm, lora: str | Path) -> CheckpointForm:
    try:
        folder = Path(lora).expanduser().resolve()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"{lora!r:.200} is not a path ({error})", remedy="give a folder"
        ) from error
    try:
        return with_adapter(form, folder)
    except StoreError as error:
        raise CheckpointError(str(error)) from error


def check_place(path: Path) -> None:
    """Quick check of a folder and its config.json. Raises CheckpointError if there is no
    checkpoint, or one of an unknown form or family."""
    folder = path.resolve()
    if _is_gguf_file(path) or (_holds_no_safetensors(folder) and gguf_in(folder) is not None):
        return
    _check_is_folder(folder)
    check_folder(folder)
    read_family(read_json(folder / CONFIG), source=str(folder / CONFIG))


def _is_gguf_file(path: Path) -> bool:
    return path.is_file() and (path.suffix.lower() == ".gguf" or is_gguf(path))


def _holds_no_safetensors(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.glob("*.safetensors"))


def _check_is_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "neither a folder nor a GGUF file" if folder.exists() else "not there"
        raise CheckpointError(
            f"{folder} is {what}",
            remedy="give the folder of a Hugging Face checkpoint (config.json, *.safetensors, "
            "tokenizer.json), or a GGUF file",
        )


def _open_folder(folder: Path) -> CheckpointForm:
    _check_is_folder(folder)
    if _holds_no_safetensors(folder) and (gguf := gguf_in(folder)) is not None:
        return open_gguf_model(gguf)
    return open_folder(folder)
