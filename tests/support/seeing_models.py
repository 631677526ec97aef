"""Small random models that read pictures, and what `transformers` makes of a prompt with some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from edge.models.pictures import Tile, is_row, row_ids
from edge.models.towers.tower import Tower
from edge.runs.pictures import tower_digest
from edge.weights.checkpoint import Checkpoint
from tests.support.checkpoints import hub
from tests.support.mmproj_files import write_seeing_gguf
from tests.support.towers import GRIDS, expected_rows, make_tower_model, random_tile

hub.utils.logging.disable_progress_bar()

FAMILIES = (*GRIDS, "gemma4_large")
"""In a large Gemma 4 rows of a picture see each other in layers with a window."""


GGUF_TEXTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "query_pre_attn_scalar": 32,
    },
    "qwen2_5_vl": {"use_sliding_window": False},
    "qwen3_5": {"attention_bias": False},
}
"""Fields of text parts in which GGUF files cannot differ from the usual ones, or not by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt with pictures."""

    prompt: tuple[int, ...]
    tiles: tuple[Tile, ...]


def with_random_weights(model: Any) -> Any:
    """A model whose every weight matters."""
    torch.manual_seed(3)
    for weights in model.parameters():
        if weights.dim() == 1:
            weights.data.add_(0.2 * torch.randn_like(weights))
        else:
            weights.data.copy_(weights.shape[-1] ** -0.5 * torch.randn_like(weights))
    return model.eval()


class SeeingModel:
    """A checkpoint on disk, and the model of `transformers` in float32."""

    def __init__(
        self,
        family: str,
        path: Path,
        vision: Mapping[str, Any] = MappingProxyType({}),
        **texts: Any,
    ) -> None:
        """vision, texts: further fields of the settings of its tower and of its text part."""
        sees, self.path = family == "gemma4_large", path
        self.family = "gemma4" if sees else family
        if sees:
            texts["use_bidirectional_attention"] = "vision"
        self.model = make_tower_model(path, self.family, vision, **texts)
        self.model.generation_config.eos_token_id = None
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.tower is not None
            self.tower: Tower = checkpoint.tower
            self.spec = checkpoint.spec
            self._digest = tower_digest(checkpoint)
        self._mark = self.spec.vocab_size - 1
        """The token that stands for a row of a picture."""
        for config in (self.model.config, self.model.model.config):
            config.image_token_id = self._mark
            config.pad_token_id = config.get_text_config().pad_token_id = 0

    def as_gguf(self, folder: Path) -> Path:
        """Use the same model as a GGUF file with an mmproj file beside it, in this folder."""
        self.path = write_seeing_gguf(self.path, self.family, folder)
        with Checkpoint.open(self.path) as checkpoint:
            assert checkpoint.tower is not None
            assert checkpoint.spec.needs == self.spec.needs
            self.tower, self._digest = checkpoint.tower, tower_digest(checkpoint)
        return self.path

    def tiles(self, count: int, *, seed: int = 0) -> tuple[Tile, ...]:
        grids = [GRIDS[self.family][number % len(GRIDS[self.family])] for number in range(count)]
        return tuple(
            random_tile(*grid, self.tower.patch_size, seed=100 * seed + number)
            for number, grid in enumerate(grids)
        )

    def rows(self, tile: Tile) -> tuple[int, ...]:
        """The ids of a tile's rows."""
        return row_ids(tile, self.tower.rows(tile.height, tile.width), self._digest)

    def asked(self, count: int, *, before: int = 5, seed: int = 0) -> Asked:
        """So many pictures behind, between and before text."""
        draw = np.random.default_rng(seed)
        tiles, most = self.tiles(count, seed=seed), self._mark - 1
        prompt = draw.integers(1, most, before).tolist()
        for tile in tiles:
            prompt += [*self.rows(tile), *draw.integers(1, most, 8).tolist()]
        return Asked(prompt=tuple(prompt), tiles=tiles)

    def greedy(self, asked: Asked, new_tokens: int) -> list[int]:
        """The answer of `transformers`."""
        ids = [self._mark if is_row(each) else each for each in asked.prompt]
        types = torch.tensor([[int(each == self._mark) for each in ids]])
        grids = torch.tensor([[1, each.height, each.width] for each in asked.tiles])
        of_qwen = {"image_grid_thw": grids, "mm_token_type_ids": types}
        more: Mapping[str, Any] = {
            "gemma3": {"token_type_ids": types},
            "gemma4": {"mm_token_type_ids": types},
            "gemma4_small": {"mm_token_type_ids": types},
            "mistral3": {"image_sizes": grids[:, 1:]},
            "qwen2_5_vl": of_qwen,
            "qwen3_5": of_qwen,
            "qwen3_vl": of_qwen,
        }
        with torch.no_grad():
            out = self.model.generate(
                input_ids=torch.tensor([ids]),
                mm_encoder_outputs={"image": self._read(asked.tiles)},
                max_new_tokens=new_tokens,
                do_sample=False,
                **more.get(self.family, {}),
            )
        tokens: list[int] = out[0].tolist()[len(ids) :]
        return tokens

    def _read(self, tiles: Sequence[Tile]) -> Any:
        """What its own tower makes of each tile alone."""
        rows = [torch.from_numpy(expected_rows(self.family, self.model, tile)) for tile in tiles]
        if not self.spec.picture_layers:
            joined = torch.cat(rows) if self.family == "gemma3" else rows
            return SimpleNamespace(pooler_output=joined)
        parts = [row.split(self.spec.hidden_size, dim=-1) for row in rows]
        deep = list(zip(*(part[1:] for part in parts), strict=True))
        return SimpleNamespace(pooler_output=[part[0] for part in parts], deepstack_features=deep)
