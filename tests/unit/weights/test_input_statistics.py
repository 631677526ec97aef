"""What a model's products were given, in a file, and what is told of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import CapacityError, CheckpointError
from edge.kernels.matmul_nbits.calibrated import quantize_calibrated
from edge.kernels.matmul_nbits.reference import dequantize, quantize
from edge.models.spec import ModelSpec
from edge.weights import input_statistics, observation
from edge.weights.block_matrices import Blocks
from edge.weights.checkpoint import Checkpoint
from edge.weights.input_statistics import (
    FILE,
    InputStatistics,
    statistics_folder,
    statistics_writer,
    write_observed,
)
from edge.weights.layout import whole_layout
from edge.weights.observation import observed_inputs
from edge.weights.sensitivity import choices_of, least_bytes
from tests.support.checkpoints import TinyCheckpoint
from tests.support.specs import plain_spec

Checkpoints = Callable[..., TinyCheckpoint]
Array = NDArray[np.float32]

SPEC = plain_spec(
    num_layers=2, hidden_size=48, num_heads=3, head_size=16, ffn_columns=80, vocab_size=50
)
TOKENS = 40


def inputs(matrix: str, columns: int) -> Array:
    """Of one matrix, as many tokens; some columns are much larger than others."""
    random = np.random.default_rng(sum(matrix.encode()))
    values: Array = random.standard_normal((TOKENS, columns), np.float32)
    return values * np.float32(10.0) ** (np.arange(columns) % 3 - 1).astype(np.float32)


def write(path: Path, spec: ModelSpec) -> None:
    with statistics_writer(path, spec) as writer:
        for run in observed_inputs(whole_layout(spec)):
            width = len(whole_layout(spec).matrix(run.matrix).columns)
            part = inputs(run.matrix, width)[:, run.inputs]
            write_observed(writer, run, part.T @ part)


def test_roles_of_a_fused_matrix_have_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation, "RUN_COLUMNS", 32)
    write(tmp_path / FILE, SPEC)
    with InputStatistics(tmp_path / FILE, SPEC) as found:
        for role in ("gate", "up"):
            first, last = found.grams(f"layers.1.{role}.weight")
            x = inputs("layers.1.gate_up", 48)
            np.testing.assert_array_equal(first, x[:, :32].T @ x[:, :32])
            np.testing.assert_array_equal(last, x[:, 32:].T @ x[:, 32:])
        assert [len(each) for each in found.grams("layers.0.down.weight")] == [32, 32, 16]
        assert [len(each) for each in found.grams("head")] == [32, 16]


def test_another_models_are_refused(tmp_path: Path) -> None:
    write(tmp_path / FILE, SPEC)
    other = plain_spec(
        num_layers=3, hidden_size=48, num_heads=3, head_size=16, ffn_columns=80, vocab_size=50
    )
    with pytest.raises(CheckpointError, match="has statistics of another model; remove it"):
        InputStatistics(tmp_path / FILE, other)
    (tmp_path / FILE).write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="damaged"):
        InputStatistics(tmp_path / FILE, SPEC)


def test_the_oldest_go_for_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(run.nbytes for run in observed_inputs(whole_layout(SPEC)))
    monkeypatch.setattr(input_statistics, "_LIMIT_BYTES", size * 5 // 2)
    for name in ("a", "b", "c"):
        with statistics_folder(tmp_path, name, SPEC) as use:
            write(use.folder / FILE, SPEC)
    assert sorted(each.name for each in tmp_path.iterdir() if each.name[0] != ".") == ["b", "c"]
    monkeypatch.setattr(input_statistics, "_LIMIT_BYTES", size // 2)
    with statistics_folder(tmp_path, "c", SPEC) as use:  # what is there takes no more
        assert (use.folder / FILE).exists()
        assert (tmp_path / "b").exists()
    with statistics_folder(tmp_path, "d", SPEC) as use:  # larger than the limit: it has all
        write(use.folder / FILE, SPEC)
        assert not (tmp_path / "b").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=size // 2))
    with statistics_folder(tmp_path, "d", SPEC), pytest.raises(CapacityError):
        statistics_folder(tmp_path, "e", SPEC)


@pytest.mark.parametrize("has_room", [True, False])
def test_what_each_kind_would_lose(
    has_room: bool, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Against the errors of the products, computed with the inputs themselves. Where not all can
    have 4 bits, some may have 2, and all are rounded as they will be."""
    checkpoint = tiny_checkpoint("larger_llama", layers=2)
    spec = checkpoint.spec
    write(tmp_path / FILE, spec)
    seen: list[tuple[int, int]] = []
    with (
        Checkpoint.open(checkpoint.path) as opened,
        InputStatistics(tmp_path / FILE, spec) as found,
    ):
        choices = choices_of(
            opened,
            found,
            tokens=TOKENS,
            total_bytes=least_bytes(spec, True, 4) - (not has_room),
            packed=True,
            on_matrix=lambda done, total: seen.append((done, total)),
        )
    assert seen == [(number, len(choices)) for number in range(len(choices))]
    assert len(choices) == 7 * spec.num_layers + 1
    some_bits = (4,) if has_room else (2, 4)
    kinds: list[Blocks] = [
        Blocks(bits, size, zero_points=True) for bits in some_bits for size in (128, 64, 32)
    ]
    kinds.append(Blocks(8, 128))
    assert [choice.kind for choice in choices["layers.1.value.weight"]] == kinds
    assert choices["layers.1.down.weight"][0].kind == Blocks(some_bits[0], 64, zero_points=True), (
        "cut by columns"
    )

    value = checkpoint.weights["model.layers.1.self_attn.v_proj.weight"]
    x = inputs("layers.1.qkv", value.shape[1])
    if has_room:
        coded = quantize(value, bits=4, block_size=64, zero_points=True)
    else:
        coded = quantize_calibrated(value, [x.T @ x], bits=4, block_size=64, zero_points=True)
    error = np.square(x @ (value - dequantize(coded)).T).sum() / np.square(x @ value.T).sum()
    (choice,) = (
        c for c in choices["layers.1.value.weight"] if c.kind == Blocks(4, 64, zero_points=True)
    )
    assert choice.loss == pytest.approx(0.4 * error, rel=1e-3)
    arrays = Blocks(4, 64, zero_points=True).arrays(*value.shape)
    assert choice.num_bytes == sum(each.nbytes for each in arrays)

    head = checkpoint.weights["lm_head.weight"]
    x = inputs("head", head.shape[1])
    rounded = dequantize(quantize(head, bits=8, block_size=128))
    error = np.square(x @ (head - rounded).T).mean() / 2
    assert choices["head"][-1].loss == pytest.approx(error, rel=0.3), "of a part of its rows"
    for each in choices.values():
        losses = [choice.loss for choice in each]
        assert losses == sorted(losses, reverse=True)
