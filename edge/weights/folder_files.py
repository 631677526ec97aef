"""Small files of a model's folder beside its weights and config.json: tokenizer and others.

Copied from a folder, or made from a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from edge.errors import CheckpointError
from edge.offload import own_file, read_file
from edge.text.files import TOKENIZER
from edge.weights.checkpoint import Checkpoint
from edge.weights.pooling import MODULES, POOLING

SMALL_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    MODULES,
    POOLING,
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)
ADDITIONAL_TEMPLATES = "additional_chat_templates"
_MOST_BYTES = 64 << 20
"""Most bytes of one file; see `edge/text/files.py`."""


def other_files(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """Names and contents. Raises CheckpointError, and StoreError for a link to elsewhere."""
    if checkpoint.path.is_dir():
        yield from _copies(checkpoint.path)
    else:
        yield from _described(checkpoint)


def _copies(folder: Path) -> Iterator[tuple[str, bytes]]:
    paths = [folder / name for name in SMALL_FILES]
    paths += sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    for path in paths:
        if path.is_file():
            yield str(path.relative_to(folder)), _content(own_file(path))


def _content(path: Path) -> bytes:
    try:
        return read_file(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error})", remedy="check its permissions, or download it again"
        ) from error


def _described(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """The files of a folder, made from the description of a GGUF file."""
    yield "generation_config.json", _json({"eos_token_id": sorted(checkpoint.end_ids)})
    if not checkpoint.has_tokenizer:
        return
    files = checkpoint.tokenizer_files()
    yield TOKENIZER, files.serialized.encode()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **files.settings}
    settings |= {name: token.content for name, token in files.named_tokens.items()}
    if files.extra_tokens:
        settings["extra_special_tokens"] = [token.content for token in files.extra_tokens]
    templates = {name: source for name, (source, _place) in files.chat_templates.items()}
    if templates.keys() == {"default"}:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [
            {"name": name, "template": source} for name, source in templates.items()
        ]
    yield "tokenizer_config.json", _json(settings)


def _json(values: object) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode()
