"""What sums over encoded messages promise, checked for every format, size of group and path."""

from functools import partial, reduce

import numpy as np
import pytest

from edge.transport import (
    EAGER_BYTES,
    Collective,
    EncodedHop,
    Link,
    MemoryLink,
    MeshCollective,
    PeerLostError,
    ProtocolError,
    WireRule,
    open_mesh,
)
from edge.transport.collective import SLICED_ABOVE_BYTES
from edge.transport.testing import Fault, FaultyLink
from edge.transport.wire_format import WireFormatName, open_codec
from tests.support.transport_pairs import (
    LINK_KINDS,
    group,
    in_threads,
    leave_in_the_middle,
    link_pair,
    on_every_rank,
)

FORMATS: tuple[WireFormatName, ...] = ("float16", "int8")
MANY = SLICED_ABOVE_BYTES + 37
"""Numbers whose messages are summed in slices in either format; no block and no rank divides it."""

COUNTS = (0, 1, 31, 32, 2048, EAGER_BYTES + 1, MANY)

each_format = pytest.mark.parametrize("name", FORMATS)
each_kind = pytest.mark.parametrize("kind", LINK_KINDS)


def rounded(name: WireFormatName, numbers: np.ndarray) -> np.ndarray:
    """`numbers` as they arrive at the other end."""
    codec = open_codec(name)
    message = np.empty(codec.num_bytes(numbers.size), np.uint8)
    codec.encode(numbers, message)
    back = np.empty_like(numbers)
    codec.decode(message, back)
    return back


def terms_of(size: int, count: int) -> list[np.ndarray]:
    random = np.random.default_rng(size * 1_000_003 + count)
    scales = 10.0 ** random.integers(-3, 4, (size, count))
    return list((random.standard_normal((size, count)) * scales).astype(np.float32))


def all_reduced(members: list[Collective], terms: list[np.ndarray]) -> list[np.ndarray]:
    arrays = [term.copy() for term in terms]
    on_every_rank(members, lambda member: member.all_reduce(arrays[member.rank]))
    return arrays


def expected_sum(name: WireFormatName, terms: list[np.ndarray]) -> np.ndarray:
    """Rounded terms in rank order; sums that were taken in slices are rounded once more."""
    total = reduce(np.add, [rounded(name, term) for term in terms])
    nbytes = open_codec(name).num_bytes(total.size)
    return rounded(name, total) if len(terms) > 2 and nbytes > SLICED_ABOVE_BYTES else total


@each_kind
@each_format
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", COUNTS)
def test_every_rank_holds_the_sum_of_what_travelled(
    kind: str, name: WireFormatName, size: int, count: int
) -> None:
    terms = terms_of(size, count)
    expected = terms[0] if size == 1 else expected_sum(name, terms)
    with group(kind, size, rule=WireRule(format=name)) as members:
        for _ in range(2):
            for array in all_reduced(members, terms):
                assert array.tobytes() == expected.tobytes()


@each_format
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [2048, MANY])
def test_the_sum_is_close_to_the_exact_one(name: WireFormatName, size: int, count: int) -> None:
    """Each rounding errs by half a step of its block; a sliced sum is rounded twice."""
    random = np.random.default_rng(count + size)
    terms = list(random.standard_normal((size, count)).astype(np.float32))
    exact = np.sum(terms, axis=0, dtype=np.float64)
    step = 2.0**-10 if name == "float16" else 1 / 127
    largest = sum(float(np.abs(term).max()) for term in terms)
    with group("memory", size, rule=WireRule(format=name)) as members:
        (total, *others) = all_reduced(members, terms)
    assert {other.tobytes() for other in others} == {total.tobytes()}
    error = np.abs(total - exact)
    assert 0 < error.max() <= 2 * largest * step / 2 * 1.01


