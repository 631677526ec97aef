"""How large a window of streamed layers should be, whatever the rates of disk and processor are."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from edge.offload import is_streamed
from edge.partition.plan.expert_tiers import WINDOW_LAYERS

PASSES = 12
"""Until each pass takes as long as the one before."""


def pass_s(
    count: int, streamed: int, window: int, *, read_s: float, compute_s: float, rest_s: float
) -> float:
    """Seconds of a token: layers compute in turn, then what comes after them.

    The disk brings one layer at a time, in the order of use, and begins when the window has room.
    """
    loose = [each for each in range(count) if is_streamed(each, count, streamed)]
    ends = [0.0] * window
    """When what was in each place of the window was used; then it is free."""
    disk_s = now_s = before_s = 0.0
    for number in range(PASSES):
        before_s = now_s
        for layer in range(count):
            if layer in loose:
                place = (number * len(loose) + loose.index(layer)) % window
                disk_s = max(disk_s, ends[place]) + read_s
                now_s = max(now_s, disk_s) + compute_s
                ends[place] = now_s
            else:
                now_s += compute_s
        now_s += rest_s
    return now_s - before_s


@given(count=st.integers(1, 80), data=st.data())
def test_streamed_layers_lie_as_evenly_as_can_be(count: int, data: st.DataObject) -> None:
    streamed = data.draw(st.integers(0, count))
    chosen = [each for each in range(count) if is_streamed(each, count, streamed)]
    assert len(chosen) == streamed
    if streamed:
        behind = [*chosen[1:], chosen[0] + count]
        gaps = {after - before for before, after in zip(chosen, behind, strict=True)}
        assert max(gaps) - min(gaps) <= 1


SECONDS = st.integers(0, 50).map(float)


@given(
    count=st.integers(4, 30),
    more=st.integers(1, 4),
    read_s=st.integers(1, 50).map(float),
    compute_s=SECONDS,
    rest_s=SECONDS,
    data=st.data(),
)
def test_a_larger_window_is_worse_than_more_layers_that_stay(
    count: int, more: int, read_s: float, compute_s: float, rest_s: float, data: st.DataObject
) -> None:
    """In the same memory, each layer more in the window is one more that is read.

    Where much comes after the layers, it may save the computing of one.
    """
    streamed = data.draw(st.integers(WINDOW_LAYERS + 1, count))
    assume(streamed + more <= count)
    rates = {"read_s": read_s, "compute_s": compute_s, "rest_s": rest_s}
    ours = pass_s(count, streamed, WINDOW_LAYERS, **rates)
    theirs = pass_s(count, streamed + more, WINDOW_LAYERS + more, **rates)
    assert ours <= theirs + compute_s + 1e-6


@given(
    count=st.integers(4, 30),
    read_s=st.integers(1, 50).map(float),
    compute_s=SECONDS,
    data=st.data(),
)
def test_a_token_takes_as_long_as_the_slower_of_disk_and_processor(
    count: int, read_s: float, compute_s: float, data: st.DataObject
) -> None:
    """But for a layer: where the streamed ones cannot lie quite evenly."""
    streamed = data.draw(st.integers(WINDOW_LAYERS + 1, count))
    found = pass_s(count, streamed, WINDOW_LAYERS, read_s=read_s, compute_s=compute_s, rest_s=0.0)
    assert found <= max(streamed * read_s, count * compute_s) * 1.25
