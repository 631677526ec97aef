"""What every group of ranks promises, checked on each implementation and many sizes."""

from collections.abc import Callable, Sequence
from functools import partial, reduce

import ml_dtypes
import numpy as np
import pytest

from edge.transport import (
    EAGER_BYTES,
    ChannelClosedError,
    Collective,
    Link,
    MemoryLink,
    MeshCollective,
    PeerLostError,
    ProtocolError,
)
from edge.transport.collective import SLICED_ABOVE_BYTES
from edge.transport.testing import Fault, FaultyLink
from tests.support import device_groups  # noqa: F401  before torch
from tests.support.slow_cases import repeats_are_slow
from tests.support.transport_pairs import (
    DEVICE_KIND,
    LINK_KINDS,
    group,
    in_threads,
    leave_in_the_middle,
    on_every_rank,
)

SIZES = (1, 2, 3, 5, 8)
MANY = SLICED_ABOVE_BYTES // 4 * 2 + 3
"""Numbers of four bytes that are summed in slices and cannot be divided evenly."""

GROUPS = [(kind, size) for kind in LINK_KINDS for size in SIZES]
GROUPS += [(DEVICE_KIND, size) for size in (2, 3, 4)]

each_group = pytest.mark.parametrize(("kind", "size"), GROUPS)


def each_group_with(name: str, values: Sequence[int]) -> pytest.MarkDecorator:
    """The groups of all kinds and sizes with each of these values.

    The largest values come first, and one rank alone last: so those without the mark `slow` are
    those in which much goes to and fro.
    """
    groups = sorted(GROUPS, key=lambda group: group[1] == 1)
    cases = [(kind, size, value) for value in sorted(values, reverse=True) for kind, size in groups]
    return pytest.mark.parametrize(("kind", "size", name), repeats_are_slow(cases))


def terms_of(size: int, count: int, dtype: type = np.float32) -> list[np.ndarray]:
    """One array per rank, of magnitudes so different that another order gives other bits."""
    random = np.random.default_rng(size * 1_000_003 + count)
    scales = 10.0 ** random.integers(-4, 5, (size, count))
    return list((random.standard_normal((size, count)) * scales).astype(dtype))