@each_format
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [100, MANY])
@pytest.mark.filterwarnings("ignore:invalid value encountered in add")
def test_what_is_not_finite_is_the_same_on_every_rank(
    name: WireFormatName, size: int, count: int
) -> None:
    terms = [np.ones(count, np.float32) for _ in range(size)]
    terms[0][40], terms[1][40] = np.nan, -np.nan
    terms[0][70], terms[1][71] = np.inf, -np.inf
    terms[0][75], terms[1][75] = np.inf, -np.inf
    with group("tcp", size, rule=WireRule(format=name)) as members:
        (total, *others) = all_reduced(members, terms)
    assert {other.tobytes() for other in others} == {total.tobytes()}
    assert np.isnan(total[40])
    assert np.allclose(total[:32], size, rtol=0.01)
    if name == "int8":
        assert not np.isfinite(total[32:96]).any()
    else:
        assert (abs(total[[70, 71]]) > 65000).all()
        assert abs(total[75]) <= size


@each_kind
@pytest.mark.parametrize("size", [2, 3])
def test_what_the_rule_leaves_alone_is_summed_exactly(kind: str, size: int) -> None:
    rule = WireRule(format="int8", above_bytes=400)
    small, large = terms_of(size, 100), terms_of(size, 101)
    whole = [np.arange(1000) * (rank + 12345) for rank in range(size)]
    doubles = [term.astype(np.float64) for term in large]
    with group(kind, size, rule=rule) as members:
        for terms in (small, whole, doubles):
            for array in all_reduced(members, terms):
                assert array.tobytes() == reduce(np.add, terms).tobytes()
        for array in all_reduced(members, large):
            assert array.tobytes() == expected_sum("int8", large).tobytes()


@each_format
@pytest.mark.parametrize("size", [2, 3])
def test_sums_that_are_begun_are_the_same_sums(name: WireFormatName, size: int) -> None:
    several = [terms_of(size, count) for count in (MANY, 2048, 33)]

    def run(member: Collective) -> list[bytes]:
        arrays = [terms[member.rank].copy() for terms in several]
        for work in [member.begin_all_reduce(array) for array in arrays]:
            work.wait()
        return [array.tobytes() for array in arrays]

    expected = [expected_sum(name, terms).tobytes() for terms in several]
    with group("tcp", size, rule=WireRule(format=name)) as members:
        assert on_every_rank(members, run) == [expected] * size


@each_format
@pytest.mark.parametrize("size", [2, 3])
def test_shapes_are_kept_and_strides_refused(name: WireFormatName, size: int) -> None:
    terms = [term.reshape(3, 7, 11) for term in terms_of(size, 231)]
    expected = expected_sum(name, [term.reshape(-1) for term in terms])
    strided = np.zeros((4, 4), np.float32).T

    def run(member: Collective) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            member.all_reduce(strided)
        member.all_reduce(terms[member.rank])

    with group("memory", size, rule=WireRule(format=name)) as members:
        on_every_rank(members, run)
    for term in terms:
        assert term.shape == (3, 7, 11)
        assert term.tobytes() == expected.tobytes()


@each_kind
@each_format
@pytest.mark.parametrize("size", [2, 3, 5])
def test_mixed_calls_in_a_row_stay_in_step(kind: str, name: WireFormatName, size: int) -> None:
    """Ranks run ahead of each other; sizes change, so buffers are made anew and shared."""

    def run(member: Collective) -> list[bytes]:
        seen = []
        for turn in range(24):
            array = np.full((turn * 37) % 101 * 800, member.rank + turn, np.float32)
            member.all_reduce(array)
            seen.append(array.tobytes())
            member.broadcast(array, root=turn % size)
            into = [np.empty_like(array) for _ in range(size)]
            member.all_gather(array, into)
            assert all(one.tobytes() == array.tobytes() for one in into)
            member.barrier()
        return seen

    with group(kind, size, rule=WireRule(format=name, above_bytes=4000)) as members:
        results = on_every_rank(members, run)
    assert all(result == results[0] for result in results)


