"""Copies of keys and values: what is kept of them, and into which plans they can be put."""

from __future__ import annotations

import numpy as np
import pytest

from demos.bundled import MODEL
from edge.answers.copies import AnswerCopies, Copy, KvLayout
from edge.models.spec import ModelSpec
from edge.partition import Plan
from edge.protocol.frame_codec import MOST_COPY_BYTES
from edge.protocol.step import MAX_CHUNK_TOKENS
from edge.protocol.topology import Seat
from edge.weights.cache_layout import held_layers
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import KvDtype
from edge.weights.layout import shard_layout
from tests.support.plans import bundled_plan, make_plan
from tests.support.program_contract import LATENT
from tests.support.specs import shared_keys_spec

PIPELINE = bundled_plan("pipeline_2", devices=["a", "b"])
TENSOR = bundled_plan("tensor_2", devices=["a", "b"])


def form(
    plan: Plan,
    *,
    digest: str = "d",
    kv_dtype: KvDtype = "float32",
    spec: ModelSpec | None = None,
) -> KvLayout:
    seats = [
        (stage, rank) for stage, each in enumerate(plan.stages) for rank in range(len(each.shards))
    ]
    if spec is None:
        with Checkpoint.open(MODEL) as checkpoint:
            spec = checkpoint.spec
    layers = {
        (stage, rank): held_layers(shard_layout(spec, plan, stage=stage, rank=rank), kv_dtype)
        for stage, rank in seats
    }
    return KvLayout(
        layers=layers, digests=dict.fromkeys(seats, digest), is_rounded=kv_dtype != "float32"
    )


