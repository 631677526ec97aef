"""A new model family, weight format or command: one file, and its name in one table.

Each test adds a made-up one from a file of its own; nothing else of Edge is touched.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edge
from edge.cli.main import COMMANDS
from edge.models import families
from edge.partition import Parallel
from edge.weights import formats
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import edge as run_edge

LITTLE = "16MiB"
"""Enough for the model, and peers measure themselves with less of it: in half the time."""

FAMILY = '''
"""A Llama that spells everything otherwise."""

from edge.models.config import Config
from edge.models.decoder import decoder
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


FORMAT = '''
"""Weights rounded to bfloat16, held as float32."""

import ml_dtypes
import numpy as np

from edge.weights.encoding import Encoding
from edge.weights.float_matrices import Floats, FloatSource
from edge.weights.recipe import Recipe


class Source(FloatSource):
    def matrix(self, part):
        (found,) = super().matrix(part).values()
        return {"weight": found.astype(ml_dtypes.bfloat16).astype(np.float32)}


def encoding(spec, block_size):
    def open_source(tensors, *, cache_root, on_progress):
        return Source(tensors.store, tensors.tensor_name)

    return Encoding(recipe=Recipe(Floats()), open=open_source)
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
        edge.Cluster.local(peers=2, threads=1, model_memory=LITTLE) as cluster,
        cluster.load(folder, dtype="float32", plan="pipeline") as model,
    ):
        tokens = model.generate(prompt, max_new_tokens=8).token_ids
    assert list(tokens) == checkpoint.greedy(prompt, 8)


@pytest.mark.parametrize("plan", ["pipeline", "tensor"])
def test_a_new_weight_format(
    plan: Parallel,
    add_module: Callable[[str, str], None],
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers need not know it either: they know the kind of matrix that it makes."""
    add_module("edge.weights", FORMAT)
    made_up = importlib.import_module("edge.weights.made_up")
    monkeypatch.setitem(formats.ENCODINGS, "made_up", made_up.encoding)
    checkpoint = tiny_checkpoint("llama")
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (checkpoint.path / name).exists():
            (rounded / name).write_bytes((checkpoint.path / name).read_bytes())
    tensors = load_file(checkpoint.path / "model.safetensors")
    matrices = {name for name, each in tensors.items() if each.ndim == 2 and "embed" not in name}
    save_file(
        {
            name: each.astype(ml_dtypes.bfloat16).astype(each.dtype) if name in matrices else each
            for name, each in tensors.items()
        },
        rounded / "model.safetensors",
    )
    prompt = checkpoint.prompt(9)
    with edge.Cluster.local(peers=2, threads=1, model_memory=LITTLE) as cluster:
        with cluster.load(checkpoint.path, dtype=cast(Any, "made_up"), plan=plan) as model:
            found = model.logits(prompt)
        with cluster.load(rounded, dtype="float32", plan=plan) as model:
            wanted = model.logits(prompt)
        with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
            exact = model.logits(prompt)
    np.testing.assert_array_equal(found, wanted)
    assert not np.array_equal(found, exact)


def test_a_new_command(
    add_module: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_module("edge.cli.commands", COMMAND)
    monkeypatch.setitem(COMMANDS, "made_up", "Say hello.")
    assert "Say hello." in run_edge("--help").out
    assert run_edge("made_up", "you").out == "Hello, you\n"
    assert run_edge("made_up").code == 2
