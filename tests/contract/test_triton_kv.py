"""Keys and values that leave a GPU's blocks and come back, on interpreted kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge.backends.base import StageProgram, StepLimits, open_backend
from edge.errors import RequestError
from edge.formats import weight_format
from offload import DiskKVTier, KVTiers, MemoryKVTier, PrefixStore, StoreFullError
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.triton_shards import TritonPlan, chunk, decode, shard_weights, triton_plan

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


def begin(model: TritonPlan, name: str, prompt: list[int]) -> int:
    return int(model.forward(chunk(name, prompt, rows=1))[0, -1].argmax())


def test_eight_requests_over_memory_for_two(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """In turns of one token, two at a time; some find no room in the host's memory."""
    checkpoint = tiny_checkpoint("llama", layers=1)
    lengths = [*range(2, 9), LIMITS.chunk_tokens]  # the last one's next token needs a second block
    prompts = {str(n): checkpoint.prompt(length) for n, length in enumerate(lengths)}
    expected = {name: checkpoint.greedy(prompt, NEW_TOKENS) for name, prompt in prompts.items()}
    memory, disk = MemoryKVTier(5_000), DiskKVTier(tmp_path / "kv", 1 << 30)
    tier = KVTiers(memory, disk)
    with triton_plan(checkpoint, "solo", tmp_path, limits=LIMITS, kv_tier=tier) as model:
        (program,) = model.programs[0]
        found: dict[str, list[int]] = {}
        for name, prompt in prompts.items():
            found[name] = [begin(model, name, prompt)]
            program.save(name)
        assert memory.used_bytes
        assert disk.used_bytes
        names = list(prompts)
        for turn in range(1, NEW_TOKENS):
            for pair in zip(names[::2], names[1::2], strict=True):
                step = decode(*((n, found[n][-1], len(prompts[n]) + turn - 1) for n in pair))
                for name, row in zip(pair, model.forward(step), strict=True):
                    found[name].append(int(row[-1].argmax()))
                    program.save(name)
        for name in names:
            model.release(name)
        assert tier.used_bytes == 0
    tier.close()
    assert found == expected


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
def test_what_was_saved_comes_back_to_the_bit(
    tiny_checkpoint: Checkpoints, kv_dtype: str, tmp_path: Path
) -> None:
    """Codes with their scales; and only what is new is written again."""
    checkpoint = tiny_checkpoint("qwen3", layers=1)
    tokens = checkpoint.prompt(CONTEXT)
    tier = DiskKVTier(tmp_path / "kv", 1 << 30)
    with triton_plan(
        checkpoint, "solo", tmp_path, limits=LIMITS, kv_dtype=kv_dtype, kv_tier=tier
    ) as model:
        (program,) = model.programs[0]

        def logits(request: str, *, is_moved: bool) -> np.ndarray:
            parts = [model.forward(chunk(request, tokens[:16])).copy()]
            written = []
            for position in (16, 17):
                if is_moved:
                    program.save(request)
                    program.save(request)  # it is gone already
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


def test_a_prefix_on_disk_is_that_of_another_program(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """As after a restart: the tokens behind it get the very logits."""
    checkpoint = tiny_checkpoint("llama", layers=2)
    tokens = checkpoint.prompt(CONTEXT)
    logits, digests = [], []
    key = "0" * 64
    for has_run in (False, True):
        store = PrefixStore(tmp_path / "prefixes", 1 << 30)
        with triton_plan(checkpoint, "solo", tmp_path, limits=LIMITS, kv_dtype="int8") as model:
            (program,) = model.programs[0]
            digests.append(program.cache_digest)
            if has_run:
                rows = program.new_rows(16)
                assert store.get(key, rows)
                program.put_rows("a", 0, rows)
            else:
                assert program.rows("a", 0, 16) is None
                model.forward(chunk("a", tokens[:16], rows=0))
                assert program.rows("a", 0, 17) is None
                assert store.put(key, program.rows("a", 0, 16) or [])
            logits.append(model.forward(chunk("a", tokens[16:], 16)).copy())
    assert np.array_equal(*logits)
    assert digests[0] == digests[1] != ""


def test_a_tier_without_room_leaves_a_request_where_it_is(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama", layers=1)
    tokens = checkpoint.prompt(5)
    with triton_plan(
        checkpoint, "solo", tmp_path, limits=LIMITS, kv_tier=MemoryKVTier(1000)
    ) as model:
        (program,) = model.programs[0]
        first = begin(model, "a", tokens)
        assert first == checkpoint.greedy(tokens, 1)[0]
        with pytest.raises(StoreFullError):
            program.save("a")
        again = model.forward(chunk("a", [first], 5))
        assert int(again[0, -1].argmax()) == checkpoint.greedy(tokens, 2)[1]


def test_requests_longer_than_memory_are_refused_at_once(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama", layers=1)
    plan = make_plan(checkpoint.spec, "solo", model="m")
    chosen = weight_format("float32")
    layout, weights = shard_weights(checkpoint, plan, 0, 0, chosen, tmp_path)
    limits = StepLimits(
        context_tokens=40, chunk_tokens=8, requests=1, cached_tokens=20, disk_tokens=100
    )

    def load() -> StageProgram:
        backend = open_backend("triton", threads=1)
        tier = MemoryKVTier(1 << 20)
        return backend.load(checkpoint.spec, layout, weights, chosen, limits=limits, kv_tier=tier)

    with pytest.raises(RequestError, match=r"may have 40 tokens, .* of 20; .* more --kv-memory"):
        load()
