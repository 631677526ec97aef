"""Kinds of small files for `mutated_files`, each with its reader.

Parts of checkpoints and files that users and other programs put beside them are read in about a
millisecond. Kinds with the one reader that decides are read in less: a million can be tried.
"""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from edge import partition
from edge.api.known_models import inspect
from edge.cli.chat.conversation import Conversation
from edge.cli.inspect_view import show_inspection
from edge.errors import CheckpointError, EdgeError
from edge.models.families import read_family
from edge.models.spec import tensor_shapes
from edge.offload import GgufFile, SafetensorsFile, StoreError
from edge.server.keys import read_keys
from edge.text import Tokenizer
from edge.text.files import TOKENIZER, read_json, read_tokenizer_files
from edge.text.gguf import (
    describe_gguf_tokenizer,
    gguf_end_ids,
    gguf_sampling,
    gguf_templates,
    gguf_tokenizer_files,
)
from edge.text.tokenizer_facts import describe_tokenizer
from edge.weights.checkpoint import Checkpoint
from edge.weights.gguf.form import gguf_spec
from edge.weights.header import read_header
from edge.weights.pooling import MODULES, POOLING, read_pooling
from tests.support import gguf_bytes
from tests.support.family_sizes import FAMILIES, MORE_FAMILIES, SHARED
from tests.support.small_tokenizers import CHAT_TEMPLATE, letters

REFUSALS = (EdgeError, StoreError, partition.PlanError)
"""The project's own errors: what is not read ends in one of them, told in a few lines."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A sound one, and who reads it."""

    sound: bytes
    read: Callable[[bytes], object]
    has_own_keys: bool = False
    """Made anew with each `Files`."""
    others: Sequence[bytes] = ()
    """That are sound, too."""


class replaced:
    """A file with another content for a while."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def __enter__(self) -> None:
        self._sound = self._path.read_bytes()
        self._path.write_bytes(self._content)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._sound)


def as_object(content: bytes) -> dict[str, object]:
    """An object in JSON; an empty one for anything else."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def told(path: Path) -> None:
    """Whatever it is, `edge inspect` has printable lines of it, or a sentence.

    The lines of one in eight are drawn, which takes as long as all else.
    """
    try:
        found = inspect(path)
    except REFUSALS:
        return
    facts = json.dumps(found.to_json(template=True), allow_nan=False)
    if zlib.crc32(facts.encode()) % 8:
        return
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_inspection(found, given=str(path), template=True)
    assert all(map(str.isprintable, out.getvalue().split("\n")))


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


_MOST_LAYERS = 100
"""Of those whose tensors are listed, as opening the weights does once for each tensor."""


def readers_alone(folder: Path) -> dict[str, Kind]:
    folder.mkdir()
    return {
        "config alone": _config(folder / "config.json"),
        "tokenizer alone": _tokenizer(folder / "tokenizer"),
        **_gguf(folder / "model.gguf"),
    }


def _config(path: Path) -> Kind:
    """Of every family."""

    def read(content: bytes) -> None:
        path.write_bytes(content)
        _family, spec = read_family(read_json(path), source=str(path))
        if spec.num_layers <= _MOST_LAYERS:
            tensor_shapes(spec)

    first, *others = (
        json.dumps({"model_type": family, **SHARED, **sizes}).encode()
        for family, sizes in {**FAMILIES, **MORE_FAMILIES}.values()
    )
    return Kind(first, read, others=others)


def _tokenizer(folder: Path) -> Kind:
    """Of a few letters, with a normaliser, a pre-tokenizer, a decoder and a post-processor."""
    folder.mkdir()
    sound = json.loads(letters(["<s>", "</s>", *"abcĠ", "ab", "Ġa"]).to_str())
    sound["model"]["merges"] = ["a b", "Ġ a"]
    sound["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Replace", "pattern": {"String": "x"}, "content": "y"},
        ],
    }
    sound["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": "[a-z]+| "},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        ],
    }
    sound["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')

    def read(content: bytes) -> None:
        (folder / TOKENIZER).write_bytes(content)
        files = read_tokenizer_files(folder)
        with contextlib.suppress(CheckpointError):
            describe_tokenizer(files, (0, 1))
        opened = Tokenizer(files)
        opened.decode(opened.encode("ab cab"))

    return Kind(json.dumps(sound, ensure_ascii=False).encode(), read)


def _gguf(path: Path) -> dict[str, Kind]:
    """Values of every type and two small tensors as bytes; metadata of a model, and of a tokenizer,
    in JSON, which are changed and then written."""
    infos, data = gguf_bytes.placed({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)})
    pieces: dict[str, Any] = gguf_bytes.byte_pieces()
    few = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"]
    pieces |= {
        "tokenizer.ggml.tokens": few,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [-float(place) for place in range(len(few))],
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    every = {"text": "a", "texts": ["a", "b"], "numbers": [1, 2], "no": 1.5, "is": True}

    def opened(content: bytes, then: Callable[[GgufFile], object]) -> None:
        path.write_bytes(content)
        with contextlib.closing(GgufFile(path)) as file:
            then(file)

    def read_tensors(file: GgufFile) -> None:
        for name, tensor in file.tensors.items():
            rows = int(np.prod(tensor.shape[:-1], dtype=object)) if tensor.shape else 0
            if rows and tensor.end - tensor.begin <= len(data):
                file.read(name, range(min(rows, 3)), range(tensor.shape[-1]))

    def with_metadata(then: Callable[[GgufFile], object]) -> Callable[[bytes], None]:
        def read(content: bytes) -> None:
            written = gguf_bytes.written(as_object(content), infos)
            if written is not None:
                opened(written + data, then)

        return read

    def read_model(file: GgufFile) -> None:
        gguf_end_ids(file.metadata)
        gguf_sampling(file.metadata, path)
        gguf_templates(file.metadata, path)
        _model, spec = gguf_spec([file])
        if spec.num_layers <= _MOST_LAYERS:
            tensor_shapes(spec)

    def read_pieces(file: GgufFile) -> None:
        with contextlib.suppress(CheckpointError):
            describe_gguf_tokenizer(file.metadata, path, gguf_end_ids(file.metadata))
        tokenizer = Tokenizer(gguf_tokenizer_files(file.metadata, path))
        tokenizer.decode(tokenizer.encode("ab a"))

    whole = gguf_bytes.header(every, infos) + data
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40}
    model = json.dumps({**gguf_bytes.METADATA, **sampling}).encode()
    return {
        "gguf bytes alone": Kind(whole, lambda content: opened(content, read_tensors)),
        "gguf metadata alone": Kind(model, with_metadata(read_model)),
        "gguf pieces alone": Kind(json.dumps(pieces).encode(), with_metadata(read_pieces)),
    }
