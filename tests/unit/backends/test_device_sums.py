"""Who sums from device to device, and that all shards of a stage go the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.backends.device_sums import OVER_LINKS, join, may_join
from edge.transport import ChannelClosedError, Collective, PeerLostError
from tests.support.device_groups import NumpyFace, joined
from tests.support.transport_pairs import group, in_threads, on_every_rank


def offer(alike: int, device: int) -> bytes:
    return bytes([alike] * 32 + [device] * 32)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([offer(7, 1), offer(7, 2)], True),
        ([offer(7, 1), offer(7, 2), offer(7, 3)], True),
        ([offer(7, 1), offer(8, 2)], False),  # another host, or another version
        ([offer(7, 1), offer(7, 1)], False),  # both on one device
        ([offer(7, 1), offer(0, 0)], False),  # one that has no such device
        ([offer(0, 0), offer(0, 0)], False),
    ],
)
def test_like_devices_of_one_host_may_join(offers: list[bytes], expected: bool) -> None:
    assert may_join(offers) is expected


class Sums:
    """Devices that sum as they are told to, in whatever file they are given."""

    way = "made up"
    version = "1"

    def __init__(self, rank: int, make: Callable[[Collective, Path], Any]) -> None:
        self.device = f"device {rank}"
        self._make = make

    def open(self, links: Collective, store: Path) -> Any:
        with store.open("a"):
            return self._make(links, store)


class Opened:
    def __init__(self) -> None:
        self.has_left = False

    def leave(self) -> None:
        self.has_left = True


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders for stores are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def sums_over_links(members: list[Collective]) -> bool:
    """Whether all still do, and their links work."""
    terms = [np.ones(3, np.float32) for _ in members]
    on_every_rank(members, lambda member: member.all_reduce(terms[member.rank]))
    return all((term == len(members)).all() for term in terms)


def test_all_open_the_same_store_which_nobody_else_may_enter(temporary: Path) -> None:
    modes, stores = [], []

    def make(_: Collective, store: Path) -> Opened:
        stores.append(store)
        modes.append(store.parent.stat().st_mode & 0o777)
        return Opened()

    with group("memory", 3) as members:
        found = on_every_rank(members, lambda member: join(member, Sums(member.rank, make)))
    assert [way for _, way in found] == ["made up"] * 3
    assert len(set(stores)) == 1
    assert set(modes) == {0o700}
    assert list(temporary.iterdir()) == []


def test_one_that_cannot_begin_leaves_all_to_their_links(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = [Opened(), Opened(), Opened()]

    def make(links: Collective, _: Path) -> Opened:
        if links.rank == 1:
            raise RuntimeError("no such cable")
        return opened[links.rank]

    with group("memory", 3) as members:
        found = on_every_rank(members, lambda member: join(member, Sums(member.rank, make)))
        assert found == [(member, OVER_LINKS) for member in members]
        assert sums_over_links(members)
    assert [each.has_left for each in opened] == [True, False, True]
    assert "made up cannot begin: no such cable" in caplog.text
    assert list(temporary.iterdir()) == []


def nobody_opens(links: Collective, store: Path) -> None:
    pytest.fail("it opened")


def test_who_does_not_find_the_folder_leaves_all_to_their_links(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container of its own: it looks for the same name in another place."""

    class Elsewhere:
        def __init__(self, inner: Collective) -> None:
            self._inner = inner

        def broadcast(self, array: np.ndarray, *, root: int) -> None:
            self._inner.broadcast(array, root=root)
            array ^= 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    def run(member: Collective) -> tuple[Collective, str]:
        links: Any = Elsewhere(member) if member.rank == 1 else member
        return join(links, Sums(member.rank, nobody_opens))

    with group("memory", 2) as members:
        assert [way for _, way in on_every_rank(members, run)] == [OVER_LINKS] * 2
        assert sums_over_links(members)
    assert "share no temporary folder" in caplog.text
    assert list(temporary.iterdir()) == []


def test_a_stage_of_both_kinds_of_back_end_sums_over_its_links() -> None:
    with group("memory", 2) as members:

        def run(member: Collective) -> tuple[Collective, str]:
            return join(member, Sums(0, nobody_opens) if member.rank else None)

        assert on_every_rank(members, run) == [(member, OVER_LINKS) for member in members]
        assert sums_over_links(members)


def test_devices_that_do_not_reach_each_other_leave_all_to_their_links(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them finds it out; the others, from whom it goes, do then."""
    from edge.backends.triton.device import Device
    from edge.backends.triton.nccl import TorchCollective, device_sums

    check = TorchCollective.check

    def checked(self: TorchCollective) -> None:
        if self.rank == 1:
            raise RuntimeError("no way there")
        check(self)

    monkeypatch.setattr(TorchCollective, "check", checked)
    with group("tcp", 3) as members:
        found = on_every_rank(members, lambda member: join(member, device_sums(Device())))
        assert found == [(member, OVER_LINKS) for member in members]
        assert sums_over_links(members)
    assert "gloo cannot begin: no way there" in caplog.text


def test_a_rank_whose_group_ends_is_heard_of_by_all_others() -> None:
    """Its links go, too, as when its process ends; the others hear of it from each other."""

    def run(member: Collective) -> list[str]:
        face = NumpyFace(joined(member))
        array = np.ones(64, np.float32)
        face.all_reduce(array)
        heard: list[str] = []
        if member.rank == 2:
            face.close()
            return heard
        for work in [face.begin_all_reduce(array) for _ in range(3)]:
            try:
                work.wait()
            except PeerLostError as error:
                heard.append(error.peer)
        face.close()
        return heard

    with group("tcp", 3) as members:
        heard = on_every_rank(members, run)
    assert [len(each) for each in heard] == [3, 3, 0]
    assert [len(set(each)) for each in heard] == [1, 1, 0]


def test_closing_ends_a_sum_that_waits_for_a_rank_that_hangs() -> None:
    with group("tcp", 2) as members:
        faces = [NumpyFace(each) for each in on_every_rank(members, joined)]
        array = np.ones(64, np.float32)
        work = faces[0].begin_all_reduce(array)
        results = in_threads([work.wait, faces[0].close])
        assert isinstance(results[0], ChannelClosedError)
        with pytest.raises(ChannelClosedError):
            faces[0].all_reduce(array)
        for face in faces:
            face.close()


def test_sums_of_tensors_that_do_not_lie_in_a_row_are_refused() -> None:
    import torch

    with group("memory", 2) as members:
        opened = on_every_rank(members, joined)
        for each in opened:
            with pytest.raises(ValueError, match="contiguous"):
                each.all_reduce(torch.zeros(4, 4).T)
        for each in opened:
            each.close()
