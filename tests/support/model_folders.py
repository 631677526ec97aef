"""Folders of models as others make them: the cache of Hugging Face, a model that takes tools."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from edge.demos.bundled import MODEL

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_to_cache(
    cache: Path,
    repository: str,
    files: Mapping[str, bytes],
    *,
    commit: str = COMMIT,
    reference: str | None = "main",
) -> Path:
    """The folder of the commit, with links to the files."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    if reference is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / reference).write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    """Names and contents of all files of a model's folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def calling_model(folder: Path) -> Path:
    """Its folder, made in this one."""
    made = Path(shutil.copytree(MODEL, folder / MODEL.name))
    file = made / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = settings["chat_template"].replace(
        "!= 'system'", "not in ['system', 'tool']"
    )
    settings["chat_template"] += "{% for tool in tools or () %} <tool_call>{% endfor %}"
    file.write_text(json.dumps(settings))
    return made
