"""What is promised is never given twice, and refusals say what is missing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import CapacityError, RequestError
from edge.memory.ledger import LEAST_MODEL_BYTES, Baseline, Ledger, Use
from edge.memory.rebalance import RebalanceOptions, fit

MIB = 1 << 20
BASELINE = Baseline(process_bytes=70 * MIB, work_bytes=30 * MIB)


def ledger(model_mib: int = 100, limit: int | None = None) -> Ledger:
    return Ledger(
        budget_bytes=BASELINE.total + model_mib * MIB, baseline=BASELINE, model_limit_bytes=limit
    )


def test_what_is_reserved_is_not_free() -> None:
    use = Use(weight_bytes=40 * MIB, kv_bytes=10 * MIB, buffer_bytes=20 * MIB, streamed_bytes=MIB)
    taken = ledger().with_use("a", use)
    assert (ledger().free_bytes, taken.free_bytes) == (100 * MIB, 30 * MIB)
    assert taken.with_use("a", use) == taken, "it is not counted twice"
    assert taken.without("a") == ledger()
    assert taken.without("unknown") == taken


def test_a_lack_is_stated() -> None:
    use = Use(weight_bytes=90 * MIB, kv_bytes=20 * MIB, buffer_bytes=MIB)
    with pytest.raises(CapacityError) as raised:
        ledger().with_use("a", use)
    assert str(raised.value) == (
        "this shard needs 111.0 MiB (90.0 MiB weights, 20.0 MiB KV cache, 1.0 MiB buffers) and "
        "100.0 MiB are free: 11.0 MiB are missing. Give the peer more --memory, choose a smaller "
        "dtype or context, or share the model with more peers"
    )


def test_weights_and_kv_may_have_a_limit_of_their_own() -> None:
    limited = ledger(limit=50 * MIB)
    assert (limited.model_free_bytes, limited.room_bytes) == (50 * MIB, 50 * MIB)
    taken = limited.with_use("a", Use(weight_bytes=30 * MIB, buffer_bytes=60 * MIB))
    assert (taken.free_bytes, taken.model_free_bytes) == (10 * MIB, 10 * MIB)
    with pytest.raises(CapacityError, match=r"1\.0 MiB are missing"):
        limited.with_use("a", Use(kv_bytes=51 * MIB))


def test_a_promise_below_the_minimum_is_refused() -> None:
    Ledger(budget_bytes=BASELINE.minimum_bytes, baseline=BASELINE)
    with pytest.raises(RequestError) as raised:
        Ledger(budget_bytes=BASELINE.minimum_bytes - 1, baseline=BASELINE)
    assert "below the minimum of 108.0 MiB" in str(raised.value)
    assert "the process itself takes 70.0 MiB, and up to 30.0 MiB more" in str(raised.value)


uses = st.builds(
    Use,
    weight_bytes=st.integers(0, 60 * MIB),
    kv_bytes=st.integers(0, 20 * MIB),
    buffer_bytes=st.integers(0, 20 * MIB),
)
changes = st.lists(st.tuples(st.sampled_from("abc"), st.none() | uses), max_size=12)


@given(changes=changes, limit=st.none() | st.integers(0, 100 * MIB))
@settings(deadline=None)
def test_the_promise_holds_after_any_changes(
    changes: list[tuple[str, Use | None]], limit: int | None
) -> None:
    book = ledger(limit=limit)
    for name, use in changes:
        if use is None:
            book = book.without(name)
            continue
        try:
            book = book.with_use(name, use)
        except CapacityError:
            others = book.without(name)
            assert use.total > others.free_bytes or use.model_bytes > others.model_free_bytes
        taken = sum(each.total for each in book.uses.values())
        assert BASELINE.total + taken + book.free_bytes == book.budget_bytes
        if limit is not None:
            assert sum(each.model_bytes for each in book.uses.values()) <= limit


@st.composite
def rebalance_options(draw: st.DrawFn) -> RebalanceOptions:
    """A shard as `edge.partition.memory_use` counts one: a window stays, the other layers go."""
    layers, layer_bytes = draw(st.integers(1, 12)), draw(st.integers(1, 8)) * MIB
    rest = Use(kv_bytes=draw(st.integers(0, 9)) * MIB, buffer_bytes=draw(st.integers(0, 9)) * MIB)
    uses = []
    for streamed in range(layers + 1):
        held = layers - streamed + min(streamed, 3 if streamed < layers else 2)
        uses.append(
            Use(
                weight_bytes=held * layer_bytes,
                kv_bytes=rest.kv_bytes,
                buffer_bytes=rest.buffer_bytes,
            )
        )
    planned = draw(st.integers(0, layers))
    some = {planned, layers, *draw(st.sets(st.integers(planned, layers)))}
    return RebalanceOptions(uses={count: uses[count] for count in sorted(some)}, planned=planned)


@given(
    shards=st.dictionaries(st.sampled_from("abcd"), rebalance_options(), max_size=4),
    model_mib=st.lists(st.integers(0, 300), min_size=1, max_size=6),
)
@settings(deadline=None)
def test_whatever_is_promised_next_is_kept(
    shards: dict[str, RebalanceOptions], model_mib: list[int]
) -> None:
    """Budgets that move: each is kept or refused with the minimum, and none is forgotten."""
    book = ledger(1000)
    for name, shard in shards.items():
        book = book.with_use(name, shard.uses[shard.planned])
    least = sum(min(use.total for use in shard.uses.values()) for shard in shards.values())
    minimum = BASELINE.total + max(least, LEAST_MODEL_BYTES)
    for mib in [*model_mib, 1000]:
        budget = BASELINE.total + mib * MIB
        if budget < minimum:
            with pytest.raises(RequestError, match="below the minimum of"):
                fit(book, budget, shards)
            continue
        book, counts = fit(book, budget, shards)
        assert book.budget_bytes == budget
        assert BASELINE.total + sum(use.total for use in book.uses.values()) <= budget
        for name, shard in shards.items():
            assert shard.planned <= counts[name] in shard.uses
            assert book.uses[name] == shard.uses[counts[name]]
    assert counts == {name: shard.planned for name, shard in shards.items()}, "all came back"


def test_no_shard_gives_more_than_it_must() -> None:
    uses = tuple(Use(weight_bytes=(10 - count + min(count, 3)) * MIB) for count in range(10))
    shards = {"a": RebalanceOptions(uses=dict(enumerate(uses)), planned=0)}
    book = ledger().with_use("a", uses[0])
    for mib, streamed in ((10, 0), (9, 4), (8, 5)):
        changed, counts = fit(book, BASELINE.total + mib * MIB, shards)
        assert counts == {"a": streamed}
        assert changed.free_bytes == 0
