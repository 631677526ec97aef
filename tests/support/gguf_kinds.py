"""GGUF files for `mutated_files`: whole ones, matrices of every type, files in parts."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import weight_format
from edge.weights.layout import whole_layout
from tests.support import gguf_bytes
from tests.support.gguf_files import Type, raw_blocks
from tests.support.small_files import Kind, as_object, told
from tests.support.small_tokenizers import byte_level


def gguf_kinds(folder: Path) -> dict[str, Kind]:
    folder.mkdir()
    return {
        **_whole(folder / "whole"),
        **_codes(folder / "codes"),
        **_parts(folder / "parts"),
    }


def _whole(folder: Path) -> dict[str, Kind]:
    """The bytes of a file; and its parts in JSON, which are changed and then written."""
    folder.mkdir()
    path = folder / "model.gguf"
    infos, data = gguf_bytes.placed(gguf_bytes.tensors())
    pieces = gguf_bytes.byte_pieces()
    words = json.loads(byte_level().to_str())["model"]
    merged: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": list(words["vocab"])[: gguf_bytes.VOCABULARY],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (gguf_bytes.VOCABULARY - 2),
        "tokenizer.ggml.merges": [" ".join(each) for each in words["merges"][:20]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }

    def read(content: bytes) -> None:
        path.write_bytes(content)
        _read_model(path)

    def read_parts(metadata: object, described: object) -> None:
        written = gguf_bytes.written(metadata, described)
        if written is not None:
            read(written + data)

    def with_metadata(content: bytes) -> None:
        read_parts({**as_object(content), **pieces}, infos)

    def with_tokenizer(content: bytes) -> None:
        read_parts({**gguf_bytes.METADATA, **as_object(content)}, infos)

    def with_infos(content: bytes) -> None:
        read_parts({**gguf_bytes.METADATA, **pieces}, as_object(content).get("infos"))

    return {
        "gguf": Kind(gguf_bytes.sound(), read),
        "gguf metadata": Kind(json.dumps(gguf_bytes.METADATA).encode(), with_metadata),
        "gguf tensors": Kind(json.dumps({"infos": infos}).encode(), with_infos),
        "gguf pieces": Kind(json.dumps(pieces).encode(), with_tokenizer),
        "gguf merges": Kind(json.dumps(merged).encode(), with_tokenizer),
    }


def _codes(folder: Path) -> dict[str, Kind]:
    """Matrices of every type, which are read as floats and in their own codes."""
    folder.mkdir()
    path = folder / "model.gguf"
    infos, data = placed()
    metadata = {**METADATA, **gguf_bytes.byte_pieces()}
    front = gguf_bytes.header(metadata, infos)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        _read_model(path)
        with Checkpoint.open(path) as opened:
            chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
            cache = folder / "cache"
            source = opened.source(chosen, cache_root=cache, on_progress=lambda _event: None)
            with contextlib.closing(source):
                for matrix in whole_layout(chosen.graded(opened.spec)).matrices:
                    for stored in chosen.recipe.stored(matrix):
                        source.matrix(stored.part)
            shutil.rmtree(cache, ignore_errors=True)

    def with_infos(content: bytes) -> None:
        written = gguf_bytes.written(metadata, as_object(content).get("infos"))
        if written is not None:
            read(written + data)

    return {
        "gguf codes": Kind(front + data, read),
        "gguf blocks": Kind(data, lambda content: read(front + content)),
        "gguf types": Kind(json.dumps({"infos": infos}).encode(), with_infos),
    }


def _parts(folder: Path) -> dict[str, Kind]:
    """A model in three files: the bytes of one of them, and what all say of their places."""
    folder.mkdir()
    parts = gguf_bytes.parts()
    paths = [folder / f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    sound = [gguf_bytes.header(said, infos) + data for said, infos, data in parts]

    def read(contents: Sequence[bytes]) -> None:
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        _read_model(paths[0])
        with Checkpoint.open(paths[2]):  # whichever part is given
            pass

    def with_second(content: bytes) -> None:
        read([sound[0], content, sound[2]])

    def with_places(content: bytes) -> None:
        given = as_object(content)
        contents = []
        for number, (said, infos, data) in enumerate(parts):
            own = given.get(str(number))
            described = own if isinstance(own, dict) else {}
            written = gguf_bytes.written(
                {**said, **{str(key): each for key, each in described.items()}}, infos
            )
            contents.append(sound[number] if written is None else written + data)
        read(contents)

    places = {
        str(number): {key: value for key, value in said.items() if key.startswith("split.")}
        for number, (said, _infos, _data) in enumerate(parts)
    }
    return {
        "gguf part": Kind(sound[1], with_second),
        "gguf places": Kind(json.dumps(places).encode(), with_places),
    }


def _read_model(path: Path) -> None:
    """As floats, with its tokenizer."""
    told(path)
    with Checkpoint.open(path) as opened:
        for name in opened.store.names():
            opened.store.read(name, rows=range(min(3, opened.store.shape(name)[0])))
        if opened.has_tokenizer:
            tokenizer = opened.tokenizer
            tokenizer.decode(tokenizer.encode("The quick brown fox"))
            tokenizer.close()


_HIDDEN, _FFN, _HEAD, _LAYERS = 256, 32, 16, 3
_WIDE = (
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS),
    *(Type.F16, Type.BF16, Type.Q8_0, Type.MXFP4),
    *(Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.NVFP4),
)
"""Of rows that are whole blocks of 256; and `_NARROW` of those that are not."""
_NARROW = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q4_0, Type.Q4_1)

METADATA: Mapping[str, Any] = {
    **gguf_bytes.METADATA,
    "llama.block_count": _LAYERS,
    "llama.embedding_length": _HIDDEN,
    "llama.feed_forward_length": _FFN,
    "llama.attention.key_length": _HEAD,
    "llama.attention.value_length": _HEAD,
    "llama.rope.dimension_count": _HEAD,
}


def placed() -> tuple[list[list[Any]], bytes]:
    """Descriptions of its tensors, and their bytes."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (gguf_bytes.VOCABULARY, _HIDDEN),
        "output.weight": (gguf_bytes.VOCABULARY, _HIDDEN),
        "output_norm.weight": (_HIDDEN,),
    }
    for layer in range(_LAYERS):
        own: dict[str, tuple[int, ...]] = {
            "attn_q": (2 * _HEAD, _HIDDEN),
            "attn_k": (_HEAD, _HIDDEN),
            "attn_v": (_HEAD, _HIDDEN),
            "ffn_gate": (_FFN, _HIDDEN),
            "ffn_up": (_FFN, _HIDDEN),
            "attn_output": (_HIDDEN, 2 * _HEAD),
            "ffn_down": (_HIDDEN, _FFN),
            "attn_norm": (_HIDDEN,),
            "ffn_norm": (_HIDDEN,),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    wide, narrow = iter(_WIDE), iter(_NARROW)
    chance = np.random.default_rng(0)
    found = {}
    for place, (name, shape) in enumerate(shapes.items()):
        kind = Type.F32
        if len(shape) == 2:
            kind = (
                Type.IQ4_NL
                if name == "output.weight"
                else next(wide if shape[1] == _HIDDEN else narrow)
            )
        values = chance.uniform(0.5, 1.5, shape).astype(np.float32)
        content = np.asarray(raw_blocks(values, kind, seed=place)).tobytes()
        found[name] = shape, int(kind), content
    return gguf_bytes.placed_bytes(found)