def all_reduced(members: list[Collective], terms: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank holds after all have called ``all_reduce`` with their term."""
    arrays = [term.copy() for term in terms]
    on_every_rank(members, lambda member: member.all_reduce(arrays[member.rank]))
    return arrays


@each_group_with("count", [0, 1, 7, 2048, EAGER_BYTES // 4, EAGER_BYTES // 4 + 1, MANY])
def test_all_reduce_gives_every_rank_the_same_bits(kind: str, size: int, count: int) -> None:
    terms = terms_of(size, count)
    expected = reduce(np.add, terms)
    with group(kind, size) as members:
        for _ in range(2):
            for array in all_reduced(members, terms):
                assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["tcp", DEVICE_KIND])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float16, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("shape", [(), (3, 5), (7, 11, 401)], ids=str)
def test_all_reduce_takes_any_dtype_and_shape(
    kind: str, size: int, dtype: type, shape: tuple[int, ...]
) -> None:
    random = np.random.default_rng(5)
    terms: list[np.ndarray] = [
        np.asarray(random.integers(0, 9, shape)).astype(dtype) for _ in range(size)
    ]
    expected = np.asarray(reduce(np.add, terms))
    with group(kind, size) as members:
        on_every_rank(members, lambda member: member.all_reduce(terms[member.rank]))
    for term in terms:
        assert term.shape == shape
        assert term.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["memory", DEVICE_KIND])
def test_all_reduce_sums_in_the_order_of_ranks(kind: str) -> None:
    """1e8 + 1 - 1e8 is 0 in float32; any other order gives 1."""
    terms = [np.full(MANY, value, np.float32) for value in (1e8, 1, -1e8)]
    with group(kind, 3) as members:
        on_every_rank(members, lambda member: member.all_reduce(terms[member.rank]))
    assert [set(term.tolist()) for term in terms] == [{0.0}] * 3


@each_group_with("largest", [5, EAGER_BYTES])
def test_all_gather_with_uneven_sizes(kind: str, size: int, largest: int) -> None:
    owns = [np.full(largest * rank, rank + 0.5, np.float32) for rank in range(size)]

    def gathered(member: Collective) -> list[np.ndarray]:
        into = [np.zeros_like(own) for own in owns]
        member.all_gather(owns[member.rank], into)
        return into

    with group(kind, size) as members:
        for into in on_every_rank(members, gathered):
            assert [one.tobytes() for one in into] == [own.tobytes() for own in owns]


@each_group_with("largest", [5, EAGER_BYTES])
def test_gather_to_each_root(kind: str, size: int, largest: int) -> None:
    owns = [np.full(largest + rank, rank, np.int32) for rank in range(size)]

    def gathered(member: Collective) -> list[list[np.ndarray]]:
        results = []
        for root in range(size):
            into = [np.full_like(own, -1) for own in owns]
            member.gather(owns[member.rank], into if root == member.rank else None, root=root)
            results.append(into)
        return results

    with group(kind, size) as members:
        for rank, results in enumerate(on_every_rank(members, gathered)):
            for root, into in enumerate(results):
                for own, one in zip(owns, into, strict=True):
                    assert (one == (own if root == rank else -1)).all()


@each_group_with("count", [0, 3, MANY])
def test_broadcast_from_each_root(kind: str, size: int, count: int) -> None:
    def received(member: Collective) -> list[np.ndarray]:
        arrays = [np.full(count, member.rank, np.int32) for _ in range(size)]
        for root in range(size):
            member.broadcast(arrays[root], root=root)
        return arrays

    with group(kind, size) as members:
        for arrays in on_every_rank(members, received):
            for root, array in enumerate(arrays):
                assert (array == root).all()


@each_group
def test_nobody_passes_a_barrier_before_all_have_come(kind: str, size: int) -> None:
    arrived: list[int] = []

    def pass_barriers(member: Collective) -> None:
        for turn in range(1, 6):
            arrived.append(member.rank)
            member.barrier()
            assert len(arrived) >= turn * size
            member.barrier()

    with group(kind, size) as members:
        assert [member.size for member in members] == [size] * size
        on_every_rank(members, pass_barriers)


@each_group
def test_mixed_calls_in_a_row_stay_in_step(kind: str, size: int) -> None:
    """Ranks run ahead of each other here; sizes change, so buffers are made anew and shared."""

    def run(member: Collective) -> list[float]:
        seen = []
        for turn in range(60):
            array = np.full((turn * 37) % 101 * 400, member.rank + turn, np.float32)
            member.all_reduce(array)
            seen.append(float(array.sum()))
            member.broadcast(array, root=turn % size)
            member.barrier()
        return seen

    with group(kind, size) as members:
        results = on_every_rank(members, run)
    expected = [
        (turn * 37) % 101 * 400 * sum(rank + turn for rank in range(size)) for turn in range(60)
    ]
    assert results == [expected] * size


def test_buffers_are_made_once_per_size() -> None:
    with group("memory", 3) as members:
        scratch = [member._scratch for member in members]  # type: ignore[attr-defined]
        stores = []
        for count in (MANY, 5, MANY, 700, 5):
            all_reduced(members, [np.ones(count, np.float32) for _ in members])
            stores.append([[id(store) for store in one._stores] for one in scratch])
    assert all(one == stores[0] for one in stores)


@each_group
def test_calls_that_make_no_sense_are_refused_before_anything_is_sent(kind: str, size: int) -> None:
    strided = np.zeros((4, 4), np.float32).T[:2]
    one = np.zeros(1, np.float32)

    def refuse(member: Collective) -> None:
        calls: tuple[Callable[[], object], ...] = (
            lambda: member.all_reduce(strided),
            lambda: member.all_gather(strided, [one] * size),
            lambda: member.all_gather(one, [one] * (size + 1)),
            lambda: member.all_gather(one, [np.zeros(2, np.float32)] * size),
            lambda: member.gather(one, None, root=size),
            lambda: member.gather(one, None, root=member.rank),
            lambda: member.gather(strided, [one] * size, root=member.rank),
            lambda: member.broadcast(one, root=-1),
        )
        for call in calls:
            with pytest.raises(ValueError, match=r"contiguous|buffers|bytes|root"):
                call()
        member.barrier()

    with group(kind, size) as members:
        on_every_rank(members, refuse)


@pytest.mark.parametrize("kind", LINK_KINDS)
def test_ranks_that_disagree_on_a_size_hear_of_it(kind: str) -> None:
    with group(kind, 2) as members:
        results = in_threads(
            [
                lambda: members[0].all_reduce(np.zeros(3, np.float32)),
                lambda: members[1].all_reduce(np.zeros(4, np.float32)),
            ]
        )
    assert any(isinstance(result, ProtocolError) for result in results)
    assert all(isinstance(result, ProtocolError | PeerLostError) for result in results)


@pytest.mark.parametrize(
    ("kind", "size"), [(kind, size) for kind in (*LINK_KINDS, DEVICE_KIND) for size in (2, 3, 5)]
)
@pytest.mark.parametrize("count", [2048, MANY])
def test_a_rank_that_leaves_in_the_middle_is_lost_to_the_others(
    kind: str, size: int, count: int
) -> None:
    with group(kind, size) as members:
        assert leave_in_the_middle(members, count) == ["lost at 2"] * (size - 1) + ["left"]


@pytest.mark.parametrize("kind", LINK_KINDS)
def test_a_link_that_falls_silent_loses_the_peer_after_the_timeout(kind: str) -> None:
    def wrap(rank: int, other: int, link: Link) -> Link:
        return FaultyLink(link, Fault.DROP, after_calls=2) if (rank, other) == (0, 1) else link

    def run(member: Collective) -> None:
        for _ in range(3):
            member.all_reduce(np.ones(8, np.float32))

    with group(kind, 3, timeout_s=0.1, wrap=wrap) as members:
        results = in_threads([partial(run, member) for member in members])
    assert isinstance(results[1], PeerLostError)


@each_group
def test_our_close_ends_a_call_that_waits_and_every_later_one(kind: str, size: int) -> None:
    with group(kind, size) as members:
        first = members[0]

        def close_others_last() -> None:
            first.close()

        if size > 1:
            results = in_threads([lambda: first.barrier(), close_others_last])
            assert isinstance(results[0], ChannelClosedError)
        first.close()
        array = np.zeros(4, np.float32)
        calls: tuple[Callable[[], object], ...] = (
            lambda: first.all_reduce(array),
            lambda: first.all_gather(array, [array.copy() for _ in range(size)]),
            lambda: first.broadcast(array, root=0),
            first.barrier,
        )
        for call in calls:
            with pytest.raises(ChannelClosedError):
                call()


def test_a_mesh_needs_a_link_to_every_other_rank() -> None:
    ends = MemoryLink.pair()
    for rank, links in ((0, {0: ends[0]}), (0, {2: ends[0]}), (2, {0: ends[0]}), (-1, {})):
        with pytest.raises(ValueError, match="needs links to all the others"):
            MeshCollective(rank, links)
    for end in ends:
        end.close()


@each_group_with("count", [1, 2048, MANY])
def test_sums_begun_one_after_the_other_have_the_same_bits(
    kind: str, size: int, count: int
) -> None:
    """Two are under way at any time, as when the halves of a chunk are computed in turn."""
    rounds = [terms_of(size, count + index) for index in range(4)]
    expected = [reduce(np.add, terms).tobytes() for terms in rounds]

    def run(member: Collective) -> list[bytes]:
        arrays = [terms[member.rank].copy() for terms in rounds]
        works = [member.begin_all_reduce(arrays[0])]
        for before, array in enumerate(arrays[1:]):
            works.append(member.begin_all_reduce(array))
            works[before].wait()
        works[-1].wait()
        works[-1].wait()
        return [array.tobytes() for array in arrays]

    with group(kind, size) as members:
        assert on_every_rank(members, run) == [expected] * size


def test_a_sum_begun_takes_contiguous_arrays_only() -> None:
    strided = np.zeros((4, 4), np.float32).T
    with group("memory", 2) as members:
        for member in members:
            with pytest.raises(ValueError, match="contiguous"):
                member.begin_all_reduce(strided)


@pytest.mark.parametrize("kind", LINK_KINDS)
def test_who_waits_for_a_sum_hears_who_is_lost(kind: str) -> None:
    """And so does everybody who waits for a later one."""

    def wrap(rank: int, _other: int, link: Link) -> Link:
        return FaultyLink(link, Fault.LOSE) if rank == 0 else link

    with group(kind, 2, wrap=wrap) as members:
        works = [members[0].begin_all_reduce(np.ones(2048, np.float32)) for _ in range(3)]
        heard = set()
        for work in works:
            with pytest.raises(PeerLostError) as caught:
                work.wait()
            heard.add(caught.value.peer)
        assert len(heard) == 1


@pytest.mark.parametrize("kind", [*LINK_KINDS, DEVICE_KIND])
def test_closing_ends_a_sum_that_was_begun(kind: str) -> None:
    with group(kind, 2) as members:
        works = [members[0].begin_all_reduce(np.ones(4, np.float32)) for _ in range(2)]
        members[0].close()
        for work in works:
            with pytest.raises(ChannelClosedError):
                work.wait()
        with pytest.raises(ChannelClosedError):
            members[0].begin_all_reduce(np.ones(4, np.float32))
