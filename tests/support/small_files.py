"""Kinds of files for `mutated_files` that are read in a millisecond: parts of checkpoints, by their
readers alone, and what users and other programs put beside them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from edge.cli.chat.conversation import Conversation
from edge.offload import SafetensorsFile
from edge.server.keys import read_keys
from edge.weights.checkpoint import Checkpoint
from edge.weights.header import read_header
from edge.weights.pooling import MODULES, POOLING, read_pooling
from tests.support.file_kind import Kind

_MODEL = Path(__file__).parents[2] / "demos" / "model"


def small_files(folder: Path) -> dict[str, Kind]:
    folder.mkdir()
    return {
        **_parts_of_checkpoints(folder / "parts"),
        **_adapters(folder / "adapter"),
        **_poolings(folder / "pooling"),
        **_texts_of_users(folder),
    }


def _header(path: Path) -> tuple[bytes, bytes]:
    """Of a file of safetensors: its header, and what follows."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    return content[8:size], content[size:]


def _with_header(header: bytes, rest: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + rest


def _parts_of_checkpoints(folder: Path) -> dict[str, Kind]:
    """A header over a few weights, and a config: no weights are read, nothing is told."""
    folder.mkdir()
    path = folder / "model.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int8)}, path)
    header, rest = _header(path)

    def open_header(content: bytes) -> None:
        path.write_bytes(_with_header(content, rest))
        with contextlib.closing(SafetensorsFile(path)) as opened:
            for name, place in opened.tensors.items():
                if place.dtype in ("F32", "I8") and len(place.shape) in (1, 2):
                    opened.read(name, [range(size) for size in place.shape])

    config = folder / "config.json"

    def open_config(content: bytes) -> None:
        config.write_bytes(content)
        read_header(folder)

    return {
        "header alone": Kind(header, open_header),
        "config described": Kind((_MODEL / "config.json").read_bytes(), open_config),
    }


def _adapters(folder: Path) -> dict[str, Kind]:
    """A LoRA adapter of the bundled model."""
    folder.mkdir()
    described, _ = _header(_MODEL / "model.safetensors")
    weights = {}
    for name, entry in json.loads(described).items():
        if name.endswith(("q_proj.weight", "up_proj.weight")):
            outputs, inputs = entry["shape"]
            base = "base_model.model." + name.removesuffix(".weight")
            weights[f"{base}.lora_A.weight"] = np.zeros((2, inputs), np.float32)
            weights[f"{base}.lora_B.weight"] = np.zeros((outputs, 2), np.float32)
    path, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file(weights, path)
    header, rest = _header(path)
    sound = json.dumps(
        {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 6,
            "alpha_pattern": {"q_proj": 3},
            "rank_pattern": {},
            "target_modules": ["q_proj", "up_proj"],
            "use_rslora": False,
            "init_lora_weights": True,
            "modules_to_save": None,
        }
    ).encode()

    def read(described: bytes, weights: bytes) -> None:
        config.write_bytes(described)
        path.write_bytes(weights)
        with Checkpoint.open(_MODEL, lora=folder) as opened:
            for name in list(opened.store.names())[:4]:
                opened.store.read(name, rows=range(1))

    whole = _with_header(header, rest)
    return {
        "adapter config": Kind(sound, lambda content: read(content, whole)),
        "adapter header": Kind(header, lambda content: read(sound, _with_header(content, rest))),
    }


def _poolings(folder: Path) -> dict[str, Kind]:
    (folder / POOLING).parent.mkdir(parents=True)
    modules = json.dumps(
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "models.Pooling"},
        ]
    ).encode()
    modes = json.dumps({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}).encode()

    def reading(name: str, other: str, sound: bytes) -> Callable[[bytes], None]:
        def read(content: bytes) -> None:
            (folder / name).write_bytes(content)
            (folder / other).write_bytes(sound)
            read_pooling(folder)

        return read

    return {
        "modules": Kind(modules, reading(MODULES, POOLING, modes)),
        "pooling": Kind(modes, reading(POOLING, MODULES, modules)),
    }


def _texts_of_users(folder: Path) -> dict[str, Kind]:
    """A chat that was saved, and the keys of a server."""
    saved, keys = folder / "chat.json", folder / "keys"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Conversation(system="s", turns=turns).save(saved, model="m")
    known = b"abcdefghijklmnopqrstuv answers=3 priority=low shares=x\nABCDEFGHIJKLMNOPQRSTUV\n"

    def load(content: bytes) -> None:
        saved.write_bytes(content)
        Conversation.load(saved)

    def read(content: bytes) -> None:
        keys.write_bytes(content)
        read_keys(keys)

    return {"saved chat": Kind(saved.read_bytes(), load), "server keys": Kind(known, read)}
