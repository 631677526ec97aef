"""A new model family, a new command: one file, and its name in one table.

Each test adds a made-up one from a file of its own; nothing else of Edge is touched.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import edge
from edge.cli.main import COMMANDS
from edge.models import families
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import edge as run_edge

FAMILY = '''
"""A Llama that spells everything otherwise."""

from edge.models.config import Config, decoder
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec

NAMES = {
    "width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads",
    "groups": "num_key_value_heads", "each": "head_dim", "inner": "intermediate_size",
    "words": "vocab_size", "rope": "rope_parameters", "reach": "max_position_embeddings",
    "epsilon": "rms_norm_eps",
}


def describe(config: Config) -> ModelSpec:
    values = {theirs: config.values[ours] for ours, theirs in NAMES.items()}
    return decoder(Config(values, source=config.source), family="made_up")


def tensor_name(role: str) -> str:
    return llama_tensor_name(role).removeprefix("model.").replace("layers.", "blocks/")


FAMILY = Family(describe=describe, tensor_name=tensor_name)
'''

COMMAND = '''
"""`edge made_up`: says hello."""

import click


@click.command("made_up")
@click.argument("name")
def command(name: str) -> None:
    click.echo(f"Hello, {name}")
'''


@pytest.fixture
def add_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Put a module `made_up` of this text into a package, as if its file lay there."""
    added: list[str] = []

    def add(package: str, text: str) -> None:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "made_up.py").write_text(text)
        path = importlib.import_module(package).__path__
        monkeypatch.setattr(sys.modules[package], "__path__", [*path, str(folder)])
        added.append(package)

    yield add
    for package in added:
        sys.modules.pop(f"{package}.made_up", None)


def test_a_new_family(
    add_module: Callable[[str, str], None],
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers need not know it: what they are sent is data."""
    add_module("edge.models", FAMILY)
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, "made_up"))
    checkpoint = tiny_checkpoint("llama")
    made_up = importlib.import_module("edge.models.made_up")
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((checkpoint.path / "config.json").read_text())
    config = {ours: config[theirs] for ours, theirs in made_up.NAMES.items()}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "made_up"}))
    tensors = load_file(checkpoint.path / "model.safetensors")
    renamed = {
        name.removeprefix("model.").replace("layers.", "blocks/"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")
    prompt = checkpoint.prompt(5)
    with (
        edge.Cluster.local(peers=2, threads=1) as cluster,
        cluster.load(folder, dtype="float32", plan="pipeline") as model,
    ):
        tokens = model.generate(prompt, max_new_tokens=8).token_ids
    assert list(tokens) == checkpoint.greedy(prompt, 8)


def test_a_new_command(
    add_module: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_module("edge.cli.commands", COMMAND)
    monkeypatch.setitem(COMMANDS, "made_up", "Say hello.")
    assert "Say hello." in run_edge("--help").out
    assert run_edge("made_up", "you").out == "Hello, you\n"
    assert run_edge("made_up").code == 2
