"""Keys and values that leave a GPU's blocks and come back, on interpreted kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.errors import RequestError
from edge.offload import DiskKVTier, KVTier, KVTiers, MemoryKVTier
from edge.protocol.step import StepLimits
from tests.support.checkpoints import TinyCheckpoint
from tests.support.triton_shards import TritonPlan, chunk, decode, triton_plan

Checkpoints = Callable[..., TinyCheckpoint]

CONTEXT = 20
"""More than a block of tokens."""

LIMITS = StepLimits(
    context_tokens=CONTEXT,
    chunk_tokens=16,
    requests=2,
    cached_tokens=2 * CONTEXT,
    disk_tokens=8 * CONTEXT,
)
NEW_TOKENS = 2
HEADS = (2, 1)


def begin(model: TritonPlan, name: str, prompt: list[int]) -> int:
    return int(model.forward(chunk(name, prompt, rows=1))[0, -1].argmax())


def test_eight_requests_over_memory_for_two(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """In turns of one token, two at a time; some find no room in the host's memory."""
    checkpoint = tiny_checkpoint("llama", layers=1, heads=HEADS)
    lengths = [*range(2, 9), LIMITS.chunk_tokens]  # the last one's next token needs a second block
    prompts = {str(n): checkpoint.prompt(length) for n, length in enumerate(lengths)}
    expected = {name: checkpoint.greedy(prompt, NEW_TOKENS) for name, prompt in prompts.items()}
    memory, disk = MemoryKVTier(2_500), DiskKVTier(tmp_path / "kv", 1 << 30)
    tier = KVTiers(memory, disk)
    with triton_plan(checkpoint, "solo", tmp_path, limits=LIMITS, kv_tier=tier) as model:
        (program,) = model.programs[0]
        found: dict[str, list[int]] = {}
        for name, prompt in prompts.items():
            found[name] = [begin(model, name, prompt)]
            program.swap_out(name)
        assert memory.used_bytes
        assert disk.used_bytes
        names = list(prompts)
        for turn in range(1, NEW_TOKENS):
            for pair in zip(names[::2], names[1::2], strict=True):
                step = decode(*((n, found[n][-1], len(prompts[n]) + turn - 1) for n in pair))
                for name, row in zip(pair, model.forward(step), strict=True):
                    found[name].append(int(row[-1].argmax()))
                    program.swap_out(name)
        for name in names:
            model.release(name)
        assert tier.used_bytes == 0
    tier.close()
    assert found == expected


def test_packed_codes_that_were_swapped_out_come_back_to_the_bit(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Codes with their scales; and only what is new is written again."""
    checkpoint = tiny_checkpoint("qwen3", layers=1, heads=HEADS)
    tokens = checkpoint.prompt(CONTEXT)
    tier = DiskKVTier(tmp_path / "kv", 1 << 30)
    with triton_plan(
        checkpoint, "solo", tmp_path, limits=LIMITS, kv_dtype="int4", kv_tier=tier
    ) as model:
        (program,) = model.programs[0]

        def logits(request: str, *, is_moved: bool) -> np.ndarray:
            parts = [model.forward(chunk(request, tokens[:16])).copy()]
            written = []
            for position in (16, 17):
                if is_moved:
                    program.swap_out(request)
                    program.swap_out(request)  # it is gone already
                    written.append(tier.written_bytes)
                    model.forward(chunk("other", tokens[:2], rows=0))  # takes its blocks
                parts.append(model.forward(chunk(request, [tokens[position]], position)).copy())
                program.release("other")
            if is_moved:
                assert written[1] - written[0] == written[0] // 16
            program.release(request)
            return np.concatenate(parts, axis=1)

        assert np.array_equal(logits("a", is_moved=True), logits("b", is_moved=False))
    tier.close()


def test_a_request_longer_than_memory_has_the_bits_of_one_that_is_not(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Weights stream, too; the host has no room for all of it, and once it leaves altogether."""
    checkpoint = tiny_checkpoint("llama", layers=3, heads=HEADS)
    tokens = checkpoint.prompt(CONTEXT)

    def logits(limits: StepLimits, tier: KVTier | None, streamed: int) -> list[np.ndarray]:
        with triton_plan(
            checkpoint, "solo", tmp_path, limits=limits, kv_dtype="int4", kv_tier=tier,
            streamed=streamed, host_layers=1,
        ) as model:  # fmt: skip
            (program,) = model.programs[0]
            found = [model.forward(chunk("a", tokens[:16], rows=1)).copy()]
            if tier is not None:
                program.swap_out("a")
            found.append(model.forward(decode(("a", tokens[16], 16))).copy())
            model.release("a")
            return found

    expected = logits(replace(LIMITS, disk_tokens=0), None, 0)
    tier = KVTiers(MemoryKVTier(250), DiskKVTier(tmp_path / "kv", 1 << 30))
    found = logits(replace(LIMITS, cached_tokens=12), tier, 2)
    assert tier.second.written_bytes > 0
    assert tier.used_bytes == 0
    tier.close()
    for one, another in zip(found, expected, strict=True):
        assert np.array_equal(one, another)


def test_what_is_longer_than_every_layer_of_memory_is_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama", layers=1, heads=HEADS)
    tokens = checkpoint.prompt(CONTEXT)
    limits = replace(LIMITS, cached_tokens=18)
    tier = MemoryKVTier(1 << 20)
    with triton_plan(checkpoint, "solo", tmp_path, limits=limits, kv_tier=tier) as model:
        model.forward(chunk("a", tokens[:16], rows=0))
        with pytest.raises(RequestError, match="a single layer of a request of 19 tokens"):
            model.forward(chunk("a", tokens[16:19], 16))