def rows_of(form: KvLayout, seat: Seat, first: int, tokens: int) -> bytes:
    """As if every row told its layer, its head, whether it is a key, and its token."""
    names = np.arange(first, first + tokens)[:, None]
    parts = []
    for held in form.layers[seat]:
        for sign in (1, -1):
            for head in held.heads:
                name = held.layer * 1_000_000 + head.start * 1_000 + names
                parts.append(np.repeat(sign * name, held.row_bytes // 4, 1).astype(np.int32))
    return np.concatenate(parts, 1).tobytes()


def copy(form: KvLayout, seat: Seat, first: int, tokens: int = 8) -> Copy:
    return Copy(first=first, tokens=tokens, rows=rows_of(form, seat, first, tokens))


def kept(plan: Plan, first: int, last: int) -> AnswerCopies:
    found = AnswerCopies(form=form(plan), first=first)
    for seat in found.form.layers:
        for start in range(first, last, 8):
            assert found.add(seat, copy(found.form, seat, start, min(8, last - start)))
    return found


def test_what_follows_is_kept_and_nothing_else() -> None:
    seats = form(PIPELINE)
    answer = AnswerCopies(form=seats, first=5)
    seat = (0, 0)
    assert not answer.add(seat, copy(seats, seat, 6))
    assert answer.add(seat, copy(seats, seat, 5))
    assert not answer.add(seat, copy(seats, seat, 5))
    assert not answer.add(seat, copy(seats, seat, 14))
    assert not answer.add(seat, Copy(first=13, tokens=8, rows=b"short"))
    assert answer.add(seat, copy(seats, seat, 13))
    assert answer.num_bytes == 2 * len(copy(seats, seat, 5).rows)


def test_of_who_keeps_nothing_nothing_is_kept() -> None:
    """It could send copies of nothing without end."""
    nobody = KvLayout(layers={(0, 0): ()}, digests={(0, 0): "d"}, is_rounded=False)
    answer = AnswerCopies(form=nobody, first=0)
    assert not answer.add((0, 0), Copy(first=0, tokens=1, rows=b""))


def test_few_large_copies_are_given_back() -> None:
    seats, seat = form(PIPELINE), (0, 0)
    answer = AnswerCopies(form=seats, first=5)
    most = min(MOST_COPY_BYTES // len(copy(seats, seat, 0, 1).rows), MAX_CHUNK_TOKENS)
    tokens = 2 * most + 24
    for start in range(5, 5 + tokens, 8):
        assert answer.add(seat, copy(seats, seat, start))
    put = answer.put_into(seats, 5 + tokens - 10)
    assert [each.tokens for each in put.copies[seat]] == [most, most, 14]
    for each in put.copies[seat]:
        assert each.rows == rows_of(seats, seat, each.first, each.tokens)


def test_as_much_is_given_back_as_every_shard_has_sent() -> None:
    answer = kept(PIPELINE, 5, 13)
    assert answer.add((0, 0), copy(answer.form, (0, 0), 13))
    assert answer.last(100) == 13
    assert answer.last(9) == 9
    assert AnswerCopies(form=answer.form, first=5).last(100) == 5


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("after", [TENSOR, PIPELINE, bundled_plan("solo", devices=["a"])])
@pytest.mark.parametrize("before", [TENSOR, PIPELINE])
def test_copies_of_a_plan_can_be_put_into_others(before: Plan, after: Plan, first: int) -> None:
    wanted = form(after)
    assert form(before).serves(wanted)
    put = kept(before, first, first + 24).put_into(wanted, first + 21)
    assert put.last(1000) == first + 21
    for seat, copies in put.copies.items():
        assert [each.rows for each in copies] == [
            rows_of(wanted, seat, each.first, each.tokens) for each in copies
        ]
        assert all(len(each.rows) <= MOST_COPY_BYTES for each in copies)
    for seat in wanted.layers:
        assert put.add(seat, copy(wanted, seat, first + 21)), "what comes then follows"


@pytest.mark.parametrize("after", ["solo", "pipeline_2", "mixed_2x2"])
@pytest.mark.parametrize("before", ["solo", "pipeline_3", "tensor_2"])
def test_keys_that_layers_share_are_those_of_one_layer(before: str, after: str) -> None:
    """Wherever a plan has such layers, and whether the layer whose keys they are is there, too."""
    spec = shared_keys_spec()
    wanted, had = (form(make_plan(spec, each, model="m"), spec=spec) for each in (after, before))
    assert {held.layer for layers in wanted.layers.values() for held in layers} == {0, 1, 2, 3}
    assert had.serves(wanted)
    answer = AnswerCopies(form=had, first=0)
    for seat in had.layers:
        assert answer.add(seat, copy(had, seat, 0, 24))
    for seat, copies in answer.put_into(wanted, 21).copies.items():
        assert [each.rows for each in copies] == [
            rows_of(wanted, seat, each.first, each.tokens) for each in copies
        ]


@pytest.mark.parametrize("after", ["solo", "pipeline_3", "tensor_2"])
@pytest.mark.parametrize("before", ["solo", "pipeline_3", "tensor_2"])
def test_latent_rows_are_the_same_on_every_shard(before: str, after: str) -> None:
    wanted, had = (
        form(make_plan(LATENT, each, model="m"), spec=LATENT) for each in (after, before)
    )
    for layers in had.layers.values():
        assert all(each.token_bytes == 4 * 2 * 16 for each in layers), "27 elements, and zeros"
    assert had.serves(wanted)
    answer = AnswerCopies(form=had, first=0)
    for seat in had.layers:
        assert answer.add(seat, copy(had, seat, 0, 24))
    for seat, copies in answer.put_into(wanted, 21).copies.items():
        assert [each.rows for each in copies] == [
            rows_of(wanted, seat, each.first, each.tokens) for each in copies
        ]


def test_what_is_rounded_or_made_otherwise_is_of_use_to_the_same_shards_only() -> None:
    assert not form(PIPELINE).serves(form(TENSOR, digest="other"))
    rounded = form(PIPELINE, kv_dtype="int8")
    assert rounded.serves(form(PIPELINE, kv_dtype="int8"))
    assert not rounded.serves(form(TENSOR, kv_dtype="int8"))
    assert not form(PIPELINE).serves(rounded)
