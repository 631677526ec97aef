"""Kinds of files for `mutated_files`, each with the one reader that decides what it is: less than a
millisecond, so that a million of each can be tried."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import CheckpointError
from edge.models.families import read_family
from edge.models.spec import tensor_shapes
from edge.offload import GgufFile
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
from edge.weights.gguf.form import gguf_spec
from tests.support import gguf_bytes
from tests.support.family_sizes import FAMILIES, MORE_FAMILIES, SHARED
from tests.support.file_kind import Kind, as_object
from tests.support.small_tokenizers import CHAT_TEMPLATE, letters

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
