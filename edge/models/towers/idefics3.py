"""Idefics 3 and SmolVLM: SigLIP, and one matrix for blocks of patches."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.spec import ModelSpec
from edge.models.towers.families import TowerFamily, pixel_terms, vision_of
from edge.models.towers.siglip import siglip, siglip_names
from edge.models.towers.tower import MAX_SIDE, Merger, Projection, Tower


def describe(config: Config, processor: Config, model: ModelSpec) -> Tower:
    facts, norm = siglip(vision_of(config), hidden=1152, layers=12, heads=16, patch=32)
    return Tower(
        output_size=model.hidden_size,
        side=config.size("scale_factor", 2, most=MAX_SIDE),
        merger=Merger(
            joining="patches",
            patch_norm=norm,
            projections=(Projection(outputs=model.hidden_size, bias=False),),
        ),
        **pixel_terms(processor),
        **facts,
    )


FAMILY = TowerFamily(
    describe=describe,
    names={**siglip_names("vision_model."), "merger.0": "connector.modality_projection.proj"},
)
