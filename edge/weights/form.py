"""A checkpoint's contents, for all forms on disk: folders and GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.kernels.sampling.parameters import SamplingParameters
from edge.models.spec import ModelSpec
from edge.offload import WeightStore
from edge.text import TokenizerFiles
from edge.weights.encoding import Encoding, Rounded
from edge.weights.pooling import MakersPooling
from edge.weights.tower import TowerForm


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointForm:
    """The contents of one checkpoint. Its holder closes the store.

    own_encoding: of matrices that are quantised, or become so; else None. norm_offset: added to the
    weights of norms. note: a warning for users. path: the folder or the file. described_in: source
    of the shapes, for errors. config: source of the spec, with the fields of a config.json.
    tensor_name: by role; a tied head is the embedding. end_ids: tokens that end an answer.
    sampling: the publisher's sampling parameters. unused_settings: those that Edge ignores.
    pooling: of embeddings. further_name: of the further head's weights, by role; None
    without one. open_tower: gives the tower, or None; None for text models; raises CheckpointError.
    read_tokenizer: None without one; raises CheckpointError.
    """

    path: Path
    described_in: str
    config: Mapping[str, Any]
    spec: ModelSpec
    tensor_name: Callable[[str], str]
    store: WeightStore
    end_ids: tuple[int, ...]
    sampling: SamplingParameters
    read_tokenizer: Callable[[], TokenizerFiles] | None
    own_encoding: Encoding | Rounded | None = None
    norm_offset: float = 0.0
    pooling: MakersPooling = field(default_factory=MakersPooling)
    note: str = ""
    unused_settings: tuple[str, ...] = ()
    further_name: Callable[[str], str] | None = None
    open_tower: Callable[[], TowerForm | None] | None = None


def with_tied_head(spec: ModelSpec, tensor_name: Callable[[str], str]) -> Callable[[str], str]:
    """The names of roles' tensors, in which a tied head is the embedding."""

    def name(role: str) -> str:
        is_tied = role == "head" and spec.tied_embeddings
        return tensor_name("embedding" if is_tied else role)

    return name
