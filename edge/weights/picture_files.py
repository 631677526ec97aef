"""The settings of a checkpoint that say how its pictures are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.models.config import Config
from edge.text.files import read_json

_CONFIG = "config.json"
_PICTURE = "preprocessor_config.json"
_PROCESSOR = "processor_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFiles:
    """The values of a checkpoint's files. Those of absent files are empty."""

    config: Config
    picture: Config
    """The settings of the picture processor."""
    processor: Config
    """Those of the processor that puts pictures and texts together."""

    @property
    def model_type(self) -> str:
        return str(self.config.values.get("model_type"))

    @property
    def vision(self) -> Config:
        return Config(
            self.config.mapping("vision_config"), source=f"{self.config.source}: vision_config"
        )


def picture_files(folder: Path, config: Mapping[str, Any] | None = None) -> PictureFiles:
    """Read the files in the folder of a checkpoint. config: its config.json, where it was read.

    Raises CheckpointError for damaged files.
    """

    def read(name: str) -> Mapping[str, Any]:
        file = folder / name
        return read_json(file) if file.is_file() else {}

    processor = Config(read(_PROCESSOR), source=str(folder / _PROCESSOR))
    # Newer checkpoints have one file for both, and that one counts where there are two.
    inner = processor.mapping("image_processor")
    picture = Config(
        inner or read(_PICTURE), source=str(folder / (_PROCESSOR if inner else _PICTURE))
    )
    whole = Config(read(_CONFIG) if config is None else config, source=str(folder / _CONFIG))
    return PictureFiles(config=whole, picture=picture, processor=processor)
