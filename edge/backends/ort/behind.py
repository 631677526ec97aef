"""What becomes of a part's product on its way to the hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge.backends.ort.segment_builder import SegmentBuilder
from edge.kernels.rms_norm.onnx import rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What becomes of a part's product once it is summed over shards, by names of vectors.

    It is normed, if there is that norm, and added to the hidden state; then both are multiplied, if
    there is a scale. A product may be several side by side, each with a norm, which are added to
    each other first.
    """

    norm: str | None = None
    scale: str | None = None
    apart: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        return len(self.apart) or 1


NOTHING_BEHIND = Behind()


def behind_part(
    build: SegmentBuilder, norm: str, *, scale: str = "", apart: Sequence[str] = ()
) -> Behind:
    """What is behind a part: those of these vectors that there are."""
    return Behind(
        norm=norm if build.has_vector(norm) else None,
        scale=scale if build.has_vector(scale) else None,
        apart=tuple(name for name in apart if build.has_vector(name)),
    )


def normed_product(build: SegmentBuilder, product: str, behind: Behind, *, stays: bool) -> str:
    """The product as it is added to the hidden state. stays: see `SegmentBuilder.vector`."""

    def normed(x: str, name: str) -> str:
        weight = build.own_vector(name, stays=stays)
        return rms_norm(build.graph, x, weight, epsilon=build.spec.norm_epsilon)

    if behind.apart:
        apart = build.graph.nodes("Split", product, outputs=len(behind.apart), axis=-1)
        first, *rest = (normed(x, name) for x, name in zip(apart, behind.apart, strict=True))
        product = first
        for each in rest:
            product = build.graph.node("Add", product, each)
    return product if behind.norm is None else normed(product, behind.norm)
