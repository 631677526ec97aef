"""Norms and the scale between a part's product and the hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.kernels.rms_norm.onnx import rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterProduct:
    """Vectors applied to a part's product once it is summed over shards, by name.

    The product is normed and added to the hidden state; then the sum is multiplied by the scale.
    apart: norms of several products side by side; each is normed, then they are added.
    """

    norm: str | None = None
    scale: str | None = None
    apart: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        return len(self.apart) or 1


NOTHING_AFTER = AfterProduct()


def after_part(
    build: SegmentBuilder, norm: str, *, scale: str = "", apart: Sequence[str] = ()
) -> AfterProduct:
    """The AfterProduct of these names, without those that the model lacks."""
    return AfterProduct(
        norm=norm if build.has_vector(norm) else None,
        scale=scale if build.has_vector(scale) else None,
        apart=tuple(name for name in apart if build.has_vector(name)),
    )


def normed_product(build: SegmentBuilder, product: str, after: AfterProduct, *, stays: bool) -> str:
    """The product, normed for the sum with the hidden state. stays: see `SegmentBuilder.vector`."""

    def normed(x: str, name: str) -> str:
        weight = build.own_vector(name, stays=stays)
        return rms_norm(build.graph, x, weight, epsilon=build.spec.norm_epsilon)

    if after.apart:
        apart = build.graph.nodes("Split", product, outputs=len(after.apart), axis=-1)
        first, *rest = (normed(x, name) for x, name in zip(apart, after.apart, strict=True))
        product = first
        for each in rest:
            product = build.graph.node("Add", product, each)
    return product if after.norm is None else normed(product, after.norm)
