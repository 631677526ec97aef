"""Every error has a code for programs, which is written down and outlives the way from a peer."""

from __future__ import annotations

import inspect

import pytest

import edge
from edge import errors
from edge.errors import EdgeError
from edge.protocol.error_codec import Failed

CLASSES = [
    each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, EdgeError)
]


def test_each_kind_has_a_code_of_its_own_that_is_written_down() -> None:
    codes = {each.code: each.__name__ for each in CLASSES}
    assert len(codes) == len(CLASSES) >= 9
    table = inspect.getdoc(errors)
    assert table is not None
    rows = [line.strip("├─└│ ").split()[:2] for line in table.splitlines() if "Error  " in line]
    assert {code: name for name, code in rows} == codes


@pytest.mark.parametrize(
    "error",
    [
        edge.RequestError("no"),
        edge.CheckpointError("no"),
        edge.CapacityError("no"),
        edge.PlanError("no"),
        edge.ProtocolError("no"),
        edge.PeerError("near", "no"),
        edge.PeerLostError("near", "gone"),
    ],
    ids=lambda error: error.code,
)
def test_a_peers_error_has_the_same_code_here(error: EdgeError) -> None:
    assert Failed.of(error).as_error("near").code == error.code
