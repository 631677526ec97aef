"""Layers that stream into a GPU, against what its link to the host allows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import click

from edge.backends.interface import Backend
from edge.backends.registry import open_backend
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.gpu import (
    GROUP_SIZE,
    NO_GPU,
    config,
    decode,
    described,
    int4_bytes,
    is_there_a_gpu,
    software,
)
from edge.demos.bench.results import Metric
from edge.models.spec import ModelSpec
from edge.offload import DerivedCache
from edge.partition import weight_tiers
from edge.partition.plan.expert_tiers import WINDOW_LAYERS
from edge.profiling.random_weights import written_weights
from edge.protocol.step import StepLimits
from edge.weights.formats import weight_format
from edge.weights.layout import ShardLayout, whole_layout

LAYERS = 48
SPEC = described(
    config(layers=LAYERS, hidden=8192, columns=28672, heads=64, kv_heads=8, head=128, vocab=32000)
)
"""The layers of Llama 3 70B, 48 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A shape, and where its layers are."""

    spec: ModelSpec = SPEC
    device_layers: int = LAYERS // 2
    """That the GPU has room for, its window included."""
    host_layers: int = LAYERS
    """That the host's memory has room for."""
    warm_ups: int = 2
    steps: int = 12

    @property
    def streamed(self) -> int:
        """As few layers as leave room for their window."""
        return self.spec.num_layers - self.device_layers + WINDOW_LAYERS


def decoding(halves: Halves, backend: Backend, folder: Path, copy_rate: float) -> Iterator[Metric]:
    """Tokens per second, and the share of the link's rate that layers come at.

    copy_rate: of the link, in bytes per second.
    """
    chosen = weight_format(halves.spec, "int4-pure", GROUP_SIZE)
    layout = replace(whole_layout(halves.spec), streamed_layers=halves.streamed)
    layer_bytes = _layer_bytes(layout, halves.spec.num_layers)
    tiers = weight_tiers(
        halves.spec.num_layers,
        streamed=halves.streamed,
        window=WINDOW_LAYERS,
        layer_bytes=layer_bytes,
        host_bytes=halves.host_layers * layer_bytes,
    )
    limits = StepLimits(context_tokens=256, chunk_tokens=64, requests=1, cached_tokens=256)
    packed = DerivedCache(folder / "packed", 1 << 40)
    seconds = []
    with written_weights(layout, chosen, folder) as weights:
        # Of half a layer more, for arrays lie in memory in whole pages.
        given = replace(
            weights, packed=packed, host_bytes=int((halves.host_layers + 0.5) * layer_bytes)
        )
        program = backend.load(halves.spec, layout, given, chosen, limits=limits)
    with closing(program):
        for position in range(halves.warm_ups + halves.steps):
            start_s = time.perf_counter()
            decode(program, position, 1)
            seconds.append(time.perf_counter() - start_s)
    decoded = seconds[halves.warm_ups :]
    name = (
        f"{halves.spec.num_layers} layers, int4, {halves.device_layers} in GPU memory, "
        f"{tiers.pinned} pinned, {tiers.on_disk} on disk"
    )
    yield Metric(name=f"{name}, speed", unit="tok/s", values=[1 / each for each in decoded])
    yield Metric(
        name=f"{name}, streamed / link",
        unit="ratio",
        values=[tiers.streamed * layer_bytes / each / copy_rate for each in decoded],
    )


def _layer_bytes(layout: ShardLayout, num_layers: int) -> int:
    weights = layout.num_weights - sum(
        each.num_rows * len(each.columns) for each in layout.matrices if each.name == "head"
    )
    return int(int4_bytes(weights // num_layers))


@case.case(
    "Layers streamed into a GPU beside the link to its host",
    click.option(
        "--folder",
        type=click.Path(file_okay=False, path_type=Path),
        help="For 45 GB of made-up weights, which are removed.  [default: the system's]",
    ),
)
def gpu_stream(given: Given) -> Iterator[Found]:
    """How fast does a model of twice a GPU's budget decode, against its link to the host?

    A model of 40 B parameters with made-up weights, in int4; the GPU holds half of its layers, the
    others are copied in for each token out of pinned memory, or partly from disk. The link is
    measured in the same process, before and after.
    """
    if not is_there_a_gpu():
        click.echo(NO_GPU)
        return
    backend = open_backend("triton", threads=1)
    metrics: list[Metric] = []
    rates = []
    with tempfile.TemporaryDirectory(dir=given.folder) as own:
        for host_layers in (LAYERS, LAYERS // 3):
            rates.append(backend.copy_bytes_per_s() or 0.0)
            halves = Halves(host_layers=host_layers)
            metrics += decoding(halves, backend, Path(own), rates[-1])
    rates.append(backend.copy_bytes_per_s() or 0.0)
    copied = Metric(name="copy from pinned memory", unit="GB/s", values=[r / 1e9 for r in rates])
    yield Found(
        figures=[copied, *metrics],
        variant=f"{software()}, bfloat16, int4 in blocks of {GROUP_SIZE}",
        link="none",
        model="none",
    )
