"""Errors for folders without a readable checkpoint: their contents, and the remedy."""

from __future__ import annotations

from pathlib import Path

from edge.errors import CheckpointError, shown
from edge.text.files import read_json

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state")
"""Pickles of a training that lie beside weights."""


def check_folder(folder: Path) -> None:
    """Raises CheckpointError for a folder of another form. Incomplete checkpoints pass."""
    has_config = (folder / "config.json").is_file()
    if has_config and any((folder / name).is_file() for name in _WEIGHTS):
        return
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        raise CheckpointError(
            f"{folder} is a LoRA adapter of {shown(base)}, not a model",
            remedy="give the folder of that model, and this one with --lora",
        )
    files = sorted(path for path in folder.iterdir() if path.is_file())
    tensors = [path.name for path in files if path.suffix == ".safetensors"]
    if original := [name for name in tensors if name.startswith("consolidated")]:
        raise CheckpointError(
            f"{folder} holds {original[0]}, whose tensors have their makers' own names",
            remedy="give the folder of the same model in the Hugging Face form, with config.json "
            "and model*.safetensors",
        )
    if ggufs := [path.name for path in files if path.suffix.lower() == ".gguf"]:
        raise CheckpointError(
            f"{folder} is no complete Hugging Face checkpoint, but holds {ggufs[0]}",
            remedy="give the path of that file to use it",
        )
    if not has_config or any((folder / name).is_file() for name in _WEIGHTS):
        return
    if tensors:
        raise CheckpointError(
            f"{folder} holds {tensors[0]} and neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}",
            remedy=f"if that one file is the whole model, name it {_WEIGHTS[0]}; else download "
            "the rest",
        )
    pickles = [
        path.name
        for path in files
        if path.suffix in _PICKLES and not path.name.startswith(_OF_TRAINING)
    ]
    if pickles:
        raise CheckpointError(
            f"{folder} has neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}: its {pickles[0]} is a pickle, "
            "which is never read, because it can run any program",
            remedy="convert it to safetensors where you trust it (transformers: from_pretrained, "
            "then save_pretrained), or fetch a safetensors version",
        )
