"""Requests with states, on interpreted kernels: a state is right wherever its request has been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.registry import open_backend
from edge.errors import RequestError
from edge.models.short_convolution import ShortConvolution
from edge.models.spec import LayerSpec
from edge.offload import KVTier, MemoryKVTier
from edge.profiling.random_weights import written_weights
from edge.protocol.step import StepLimits
from edge.transport import SoloCollective
from edge.weights.layout import shard_layout
from tests.support.checkpoints import TinyCheckpoint
from tests.support.formats import uniform_format
from tests.support.plans import make_plan
from tests.support.specs import plain_layer, spec_of
from tests.support.triton_face import only_interpreted
from tests.support.triton_shards import (
    TritonPlan,
    chunk,
    decode,
    triton_plan,
    without_self_check,
)

Checkpoints = Callable[..., TinyCheckpoint]

LIMITS = StepLimits(
    context_tokens=32,
    chunk_tokens=8,
    requests=2,
    cached_tokens=32,
    disk_tokens=1000,
    saved_states=2,
)
LARGEST_DIFFERENCE = 1e-4
FAMILIES = [("lfm2", (2, 1)), ("qwen3_5", (2, 1))]


@pytest.mark.parametrize(("family", "heads"), FAMILIES)
def test_states_go_where_their_requests_go(
    tiny_checkpoint: Checkpoints, family: str, heads: tuple[int, int], tmp_path: Path
) -> None:
    """Chunks shorter than what a convolution sees, steps of several, a slot that another had, moves
    out and in, and copies."""
    checkpoint = tiny_checkpoint(family, layers=3, heads=heads)
    tokens, others = checkpoint.prompt(20), checkpoint.prompt(5)
    wanted, beside = checkpoint.logits(tokens), checkpoint.logits(others)
    tier = MemoryKVTier(1 << 20)
    with triton_plan(checkpoint, "solo", tmp_path, limits=LIMITS, kv_tier=tier) as model:
        (program,) = model.programs[0]

        def check(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
            assert np.abs(found - expected).max() <= LARGEST_DIFFERENCE

        def go_on(request: str, first: int, last: int, tokens: Sequence[int] = tokens) -> None:
            found = model.forward(chunk(request, tokens[first:last], first))
            check(found[0], checkpoint.logits(tokens)[first:last])

        go_on("a", 0, 2)
        go_on("a", 2, 3)
        go_on("b", 0, 4, others)
        check(model.forward(decode(("b", others[4], 4), ("a", tokens[3], 3)))[:, 0],
              np.stack([beside[4], wanted[3]]))  # fmt: skip
        with pytest.raises(RequestError, match="at token 3, but its state is at 4"):
            go_on("a", 3, 4)
        assert program.states("a", 4) is None, "nobody has saved it"
        program.swap_out("a")
        model.release("b")
        go_on("c", 0, 5, others)  # where "a" was, and then where "b" was
        go_on("a", 4, 9)
        model.release("c")
        assert program.take("d", "a", 8, moves=False) == 0
        assert program.take("d", "a", 9, moves=False) == 0, "nobody has saved it"
        program.save_state("a", 9, 1)
        go_on("a", 9, 10)
        program.save_state("a", 9, 0)  # it has more by now
        saved = program.rows("a", 0, 9), program.states("a", 9)
        assert program.saved("a") == [9]
        assert program.take("d", "a", 9, moves=False) == 9
        go_on("d", 9, 11)
        program.swap_out("d")
        go_on("a", 10, 18)
        assert tier.written_bytes
        program.keep("a", 9)
        go_on("d", 11, 12)
        go_on("b", 0, 2, others)  # kept ones have no state of their own
        model.release("b")
        assert program.take("e", "a", 9, moves=True) == 9
        go_on("e", 9, 12)
        assert program.take("f", "a", 9, moves=True) == 0
        model.release("d")
        assert program.take("f", "e", 9, moves=False) == 9
        go_on("f", 9, 10)
        model.release("e")
        assert program.take("g", "f", 9, moves=True) == 0, "it was the one's that is gone"
        model.release("f")
        rows, states = saved
        assert rows is not None
        assert states is not None
        assert [each.shape for each in states] == [each.shape for each in program.states_like(9)]
        program.put_rows("h", 0, rows)
        program.put_states("h", 9, states)
        go_on("h", 9, 12)


def test_a_request_longer_than_memory_keeps_its_states(tmp_path: Path) -> None:
    """Bit for bit, although keys and values of its layers come and go."""
    only_interpreted()
    mixer = ShortConvolution(num_units=2, unit_channels=7, convolution=3, bias=False)
    plain = plain_layer()
    spec = spec_of([LayerSpec(mixer=mixer, feed_forward=plain.feed_forward), plain, plain, plain])
    form = uniform_format("float32")
    layout = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)

    def logits(cached_tokens: int, tier: KVTier | None) -> list[NDArray[np.float32]]:
        limits = replace(LIMITS, cached_tokens=cached_tokens, disk_tokens=1000 * (tier is not None))
        with written_weights(layout, form, tmp_path) as weights, without_self_check():
            program = open_backend("triton", threads=1).load(
                spec, layout, weights, form, limits=limits, kv_tier=tier
            )
            steps = [chunk("a", (1, 2, 3, 4, 5, 6), 0), chunk("a", range(6, 9), 6)]
            steps += [decode(("a", 9, 9))]
            found = [program.forward(step, None, SoloCollective()).copy() for step in steps]
            program.close()
        return found

    tier = MemoryKVTier(1 << 20)
    for one, another in zip(logits(7, tier), logits(32, None), strict=True):
        assert np.array_equal(one, another)
    assert tier.written_bytes


def test_no_more_requests_than_states_are_kept_for(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("lfm2", layers=2, heads=(2, 1))

    def begin(model: TritonPlan, request: str) -> None:
        model.forward(chunk(request, checkpoint.prompt(1), rows=0))

    with triton_plan(checkpoint, "solo", tmp_path, limits=LIMITS) as model:
        begin(model, "a")
        begin(model, "b")
        with pytest.raises(RequestError):
            begin(model, "c")
        model.release("a")
        begin(model, "c")
