"""Random checkpoints that read images: a named shape behind the vision encoder of SmolVLM 256M."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from edge.demos.shapes import SHAPES, WEIGHT_DEVIATION, checkpoint

HIDDEN, COLUMNS, LAYERS, HEADS = 768, 3072, 12, 12
SIDE, PATCH, MERGED = 512, 16, 4
"""Pixels of a square of an image, and of a patch; patches of a side of a row."""
LONGEST = 1024
"""Longest side of an image: one of 1024 x 768 is four squares and the whole."""

_TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}"
)


def seeing_checkpoint(shape: str, folder: Path) -> Path:
    """The folder of the shape's checkpoint with a vision encoder, written if it is not there."""
    target = folder / f"{shape}-seeing"
    if not target.is_dir():
        partial = folder / f"{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(checkpoint(shape, folder), partial, SHAPES[shape].hidden_size)
        partial.rename(target)
    return target


def _write(texts: Path, folder: Path, text_size: int) -> None:
    tensors = dict(_tower(text_size))
    for file in sorted(texts.glob("*.safetensors")):
        for name, values in load_file(file).items():
            tensors[name.replace("model.", "model.text_model.", 1)] = values
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((texts / "config.json").read_text(encoding="utf-8"))
    vision = {
        "hidden_size": HIDDEN,
        "intermediate_size": COLUMNS,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    settings = {"size": {"longest_edge": LONGEST}, "max_image_size": {"longest_edge": SIDE}}
    whole = {"model_type": "smolvlm", "text_config": text, "vision_config": vision}
    for name, value in (
        ("config.json", {**whole, "scale_factor": MERGED, "eos_token_id": None}),
        ("preprocessor_config.json", settings),
        ("tokenizer_config.json", {"chat_template": _TEMPLATE}),
    ):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(texts / "tokenizer.json"))
    squares = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", *squares]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in marks])
    tokenizer.save(str(folder / "tokenizer.json"))


def _tower(text_size: int) -> Iterator[tuple[str, NDArray[ml_dtypes.bfloat16]]]:
    generator = np.random.default_rng(1)

    def drawn(*shape: int) -> NDArray[ml_dtypes.bfloat16]:
        values = generator.standard_normal(shape, dtype=np.float32)
        return (values * np.float32(WEIGHT_DEVIATION)).astype(ml_dtypes.bfloat16)

    def norm(name: str) -> Iterator[tuple[str, NDArray[ml_dtypes.bfloat16]]]:
        yield f"{name}.weight", np.ones(HIDDEN, ml_dtypes.bfloat16)
        yield f"{name}.bias", np.zeros(HIDDEN, ml_dtypes.bfloat16)

    prefix = "model.vision_model."
    yield f"{prefix}embeddings.patch_embedding.weight", drawn(HIDDEN, 3, PATCH, PATCH)
    yield f"{prefix}embeddings.patch_embedding.bias", drawn(HIDDEN)
    yield f"{prefix}embeddings.position_embedding.weight", drawn((SIDE // PATCH) ** 2, HIDDEN)
    yield from norm(f"{prefix}post_layernorm")
    for layer in range(LAYERS):
        own = f"{prefix}encoder.layers.{layer}."
        yield from norm(f"{own}layer_norm1")
        yield from norm(f"{own}layer_norm2")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{own}self_attn.{part}.weight", drawn(HIDDEN, HIDDEN)
            yield f"{own}self_attn.{part}.bias", drawn(HIDDEN)
        for part, rows, columns in (("fc1", COLUMNS, HIDDEN), ("fc2", HIDDEN, COLUMNS)):
            yield f"{own}mlp.{part}.weight", drawn(rows, columns)
            yield f"{own}mlp.{part}.bias", drawn(rows)
    yield "model.connector.modality_projection.proj.weight", drawn(text_size, HIDDEN * MERGED**2)
