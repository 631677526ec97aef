"""Names of what shards keep of tokens: the shards of every plan have the pieces of the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge.models.linear_attention import LinearAttention
from edge.models.short_convolution import ShortConvolution
from edge.models.spec import ModelSpec
from edge.weights.cache_layout import row_pieces, state_pieces
from edge.weights.layout import ShardLayout, shard_layout, whole_layout
from tests.support.plans import LAYOUTS, make_plan
from tests.support.specs import plain_layer, shared_keys_spec, spec_of

LINEAR = LinearAttention(
    num_key_heads=6, num_value_heads=12, key_size=4, value_size=8, convolution=4
)
SHORT = ShortConvolution(num_units=8, unit_channels=4, convolution=3, bias=False)
SPECS = {
    "attention": spec_of([plain_layer()] * 4),
    "linear": spec_of([replace(plain_layer(), mixer=LINEAR)] * 3 + [plain_layer()]),
    "short": spec_of([replace(plain_layer(), mixer=SHORT), plain_layer()] * 2),
    "shared": shared_keys_spec(),
}


def sizes_of_states(layout: ShardLayout) -> dict[str, tuple[int, ...]]:
    """Shapes of the pieces of states, by name; each element is of one piece."""
    shapes = [shape for part in layout.states.values() for shape in part.state_shapes]
    counts = [np.zeros(shape, int) for shape in shapes]
    sizes = {}
    for piece in state_pieces(layout, len(counts)):
        part = counts[piece.array][piece.part]
        part += 1
        sizes[piece.name] = part.shape
    assert all((count == 1).all() for count in counts)
    return sizes


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_shards_have_the_pieces_of_the_model(spec: ModelSpec, layout: str) -> None:
    plan, whole = make_plan(spec, layout, model="m"), whole_layout(spec)
    rows: set[str] = set()
    states: dict[str, tuple[int, ...]] = {}
    for stage, each in enumerate(plan.stages):
        for rank in range(len(each.shards)):
            shard = shard_layout(spec, plan, stage=stage, rank=rank)
            rows |= {piece.name for piece in row_pieces(shard)}
            own = sizes_of_states(shard)
            assert not own.keys() & states.keys()
            states |= own
    assert rows == {piece.name for piece in row_pieces(whole)}
    assert states == sizes_of_states(whole)


def test_long_windows_have_sections() -> None:
    """Which have every row once, however many are in use."""
    windowed = plain_layer(
        num_heads=4, num_kv_heads=2, head_size=256, window=1024, kept_tokens=1151
    )
    layout = whole_layout(spec_of([windowed, plain_layer()]))
    pieces = state_pieces(layout, 0)
    assert not any("window" in each.name for each in row_pieces(layout))
    for used in (64, 700, 1151):
        arrays = [np.zeros((2, used, 256), np.float32) for _kind in ("keys", "values")]
        for piece in pieces:
            part = piece.of(arrays)
            assert 0 < part.nbytes <= 1 << 19
            part += 1
        assert all((each == 1).all() for each in arrays)
    assert len(pieces) == 2 * 2 * 3


def test_states_that_have_no_units_are_whole_and_of_one_shard_alone() -> None:
    spec = SPECS["attention"]
    names = set()
    for layout in ("solo", "pipeline_2", "tensor_2"):
        shard = shard_layout(spec, make_plan(spec, layout, model="m"), stage=0, rank=0)
        pieces = state_pieces(shard, 2)
        assert [(piece.array, piece.part) for piece in pieces] == [(0, ()), (1, ())]
        names |= {piece.name for piece in pieces}
    assert len(names) == 6
