"""The bundled model with a template that takes tools, and what they bring."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from edge.demos.bundled import MODEL


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