def test_buffers_are_made_once_per_size() -> None:
    with group("memory", 3, rule=WireRule(format="int8")) as members:
        stores = []
        for count in (MANY, 5, MANY, 700, 5):
            all_reduced(members, [np.ones(count, np.float32) for _ in members])
            stores.append(
                [
                    [id(store) for scratch in scratches for store in scratch._stores]
                    for scratches in [
                        (member._scratch, member._messages, member._packet)  # type: ignore[attr-defined]
                        for member in members
                    ]
                ]
            )
    assert all(one == stores[0] for one in stores)


@each_kind
def test_ranks_with_different_rules_hear_of_it(kind: str) -> None:
    with link_pair(kind) as (first, second):
        members = [
            open_mesh(0, {1: first}, WireRule(format="float16")),
            open_mesh(1, {0: second}, WireRule(format="int8")),
        ]
        arrays = [np.ones(2048, np.float32) for _ in members]
        results = in_threads(
            [partial(member.all_reduce, arrays[member.rank]) for member in members]
        )
    assert any(isinstance(result, ProtocolError) for result in results)
    assert all(isinstance(result, ProtocolError | PeerLostError) for result in results)


@each_kind
@each_format
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [2048, MANY])
def test_a_rank_that_leaves_in_the_middle_is_lost_to_the_others(
    kind: str, name: WireFormatName, size: int, count: int
) -> None:
    with group(kind, size, rule=WireRule(format=name)) as members:
        assert leave_in_the_middle(members, count) == ["lost at 2"] * (size - 1) + ["left"]


def test_a_message_cut_short_is_refused() -> None:
    def wrap(rank: int, other: int, link: Link) -> Link:
        return FaultyLink(link, Fault.TRUNCATE) if (rank, other) == (0, 1) else link

    with group("memory", 2, rule=WireRule(format="int8"), wrap=wrap) as members:
        results = in_threads(
            [partial(member.all_reduce, np.ones(64, np.float32)) for member in members]
        )
    assert isinstance(results[1], ProtocolError)
    assert "36 bytes where 72 were expected" in str(results[1])


@each_kind
@pytest.mark.parametrize("name", ["float32", *FORMATS])
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3, 7), (4, 2048)], ids=str)
def test_a_hop_delivers_what_was_rounded_to_every_successor(
    kind: str, name: WireFormatName, shape: tuple[int, ...]
) -> None:
    rule = WireRule(format=name)
    count = int(np.prod(shape))
    numbers = terms_of(1, count)[0].reshape(shape)
    expected = numbers if name == "float32" else rounded(name, numbers.reshape(-1))
    sender, receivers = EncodedHop(rule), [EncodedHop(rule), EncodedHop(rule)]
    into = [np.full(shape, 7, np.float32) for _ in receivers]
    with link_pair(kind) as first, link_pair(kind) as second:
        ends = (first, second)
        for _ in range(2):
            message = sender.outgoing(numbers)
            assert (message is numbers) == (name == "float32" or count == 0)
            for end, receiver, array in zip(ends, receivers, into, strict=True):
                end[0].send(message)
                receiver.receive(end[1], array)
                assert array.tobytes() == expected.tobytes()


def test_both_ends_of_a_hop_keep_to_one_rule() -> None:
    numbers = np.ones(64, np.float32)
    pairs: tuple[tuple[WireFormatName, WireFormatName], ...] = (
        ("float16", "float32"),
        ("int8", "float16"),
        ("float32", "int8"),
    )
    for ours, theirs in pairs:
        first, second = MemoryLink.pair()
        first.send(EncodedHop(WireRule(format=ours)).outgoing(numbers))
        with pytest.raises(ProtocolError, match="bytes where"):
            EncodedHop(WireRule(format=theirs)).receive(second, numbers.copy())
        first.close()
        second.close()


def test_a_rule_of_float32_takes_the_plain_road() -> None:
    first, second = MemoryLink.pair()
    assert type(open_mesh(0, {1: first}, WireRule())) is MeshCollective
    first.close()
    second.close()
