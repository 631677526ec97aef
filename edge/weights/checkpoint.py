"""A Hugging Face checkpoint on disk: checked, described, and read by slices."""

from __future__ import annotations

from pathlib import Path

from edge.errors import CheckpointError, RequestError
from edge.models.families import Family, read_family
from edge.models.spec import ModelSpec, tensor_shapes
from edge.progress import OnProgress
from edge.text import Tokenizer, read_end_ids
from edge.text.files import read_json
from edge.weights.formats import WeightFormat
from edge.weights.matrix_kind import CheckpointTensors, WeightSource
from offload import SafetensorsStore, StoreError, WeightStore


class Checkpoint:
    """An open checkpoint. Close it, or use it as a context manager."""

    def __init__(self, path: Path, family: Family, spec: ModelSpec, store: WeightStore) -> None:
        self.path = path
        self.spec = spec
        self.store = store
        self.name = path.name
        self._family = family
        self.end_ids = frozenset(each for each in read_end_ids(path) if each < spec.vocab_size)
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Raises CheckpointError naming the file, what is wrong with it and what to do.

        RequestError for what is no path at all.
        """
        try:
            folder = Path(path).expanduser().resolve()
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(
                f"{path!r} is not a path ({error}); give the folder of a Hugging Face checkpoint"
            ) from error
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder; give the folder of a Hugging Face checkpoint "
                "(config.json, *.safetensors, tokenizer.json)"
            )
        family, spec = read_family(
            read_json(folder / "config.json"), source=str(folder / "config.json")
        )
        try:
            store = SafetensorsStore(folder)
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        try:
            this = cls(folder, family, spec, store)
            this._check_tensors()
        except BaseException:
            store.close()
            raise
        return this

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").is_file()

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError when it is missing or makes ids the model does not know."""
        if self._tokenizer is None:
            tokenizer = Tokenizer.open(self.path)
            if tokenizer.vocab_size > self.spec.vocab_size:
                raise CheckpointError(
                    f"{self.path / 'tokenizer.json'} has {tokenizer.vocab_size} tokens but the "
                    f"model only {self.spec.vocab_size}: they belong to different checkpoints"
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    @property
    def embedding_itemsize(self) -> int:
        return self.store.dtype(self.tensor_name("embedding")).itemsize

    def tensor_name(self, role: str) -> str:
        """The checkpoint's name for a weight; a tied head is the embedding."""
        if role == "head" and self.spec.tied_embeddings:
            role = "embedding"
        return self._family.tensor_name(role)

    def source(
        self, weight_format: WeightFormat, *, cache_root: Path, on_progress: OnProgress
    ) -> WeightSource:
        """The weights in a format; what takes long of that is done once."""
        spec = weight_format.graded(self.spec)
        matrices = {
            role: spec.layer(int(role.split(".")[1])).grade if role.startswith("layers.") else 0
            for role, shape in tensor_shapes(spec).items()
            if len(shape) == 2 and role != "embedding"
        }
        tensors = CheckpointTensors(
            store=self.store, tensor_name=self.tensor_name, matrices=matrices
        )
        assert weight_format.open_source is not None, "made by weight_format"
        return weight_format.open_source(tensors, cache_root=cache_root, on_progress=on_progress)

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_tensors(self) -> None:
        present = set(self.store.names())
        for role, shape in tensor_shapes(self.spec).items():
            name = self.tensor_name(role)
            if name not in present:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is missing; the download is incomplete, or the "
                    f"files are not of family {self.spec.family}"
                )
            found = self.store.shape(name)
            if found != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has shape {list(found)}; config.json makes it "
                    f"{list(shape)}: they belong to different checkpoints, download both again"
                )
            try:
                dtype = self.store.dtype(name)
            except StoreError as error:
                raise CheckpointError(str(error)) from error
            if dtype.name not in ("float32", "float16", "bfloat16"):
                raise CheckpointError(
                    f"{self.path}: tensor {name} is {dtype.name}; float32, float16 and bfloat16 "
                    "are supported"
                )
