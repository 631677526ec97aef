"""Whether the adapter's attention of many tokens is right.

WebGPU has a kernel of its own for steps of 32 tokens and more. With subgroups of 4, as of
SwiftShader, it is wrong from the fifth row on (onnxruntime-ep-webgpu 0.4.0). Such a device computes
those steps by ordinary nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.backends.onnx.attention_inputs import attention_face
from edge.backends.onnx.runtime import ort
from edge.kernels.cases import Draw
from edge.kernels.onnx_cases import CaseGraph
from edge.kernels.onnx_graph import WEBGPU
from edge.weights.proof_cases import ATTENTION, EPSILON, distance

LONG_STEP = 32
"""Tokens from which another kernel computes."""

_TOKENS = LONG_STEP + 8
_LARGEST_ERROR = 1e-3


def attends_rightly(open_session: Callable[[bytes], ort.InferenceSession]) -> bool:
    """Compare attention of a long step with the reference."""
    cases, form = CaseGraph(1, WEBGPU), ATTENTION.packed(EPSILON)
    face = attention_face(cases, ATTENTION, EPSILON, (_TOKENS,), _TOKENS, label="probe")
    packed = Draw(0).normal(1, _TOKENS, form.columns)
    name = cases.input("packed", packed)
    output = face(cases.graph, name, None, None, None)
    width = form.num_heads * form.head_size
    cases.graph.output(output, "output", np.float32, [1, _TOKENS, width])
    (found,) = open_session(cases.graph.build()).run(["output"], cases.feeds[0])
    cos, sin = (table[:_TOKENS] for table in ATTENTION.rotary.tables(_TOKENS))
    expected = form.attend(form.heads(packed[0], cos, sin, None), None)
    return distance(found[0], expected) <= _LARGEST_ERROR
