"""Shards of one stage in one process, and chunks that they compute in halves or whole.

A script: once a process has computed as a peer does, ONNX Runtime shares one pool of threads in it
and refuses sessions with pools of their own, which other tests have.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.backends import overlap
from edge.backends.interface import StageProgram
from edge.backends.registry import open_backend
from edge.profiling.random_weights import written_weights
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.transport import Collective, PeerLostError
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.plans import make_plan
from tests.support.specs import plain_spec
from tests.support.transport_pairs import group, on_every_rank

SPEC = plain_spec(
    family="llama", num_layers=4, hidden_size=60, num_heads=6, num_kv_heads=2, head_size=20,
    ffn_columns=90, vocab_size=50, norm_epsilon=1e-5, activation="silu", context_tokens=300,
    inverse_frequencies=tuple(100.0 ** -(i / 10) for i in range(10)), windows=(None, 40, None, 7),
    qkv_bias=False, output_bias=False, mlp_bias=False, query_key_norm=False, tied_embeddings=False,
)  # fmt: skip
LIMITS = StepLimits(context_tokens=300, chunk_tokens=200, requests=3, cached_tokens=900)
SIZES = {"tensor_2": 2, "tensor_3": 3}

Array = NDArray[np.float32]


@contextmanager
def programs(folder: Path, layout: str) -> Iterator[list[StageProgram]]:
    """The shards of the layout's one stage, by rank."""
    plan = make_plan(SPEC, layout, model="m")
    chosen = uniform_format("float32")
    backend = open_backend("ort", threads=1)
    with ExitStack() as stack:
        loaded = []
        for rank in range(SIZES[layout]):
            shard = shard_layout(SPEC, plan, stage=0, rank=rank)
            weights = stack.enter_context(written_weights(shard, chosen, folder))
            program = backend.load(SPEC, shard, weights, chosen, limits=LIMITS)
            stack.callback(program.close)
            loaded.append(program)
        yield loaded


def chunk(request: str, position: int, tokens: int, logit_rows: int) -> Step:
    ids = tuple(7 * token % SPEC.vocab_size for token in range(position, position + tokens))
    entry = StepEntry(request=request, position=position, tokens=ids, logit_rows=logit_rows)
    return Step(entries=(entry,))


def results(
    loaded: list[StageProgram], members: list[Collective], steps: list[Step]
) -> list[Array]:
    """Each rank's logits of all steps, below each other."""

    def run(member: Collective) -> Array:
        program = loaded[member.rank]
        return np.concatenate(
            [program.forward(step, None, member)[0].copy() for step in steps], axis=0
        )

    return on_every_rank(members, run)


def check_bits(layout: str, folder: Path) -> None:
    """In the middle of a prompt, at its start, and with all logits, some and none."""
    with programs(folder, layout) as loaded, group("tcp", SIZES[layout]) as members:
        whole = [chunk("a", 0, 130, 130), chunk("a", 130, 150, 80), chunk("a", 280, 1, 1)]
        in_halves = results(loaded, members, whole)
        overlap.MIN_TOKENS = LIMITS.chunk_tokens + 1
        cut = [
            chunk("b", 0, 64, 64), chunk("b", 64, 66, 66),
            chunk("b", 130, 64, 0), chunk("b", 194, 86, 80), chunk("b", 280, 1, 1),
        ]  # fmt: skip
        for halves, chunks in zip(in_halves, results(loaded, members, cut), strict=True):
            assert halves.shape[0] == 211
            assert np.isfinite(halves).all()
            assert halves.tobytes() == chunks.tobytes()
        assert in_halves[0].any()


def check_lost_peer(layout: str, folder: Path) -> None:
    """Whoever computes hears that a peer is gone, from the thread that sums."""
    with programs(folder, layout) as loaded, group("tcp", SIZES[layout]) as members:
        members[1].close()
        try:
            loaded[0].forward(chunk("a", 0, 150, 0), None, members[0])
        except PeerLostError:
            return
        raise AssertionError("the lost peer went unnoticed")


if __name__ == "__main__":
    check_bits(sys.argv[1], Path(sys.argv[2]))
    check_lost_peer(sys.argv[1], Path(sys.argv[2]))
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
