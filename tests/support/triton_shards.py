"""Shards of tiny checkpoints as interpreted Triton programs in this process.

Import this at the top of a test module: Triton decides at its first import that it interprets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights, StageProgram
from edge.offload import DerivedCache, KVTier, padded
from edge.partition import Plan
from edge.planning.load_options import LoadOptions
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.runs.shipping import describe_shard
from edge.transport import Collective
from edge.weights.block_matrices import Blocks
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import Dtype, WeightFormat, kv_bits
from edge.weights.layout import ShardLayout, shard_layout
from edge.weights.matrix_kind import WeightSource
from tests.support.plans import make_plan, streaming
from tests.support.transport_pairs import group, on_every_rank
from tests.support.triton_face import only_interpreted

if TYPE_CHECKING:
    from tests.support.checkpoints import TinyCheckpoint

LIMITS = StepLimits(context_tokens=48, chunk_tokens=32, requests=3, cached_tokens=64)

Array = NDArray[np.float32]


class TritonPlan:
    """Every shard of a plan as a program. Stages run one after the other, shards in threads."""

    def __init__(self, programs: list[list[StageProgram]], members: list[list[Collective]]) -> None:
        self.programs = programs
        self._members = members

    def forward(self, step: Step) -> Array:
        """Logits [batch, rows, vocab]."""
        hidden: Array | None = None
        for programs, members in zip(self.programs, self._members, strict=True):

            def run(
                member: Collective,
                programs: list[StageProgram] = programs,
                hidden: Array | None = hidden,
            ) -> Array:
                return programs[member.rank].forward(step, hidden, member).copy()

            parts = on_every_rank(members, run)
            hidden = parts[0]
        return np.concatenate(parts, axis=-1)

    def release(self, request: str) -> None:
        for programs in self.programs:
            for program in programs:
                program.release(request)


@contextmanager
def without_self_check() -> Iterator[None]:
    """Loads of programs whose results are compared anyway: interpreted, the check of each load
    takes as long as the steps. tests/unit/backends/test_triton_self_check.py loads with it."""
    only_interpreted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.backends.triton.loading.run_self_check", lambda *_, **__: None)
        yield


@contextmanager
def triton_plan(
    checkpoint: TinyCheckpoint,
    layout: str,
    folder: Path,
    *,
    dtype: str = "float32",
    kv_dtype: Any = "float32",
    limits: StepLimits = LIMITS,
    activations: str | None = None,
    streamed: int = 0,
    host_layers: int = 0,
    has_folder: bool = True,
    kv_tier: KVTier | None = None,
) -> Iterator[TritonPlan]:
    """activations: what products compute with, if not the usual.

    streamed: layers of each shard, the last ones, that are not in its device's memory;
    host_layers: how many of them its host has room for. has_folder: for packed weights."""
    only_interpreted()
    import torch

    from edge.backends.triton.device import Device
    from edge.backends.triton.loading import load

    stack = ExitStack()
    opened = stack.enter_context(Checkpoint.open(checkpoint.path))
    # GPUs take no blocks of files.
    chosen = LoadOptions(dtype=cast(Dtype, dtype), packs_blocks=True).weight_format(opened)
    spec = chosen.graded(checkpoint.spec)
    multiple = chosen.recipe.column_multiple({"down.weight"})
    plan = make_plan(spec, layout, model="m", column_multiple=multiple)
    plan = streaming(plan, streamed)
    packed = DerivedCache(folder / "packed", 1 << 30) if has_folder else None
    here = Device()
    with stack:
        stack.enter_context(without_self_check())
        programs: list[list[StageProgram]] = []
        members = []
        for number, stage in enumerate(plan.stages):
            programs.append([])
            members.append(stack.enter_context(group("memory", len(stage.shards))))
            for rank in range(len(stage.shards)):
                shard, weights = shard_weights(opened, plan, number, rank, chosen, folder)
                layer_bytes = most_layer_bytes(shard, chosen)
                weights = replace(weights, packed=packed, host_bytes=host_layers * layer_bytes)
                program = load(
                    here,
                    spec,
                    shard,
                    weights,
                    chosen,
                    limits=limits,
                    bits=kv_bits(kv_dtype),
                    kv_tier=kv_tier,
                    activations=None if activations is None else getattr(torch, activations),
                )
                stack.callback(program.close)
                programs[-1].append(program)
        yield TritonPlan(programs, members)


def most_layer_bytes(layout: ShardLayout, chosen: WeightFormat) -> int:
    """Of a layer's matrices as they lie in memory, every array in whole blocks."""
    from edge.kernels.matmul_nbits.gpu_layout import num_tiles

    sizes: dict[str, int] = {}
    for matrix in chosen.recipe.all_stored(layout.matrices):
        rows, kind, columns = len(matrix.rows), matrix.kind, len(matrix.part.columns)
        if not isinstance(kind, Blocks):
            arrays = [4 * rows * columns]
        else:
            start = matrix.part.columns.start % kind.column_multiple
            blocks = -(-(start + columns) // kind.column_multiple)
            codes = 64 * rows * num_tiles(blocks * kind.column_multiple, kind.bits)
            arrays = [codes, 4 * rows * blocks, rows * blocks * kind.zero_points]
        if matrix.name != "head":
            layer = ".".join(matrix.name.split(".")[:2])
            sizes[layer] = sizes.get(layer, 0) + sum(map(padded, arrays))
    return max(sizes.values(), default=0)


def shard_weights(
    opened: Checkpoint,
    plan: Plan,
    stage: int,
    rank: int,
    chosen: WeightFormat,
    folder: Path,
) -> tuple[ShardLayout, ShardWeights]:
    """The shard's file, as a peer would have it."""
    spec = chosen.graded(opened.spec)
    layout = shard_layout(spec, plan, stage=stage, rank=rank)
    path = folder / f"{stage}-{rank}"
    source = opened.source(chosen, cache_root=folder, on_progress=lambda _: None)
    fingerprint = f"{opened.store.fingerprint} {chosen} {plan}"
    weights = shipped(layout, source, chosen, path, fingerprint=fingerprint)
    source.close()
    return layout, weights


def shipped(
    layout: ShardLayout, source: WeightSource, chosen: WeightFormat, path: Path, *, fingerprint: str
) -> ShardWeights:
    """What a peer would have been sent of the source, as the file `path`."""
    shipment = describe_shard(
        layout,
        source,
        chosen,
        fingerprint=fingerprint,
        cache_root=path.parent,
        on_progress=lambda _done, _total: None,
    )
    manifest = shipment.manifest
    wanted = frozenset(piece.digest for _, piece in manifest.placements())
    pieces = {digest: bytes(data) for digest, data in shipment.pieces(wanted)}
    with path.open("wb") as file:
        file.truncate(manifest.total_bytes)
        for offset, piece in manifest.placements():
            file.seek(offset)
            file.write(pieces[piece.digest])
    return ShardWeights(path=path, manifest=manifest)


def chunk(request: str, tokens: Sequence[int], position: int = 0, rows: int | None = None) -> Step:
    """Tokens of one request that want logits: all of them, or the last `rows`."""
    entry = StepEntry(
        request=request,
        position=position,
        tokens=tuple(tokens),
        logit_rows=len(tokens) if rows is None else rows,
    )
    return Step(entries=(entry,))


def decode(*entries: tuple[str, int, int]) -> Step:
    """A token of each (request, token, position)."""
    return Step(
        entries=tuple(
            StepEntry(request=request, position=position, tokens=(token,), logit_rows=1)
            for request, token, position in entries
        )
    )


def relative_error(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
