"""Sums and gathers over groups of any size, any lengths, however the arrays are sent."""

from functools import partial, reduce

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.transport import EAGER_BYTES, Collective
from edge.transport.collective import partners
from tests.support.transport_pairs import group, in_threads, on_every_rank

sizes = st.integers(1, 7)
lengths = st.integers(0, 300) | st.sampled_from([EAGER_BYTES // 4, EAGER_BYTES // 4 + 1, 20_000])
few = settings(max_examples=40)


@few
@given(size=sizes, length=lengths, seed=st.integers(0, 2**32 - 1))
def test_a_sum_has_the_same_bits_as_summing_in_rank_order(
    size: int, length: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    terms = [
        (random.standard_normal(length) * 10.0 ** random.integers(-20, 20, length)).astype(
            np.float32
        )
        for _ in range(size)
    ]
    expected = reduce(np.add, terms).tobytes()
    with group("memory", size) as members:
        on_every_rank(members, lambda member: member.all_reduce(terms[member.rank]))
    assert [term.tobytes() for term in terms] == [expected] * size


@few
@given(st.lists(lengths, min_size=1, max_size=7), st.data())
def test_a_gather_of_any_lengths_gives_what_was_put_in(
    own_lengths: list[int], data: st.DataObject
) -> None:
    size = len(own_lengths)
    root = data.draw(st.integers(0, size - 1))
    owns = [np.full(length, rank, np.int16) for rank, length in enumerate(own_lengths)]

    def run(member: Collective) -> tuple[list[np.ndarray], list[np.ndarray]]:
        everywhere = [np.empty_like(own) for own in owns]
        at_root = [np.full_like(own, -1) for own in owns]
        member.all_gather(owns[member.rank], everywhere)
        member.gather(owns[member.rank], at_root if member.rank == root else None, root=root)
        return everywhere, at_root

    with group("memory", size) as members:
        for rank, (everywhere, at_root) in enumerate(on_every_rank(members, run)):
            assert [one.tobytes() for one in everywhere] == [own.tobytes() for own in owns]
            if rank == root:
                assert [one.tobytes() for one in at_root] == [own.tobytes() for own in owns]


@few
@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.sampled_from(["sum", "barrier", "broadcast"]), lengths), max_size=8),
)
def test_any_calls_in_a_row_end(size: int, calls: list[tuple[str, int]]) -> None:
    def run(member: Collective) -> list[float]:
        seen = []
        for turn, (name, length) in enumerate(calls):
            array = np.full(length, member.rank + 1, np.float32)
            if name == "sum":
                member.all_reduce(array)
            elif name == "broadcast":
                member.broadcast(array, root=turn % size)
            else:
                member.barrier()
                continue
            seen.append(float(array.sum()))
        return seen

    expected = [
        float(length * (size * (size + 1) // 2 if name == "sum" else turn % size + 1))
        for turn, (name, length) in enumerate(calls)
        if name != "barrier"
    ]
    with group("memory", size) as members:
        results = in_threads([partial(run, member) for member in members])
    assert results == [expected] * size


@given(st.integers(2, 16))
def test_all_meet_once_in_as_few_rounds_as_can_be(size: int) -> None:
    left = {rank: partners(rank, size) for rank in range(size)}
    assert all(
        sorted(met) == [other for other in range(size) if other != rank]
        for rank, met in left.items()
    )
    rounds = 0
    while any(left.values()):
        pairs = [
            (rank, met[0])
            for rank, met in left.items()
            if met and left[met[0]][0] == rank  # both are there: nobody waits in a circle
        ]
        assert pairs
        for rank, _ in pairs:
            left[rank] = left[rank][1:]
        rounds += 1
    assert rounds == size - 1 + size % 2
