"""Small models that read pictures: their tokenizers, templates and settings, without weights."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.support.small_tokenizers import byte_level, write_checkpoint

_BEGIN = "<|begin|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTower:
    """What a reader needs to know of a tower: it merges `merged` x `merged` patches into a row."""

    merged: int
    digest: bytes = b"small tower"
    max_patches: int = 4096

    def row_grid(self, height: int, width: int) -> tuple[int, int]:
        if height % self.merged or width % self.merged:
            raise ValueError(f"{height} by {width} patches are not in blocks of {self.merged}")
        return height // self.merged, width // self.merged


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFamily:
    """A family's settings and template. tokens: its special ones. named: those with a name."""

    template: str
    tokens: Sequence[str]
    named: Mapping[str, str]
    settings: Mapping[str, Any]
    merged: int
    processor: Mapping[str, Any]
    patch: int

    def write(self, folder: Path, model_type: str, tokenizer: Tokenizer | None = None) -> Path:
        """A checkpoint's folder without weights."""
        tokenizer = tokenizer or byte_level()
        tokenizer.add_special_tokens(
            [AddedToken(each, special=True, normalized=False) for each in self.tokens]
        )
        named = {"bos_token": _BEGIN, "extra_special_tokens": dict(self.named)}
        write_checkpoint(folder, tokenizer, {**named, "chat_template": self.template})
        config = {"model_type": model_type, "vision_config": {"patch_size": self.patch}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))
        (folder / "processor_config.json").write_text(json.dumps(self.processor))
        return folder

    @property
    def tower(self) -> SmallTower:
        return SmallTower(merged=self.merged)


def _template(mark: str, *, texts: bool = True, head: str = "<|begin|>") -> str:
    """A template that writes a mark for each picture. texts: it reads contents as texts, too."""
    parts = (
        "{% for part in m.content %}{% if part.type == 'image' %}"
        + mark
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    )
    if texts:
        parts = "{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}"
    return (
        head
        + "{% for m in messages %}{{ m.role }}\n"
        + parts
        + "<|end|>\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
    )


_SPLIT = PictureFamily(
    template=_template("<image>", texts=False),
    tokens=(
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
    named={"image_token": "<image>"},
    settings={"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}},
    processor={"image_seq_len": 4},
    merged=2,
    patch=16,
)

_QWEN = PictureFamily(
    template=_template("<|vision_start|><|image_pad|><|vision_end|>"),
    tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    named={"image_token": "<|image_pad|>"},
    settings={
        "size": {"shortest_edge": 64 * 64, "longest_edge": 160 * 160},
        "patch_size": 16,
        "merge_size": 2,
    },
    processor={},
    merged=2,
    patch=16,
)

FAMILIES: Mapping[str, PictureFamily] = {
    "smolvlm": _SPLIT,
    "idefics3": _SPLIT,
    "mistral3": PictureFamily(
        template=_template("[IMG]"),
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        named={},
        settings={"size": {"longest_edge": 168}},
        processor={"patch_size": 14, "spatial_merge_size": 2},
        merged=2,
        patch=14,
    ),
    "qwen3_vl": _QWEN,
    "qwen3_5": _QWEN,
    "gemma3": PictureFamily(
        template=_template("<start_of_image>"),
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        settings={
            "size": {"height": 112, "width": 112},
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 30,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        processor={"image_seq_length": 4},
        merged=4,
        patch=14,
    ),
    "gemma4": PictureFamily(
        template=_template("<|image|>"),
        tokens=("<|image>", "<image|>", "<|image|>"),
        named={"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
        settings={"max_soft_tokens": 70, "patch_size": 16, "pooling_kernel_size": 3},
        processor={},
        merged=3,
        patch=16,
    ),
}
"""By model type."""


def noise(width: int, height: int) -> Image.Image:
    """A picture without two equal pixels side by side."""
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, 3))
    return Image.fromarray(values.astype(np.uint8))


def png(image: Image.Image) -> bytes:
    """The file of a picture, without loss."""
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()
