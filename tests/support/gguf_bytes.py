"""GGUF files byte by byte, as they should be or not: whatever is given is written.

The package that the other files are made with refuses to write most of what readers must refuse.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.small_tokenizers import CHAT_TEMPLATE

ALIGNMENT = 32

Info = Sequence[Any]
"""Of a tensor: name, sizes (the innermost first), type, offset."""


def string(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def value(given: Any) -> bytes:
    """With its type before it; of what has no type in the format, a text."""
    if isinstance(given, bool):
        return struct.pack("<IB", 7, given)
    if isinstance(given, int):
        return struct.pack("<IQ", 10, given % 2**64)
    if isinstance(given, float):
        return struct.pack("<Id", 12, given)
    if isinstance(given, list):
        return struct.pack("<I", 9) + _array(given)
    return struct.pack("<I", 8) + string(given if isinstance(given, str) else repr(given))


def _array(given: Sequence[Any]) -> bytes:
    if all(isinstance(each, str) for each in given):
        return struct.pack("<IQ", 8, len(given)) + b"".join(map(string, given))
    if all(isinstance(each, int | float) for each in given):
        numbers = np.array([float(min(max(each, -1e30), 1e30)) for each in given])
        return struct.pack("<IQ", 12, len(given)) + numbers.astype("<f8").tobytes()
    return struct.pack("<IQ", 9, len(given)) + b"".join(
        value(each)[4:] if isinstance(each, list) else value(each) for each in given
    )


def info(each: Any) -> bytes:
    """Of what is no such description, what comes nearest to it."""
    name, sizes, kind, offset = (
        [*each, 0, 0, 0, 0][:4] if isinstance(each, list) else [each, [], 0, 0]
    )
    sizes = sizes if isinstance(sizes, list) else [sizes]
    return (
        string(name if isinstance(name, str) else repr(name))
        + struct.pack("<I", len(sizes))
        + b"".join(struct.pack("<Q", _whole(size) % 2**64) for size in sizes)
        + struct.pack("<IQ", _whole(kind) % 2**32, _whole(offset) % 2**64)
    )


def _whole(number: Any) -> int:
    return int(number) if isinstance(number, int | float) else 0


def header(
    metadata: Mapping[str, Any],
    infos: Sequence[Info],
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    """Up to where the tensors begin, with other numbers of things if they are given."""
    counts = (
        len(infos) if num_tensors is None else num_tensors,
        len(metadata) if num_keys is None else num_keys,
    )
    content = b"GGUF" + struct.pack("<IQQ", version, *counts)
    content += b"".join(string(key) + value(each) for key, each in metadata.items())
    content += b"".join(map(info, infos))
    return content + bytes(-len(content) % ALIGNMENT)


def written(metadata: Any, infos: Any) -> bytes | None:
    """The header of anything at all; None for what nothing can be written of."""
    try:
        return header(metadata, infos)
    except (TypeError, ValueError, AttributeError, OverflowError, struct.error, RecursionError):
        return None


def placed(tensors: Mapping[str, NDArray[np.float32]]) -> tuple[list[list[Any]], bytes]:
    """Descriptions of float32 tensors, and their bytes."""
    return placed_bytes(
        {
            name: (values.shape, 0, values.astype("<f4").tobytes())
            for name, values in tensors.items()
        }
    )


def placed_bytes(
    tensors: Mapping[str, tuple[Sequence[int], int, bytes]],
) -> tuple[list[list[Any]], bytes]:
    """The same of tensors of any type: shape, type, bytes."""
    infos: list[list[Any]] = []
    data = b""
    for name, (shape, kind, content) in tensors.items():
        infos.append([name, list(reversed(shape)), kind, len(data)])
        data += content
        data += bytes(-len(data) % ALIGNMENT)
    return infos, data


HIDDEN, FFN, VOCABULARY = 8, 12, 290

METADATA: Mapping[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": ALIGNMENT,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 4,
    "llama.vocab_size": VOCABULARY,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}
"""Of a model with one layer."""


def tensors() -> dict[str, NDArray[np.float32]]:
    """Of the same model."""
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "rope_freqs.weight": (2,),
        "blk.0.attn_q.weight": (8, HIDDEN),
        "blk.0.attn_k.weight": (4, HIDDEN),
        "blk.0.attn_v.weight": (4, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, 8),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
    }
    chance = np.random.default_rng(0)
    return {
        name: chance.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in shapes.items()
    }


def byte_pieces() -> dict[str, Any]:
    """A SentencePiece vocabulary as metadata: bytes, letters and a few words."""
    words = ["▁", "t", "h", "e", "q", "u", "i", "c", "k", "▁t", "he", "▁the", "qu", "ick", "quick"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(place) for place in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
    }


def parts() -> list[tuple[dict[str, Any], list[list[Any]], bytes]]:
    """The same in three files, as llama.cpp splits a model: metadata, of which only the first has
    those of the model; descriptions; and the tensors' bytes."""
    described = list(tensors().items())
    found = []
    for number in range(3):
        split = {
            "split.no": number,
            "split.count": 3,
            "split.tensors.count": len(described),
        }
        own = {**METADATA, **byte_pieces()} if number == 0 else {}
        found.append(({**own, **split}, *placed(dict(described[number::3]))))
    return found


def sound(metadata: Mapping[str, Any] | None = None) -> bytes:
    """A whole file of that model, with `metadata` besides its own."""
    infos, data = placed(tensors())
    return header({**METADATA, **byte_pieces(), **(metadata or {})}, infos) + data
