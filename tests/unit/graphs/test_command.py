"""What `edge graph` prints of a file from outside."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge.cli.commands import graph
from tests.support.small_graphs import branches, stateful, written


def test_names_of_a_file_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    model = branches()
    value = model.graph.input[0]
    for node in model.graph.node:
        node.input[:] = ["\x1b[2J" if name == value.name else name for name in node.input]
    value.name = "\x1b[2J"
    value.type.tensor_type.shape.dim[0].dim_param = "\x1b]0;n"
    found = CliRunner().invoke(graph.command, ["inspect", str(written(model, tmp_path))])
    assert found.exit_code == 0, found.output
    assert "\\x1b[2J" in found.output
    assert "\x1b" not in found.output


def test_what_may_be_state_is_named(tmp_path: Path) -> None:
    found = CliRunner().invoke(graph.command, ["inspect", str(written(stateful(), tmp_path))])
    assert "perhaps state (--state auto): new_state_0 is the next state_0" in found.output
    words = ["run", str(tmp_path / "model.onnx"), "--state", "x", "--local", "1"]
    assert "not OUTPUT=INPUT" in CliRunner().invoke(graph.command, words).output


def test_json_has_no_word_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    graph._print_finite({"a": [1.5, math.nan, [math.inf]], "b": (1, "x", None, True)})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [1.5, None, [None]],
        "b": [1, "x", None, True],
    }
