"""State of graphs: found by names, checked, and begun with zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import RequestError
from edge.graphs.atoms import Atoms
from edge.graphs.kept import Kept, KeptTensors
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import GraphValue, OnnxFile
from edge.graphs.state import check_state, closed_places, find_state, zeros
from tests.support.small_graphs import FLOAT, KINDS, Builder, stateful, written


def graph_of(folder: Path, names: dict[str, str], **changes: Any) -> OnnxFile:
    """Each input by the output that is its double."""
    b = Builder()
    for output, name in names.items():
        b.add("Add", name, name, out=output)
    inputs = {name: (FLOAT, ["n", 4]) for name in names.values()} | changes
    return open_onnx(written(b.model(inputs, dict.fromkeys(names, FLOAT)), folder))


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("hn", "h0"),
        ("cn", "c"),
        ("stateN", "state"),
        ("state_out", "state_in"),
        ("cache_last_channel_next", "cache_last_channel"),
        ("present.0.decoder.key", "past_key_values.0.decoder.key"),
        ("newHiddenState", "hiddenState"),
    ],
)
def test_state_is_found_by_its_names(output: str, name: str, tmp_path: Path) -> None:
    assert find_state(graph_of(tmp_path, {output: name, "y": "x"})) == {output: name}


def test_what_is_not_sure_is_no_state(tmp_path: Path) -> None:
    both = {"new_state": "state", "next_state": "x"}
    assert find_state(graph_of(tmp_path, both)) == {}
    assert find_state(graph_of(tmp_path, {"out": "in", "ids_out": "ids"})) == {}
    for make, _inputs in KINDS.values():
        assert find_state(open_onnx(written(make(), tmp_path))) == {}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"z": "state_0"}, "'z' is no output"),
        ({"y": "z"}, "'z' is no input"),
        ({"y": "row"}, "must be int64"),
        ({"new_state_0": "x", "y": "x"}, "of two outputs"),
    ],
)
def test_wrong_states_are_refused(state: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        check_state(open_onnx(written(stateful(), tmp_path)), state)


def test_first_states_have_the_sizes_of_inputs() -> None:
    x = GraphValue(name="x", dtype="float32", shape=("n", 3))
    h = GraphValue(name="h", dtype="float16", shape=("n", 2, "t", None))
    found = zeros([h], [x, h], {"x": np.ones((5, 3))}, {"h": (1, 2, 4, 6)})["h"]
    assert found.shape == (5, 2, 4, 6)
    assert found.dtype == np.float16
    assert not found.any()
    any_shape = GraphValue(name="s", dtype="string", shape=None)
    assert zeros([any_shape], [], {}, {"s": (2,)})["s"].tolist() == ["", ""]
    for value in (h, any_shape):
        with pytest.raises(RequestError, match="no input tells its sizes"):
            zeros([value], [x], {"x": np.ones((5, 3))}, {})


def test_no_cut_parts_a_state_from_its_users(tmp_path: Path) -> None:
    atoms = Atoms(open_onnx(written(stateful(), tmp_path)))
    state = {"new_state_0": "state_0", "new_state_1": "state_1"}
    closed = closed_places(atoms, state)
    for output, name in state.items():
        users = {number for number, atom in enumerate(atoms) if name in atom.inputs}
        maker = next(number for number, atom in enumerate(atoms) if output in atom.outputs)
        assert closed.issuperset(range(min(users) + 1, maker + 1))
    assert 4 not in closed
    assert closed_places(atoms, {}) == frozenset()


def test_kept_tensors_are_added_ordered_and_dropped() -> None:
    kept = KeptTensors()
    rows = np.arange(3)
    first = Kept(slot="a", keep={"new": "old"}, hold=("x",), give=("y",)).to_json()
    assert kept.add_to({"x": rows}, first)
    given = kept.take_from({"x": rows}, {"new": rows, "y": rows + 1}, first)
    assert {name: each.tolist() for name, each in given.items()} == {"y": [1, 2, 3]}
    inputs: dict[str, Any] = {}
    following = Kept(slot="a", take=("old", "x"), order=(2, 2), ordered=("old",)).to_json()
    assert kept.add_to(inputs, following)
    assert inputs["old"].tolist() == [2, 2]
    assert inputs["x"].tolist() == [0, 1, 2]
    assert not kept.add_to({}, Kept(slot="b", take=("old",)).to_json())
    assert not kept.add_to({}, Kept(slot="a", take=("old",), drop=("a",)).to_json())
