"""What tests of real daemons share."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edge.planning import drift
from tests.support.checkpoints import TinyCheckpoint
from tests.support.known_rates import know_rates

LONG_CONTEXT = 30_000


def with_long_context(checkpoint: Path, folder: Path) -> Path:
    """A copy with so long a context that an answer is never at its end by itself."""
    target = folder / "endless"
    shutil.copytree(checkpoint, target)
    config = target / "config.json"
    values = {**json.loads(config.read_text()), "max_position_embeddings": LONG_CONTEXT}
    config.write_text(json.dumps(values))
    return target


@pytest.fixture(scope="session")
def endless_checkpoint(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> TinyCheckpoint:
    """The tiny Llama, whose answers last for minutes."""
    source = tiny_checkpoint("llama").path
    return TinyCheckpoint(with_long_context(source, tmp_path_factory.mktemp("long")))


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """That this machine was slower than predicted is told to nobody; tests of that undo it."""
    monkeypatch.setattr(drift, "LEAST_EXCESS_S", math.inf)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known beforehand; a module that has peers measured has a fixture `rates` of its own."""
    know_rates(monkeypatch.setattr)


@pytest.fixture(scope="session")
def talker(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny Llama with a chat template that has a switch for thinking."""
    source = tiny_checkpoint("llama").path
    folder = Path(shutil.copytree(source, tmp_path_factory.mktemp("talker") / "talker"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    template += "{% if enable_thinking is defined and not enable_thinking %}<quick>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder
