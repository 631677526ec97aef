"""The further head of a shard: what it is computed from. It lies whole in the sampler's file."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge.models.further_head import further_head
from edge.models.spec import ModelSpec
from edge.offload import Manifest
from edge.partition import Plan
from edge.weights.formats import WeightFormat, weight_format
from edge.weights.layout import ShardLayout, whole_layout

PREFIX = "further."
"""Before the names of its tensors in the file."""

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherHead:
    """A further head on the shard that computes it."""

    spec: ModelSpec
    layout: ShardLayout
    weight_format: WeightFormat

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory. Rows of the embedding are read from disk."""
        stored = self.weight_format.recipe.all_stored(self.layout.matrices)
        vectors = sum(each.num_elements for each in self.layout.vectors)
        return round(sum(each.packed_bytes for each in stored)) + _FLOAT_BYTES * vectors


def further_of(
    spec: ModelSpec, plan: Plan, seat: tuple[int, int], model_format: WeightFormat
) -> FurtherHead | None:
    """The further head that the shard of this seat computes: the sampler's."""
    return further_in(spec, model_format) if seat == (len(plan.stages) - 1, 0) else None


def further_in(spec: ModelSpec, model_format: WeightFormat) -> FurtherHead | None:
    """The further head of a model in this format, if it is computed. It is in float32 as the model
    is, else in int8: in fewer bits it guesses little."""
    if not spec.has_further_head:
        return None
    own = further_head(spec)
    name = "float32" if model_format.name == "float32" else "int8"
    return FurtherHead(
        spec=own,
        layout=whole_layout(own),
        weight_format=weight_format(own, name, accuracy=model_format.accuracy),
    )


def part_of(manifest: Manifest) -> Manifest | None:
    """The further head's tensors of a shard's file, by their own names; None without any."""
    found = tuple(
        replace(each, name=each.name.removeprefix(PREFIX))
        for each in manifest.tensors
        if each.name.startswith(PREFIX)
    )
    if not found:
        return None
    return Manifest(tensors=found, total_bytes=sum(each.nbytes for each in found))
