"""Shards larger than a device's memory, on interpreted kernels: layers come and go, bits stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge.errors import RequestError
from edge.offload import StoreCorruptError
from edge.offload.cache.verified_shard import mark_intact
from edge.partition import WeightTiers
from tests.support.checkpoints import TinyCheckpoint
from tests.support.triton_shards import TritonPlan, chunk, triton_plan

Checkpoints = Callable[..., TinyCheckpoint]

LARGEST_DIFFERENCE = 1e-4

PROMPT_TOKENS = 3
TOKENS = 1
HEADS = (2, 1)


def answer(model: TritonPlan, tokens: list[int], request: str = "a") -> np.ndarray:
    """Logits [TOKENS + 1, vocab]: of the prompt's last token, and of tokens after it."""
    rows = [model.forward(chunk(request, tokens[:PROMPT_TOKENS], rows=1))]
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + TOKENS):
        rows.append(model.forward(chunk(request, tokens[position : position + 1], position)))
    model.release(request)
    found: np.ndarray = np.concatenate(rows, axis=1)[0]
    return found


def tiers_of(model: TritonPlan) -> list[WeightTiers]:
    return [program._streamed.tiers for stage in model.programs for program in stage]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "layout", "dtype", "layers", "host_layers", "expected"),
    [
        ("llama", "solo", "float32", 4, 0, (0, 0, 4)),
        ("qwen3", "tensor_2", "int4", 3, 3, (0, 3, 0)),
        ("llama", "solo", "float32", 2, 0, (2, 0, 0)),
        ("mixtral", "solo", "int4", 3, 0, (0, 0, 3)),
    ],
)
def test_logits_are_those_of_layers_in_memory(
    tiny_checkpoint: Checkpoints,
    family: str,
    layout: str,
    dtype: str,
    layers: int,
    host_layers: int,
    expected: tuple[int, int, int],
    tmp_path: Path,
) -> None:
    """Bit for bit. Two layers are held at once; where there are no more, they stay."""
    checkpoint = tiny_checkpoint(family, layers=layers, heads=HEADS)
    tokens = checkpoint.prompt(PROMPT_TOKENS + TOKENS)
    # Experts as a GPU computes them; their routers stay float32.
    activations = "bfloat16" if family == "mixtral" else None
    with triton_plan(checkpoint, layout, tmp_path, dtype=dtype, activations=activations) as model:
        in_memory = answer(model, tokens)
    with triton_plan(
        checkpoint,
        layout,
        tmp_path,
        dtype=dtype,
        activations=activations,
        streamed=layers,
        host_layers=host_layers,
    ) as model:
        found = answer(model, tokens)
        for tiers in tiers_of(model):
            assert (tiers.resident, tiers.pinned, tiers.on_disk) == expected
            assert tiers.resident + tiers.window == 2
    assert np.array_equal(found, in_memory)
    if dtype == "float32":
        difference = np.abs(found - checkpoint.logits(tokens)[PROMPT_TOKENS - 1 :])
        assert difference.max() <= LARGEST_DIFFERENCE


def test_a_budget_that_moves_changes_no_bit(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Between any two steps, also of one request, and for a shard that had all in memory before."""
    checkpoint = tiny_checkpoint("llama_with_biases", layers=4, heads=HEADS)
    tokens = checkpoint.prompt(4)
    with triton_plan(checkpoint, "solo", tmp_path, dtype="int4", host_layers=3) as model:
        (program,) = model.programs[0]

        def rows(counts: list[int], request: str) -> np.ndarray:
            found = []
            for position, (token, count) in enumerate(zip(tokens, counts, strict=True)):
                program.stream(count)
                found.append(model.forward(chunk(request, [token], position)))
            return np.concatenate(found)

        in_memory = rows([0] * 4, "a")
        model.release("a")
        assert np.array_equal(rows([0, 4, 1, 4], "b"), in_memory)
        assert program.disk_wait_s > 0


def test_a_damaged_file_is_noticed_and_made_again(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama", layers=4, heads=HEADS)

    def first() -> np.ndarray:
        with triton_plan(checkpoint, "solo", tmp_path, dtype="int4", streamed=4) as model:
            return model.forward(chunk("a", [1])).copy()

    expected = first()
    (packed,) = tmp_path.glob("packed/*/weights")
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 1
    packed.write_bytes(content)
    mark_intact(packed.parent)  # as a disk does that gives back other bytes than it was given
    with pytest.raises(StoreCorruptError, match="other bytes"):
        first()
    assert np.array_equal(first(), expected)


def test_without_a_folder_for_packed_weights_nothing_changes(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama", layers=1, heads=HEADS)
    with triton_plan(checkpoint, "solo", tmp_path, dtype="int4", has_folder=False) as model:
        (program,) = model.programs[0]
        before = model.forward(chunk("a", [1])).copy()
        with pytest.raises(RequestError, match="no folder to keep packed weights in"):
            program.stream(1)
        assert np.array_equal(model.forward(chunk("b", [1])), before)
