"""Sessions of ONNX Runtime write nothing: what they raise is told in words of the peer."""

from __future__ import annotations

import numpy as np
import pytest

from edge.backends.onnx.runtime import new_session_options, ort
from edge.kernels.onnx_graph import OnnxGraph


def test_an_error_of_a_step_is_raised_and_not_written(capfd: pytest.CaptureFixture[str]) -> None:
    graph = OnnxGraph("gathers")
    index = graph.input("index", np.int64, [1])
    row = graph.node("Gather", graph.constant("rows", np.zeros((2, 3), np.float32)), index)
    graph.output(row, "row", np.float32, [1, 3])
    options = new_session_options()
    options.use_per_session_threads = True
    session = ort.InferenceSession(graph.build(), options, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="Non-zero status code"):
        session.run(None, {"index": np.asarray([2])})
    assert capfd.readouterr() == ("", "")
