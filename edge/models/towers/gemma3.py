"""Gemma 3: SigLIP, whose patches are averaged to a fixed number of rows."""

from __future__ import annotations

import math

from edge.models.config import Config
from edge.models.gemma import NORM_OFFSET
from edge.models.spec import ModelSpec
from edge.models.towers.families import TowerFamily, pixel_terms, vision_of
from edge.models.towers.siglip import siglip, siglip_names
from edge.models.towers.tower import Merger, Projection, Tower, TowerNorm


def describe(config: Config, processor: Config, model: ModelSpec) -> Tower:
    facts, norm = siglip(vision_of(config), hidden=768, layers=12, heads=12, patch=16)
    patches = facts["table_side"]
    rows = math.isqrt(config.size("mm_tokens_per_image", 256))
    if not rows or patches % rows:
        raise config.error(f"mm_tokens_per_image: {rows} rows of a side of {patches} patches")
    return Tower(
        output_size=model.hidden_size,
        side=patches // rows,
        merger=Merger(
            joining="mean",
            patch_norm=norm,
            row_norm=TowerNorm(kind="rms", epsilon=norm.epsilon, offset=NORM_OFFSET),
            projections=(Projection(outputs=model.hidden_size, bias=False, is_turned=True),),
        ),
        grid=(patches, patches),
        **pixel_terms(processor),
        **facts,
    )


FAMILY = TowerFamily(
    describe=describe,
    names={
        **siglip_names("vision_tower.vision_model."),
        "merger.row_norm": "multi_modal_projector.mm_soft_emb_norm.weight",
        "merger.0.weight": "multi_modal_projector.mm_input_projection_weight",
    },
)
