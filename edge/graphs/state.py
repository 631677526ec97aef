"""State of a graph: outputs that are inputs of its next run. Declared, or found by names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_file import GraphValue, OnnxFile, numpy_type

_PLACES = frozenset(
    (
        "current", "final", "in", "init", "initial", "input", "n", "new", "next", "old", "out",
        "output", "past", "present", "prev", "previous", "updated",
    )
)  # fmt: skip
"""Words that say before or behind a run."""

_KEPT = frozenset(
    (
        "c", "cache", "cached", "cell", "cells", "cn", "context", "gru", "h", "hidden", "hn", "key",
        "kv", "lstm", "mem", "memory", "past", "present", "rnn", "state", "states", "value",
    )
)  # fmt: skip
"""Words by which names of states are known from those of data."""

_SAME = {("h", "0"): ("h",), ("c", "0"): ("c",), ("hn",): ("h",), ("cn",): ("c",)}


def find_state(file: OnnxFile) -> dict[str, str]:
    """Outputs and the inputs whose next values they are, by names, types and shapes.

    Names are alike but for words such as `new`, `in` and `past`, and have one such as `state` or
    `cache`. Where two outputs or inputs are alike, neither is taken.
    """
    given: dict[tuple[str, ...], list[GraphValue]] = {}
    made: dict[tuple[str, ...], list[GraphValue]] = {}
    for values, found in ((file.inputs, given), (file.outputs, made)):
        for each in values:
            name = each.name.replace("past_key_values", "past")
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
            words = [word.lower() for word in words]
            if not _KEPT.isdisjoint(words):
                key = tuple(word for word in words if word not in _PLACES)
                found.setdefault(_SAME.get(key, key), []).append(each)
    return {
        outputs[0].name: given[key][0].name
        for key, outputs in made.items()
        if len(outputs) == 1 and len(given.get(key, ())) == 1 and _alike(outputs[0], given[key][0])
    }


def check_state(file: OnnxFile, state: Mapping[str, str]) -> None:
    """Raises RequestError unless each output has an input of its own, of its type and rank."""
    inputs = {each.name: each for each in file.inputs}
    outputs = {each.name: each for each in file.outputs}
    for output, name in state.items():
        if output not in outputs:
            raise RequestError(
                f"the state {output!r:.80} is no output of the graph",
                remedy=f"give one of {', '.join(map(repr, outputs))}",
            )
        if name not in inputs:
            raise RequestError(
                f"the state {name!r:.80} is no input of the graph",
                remedy=f"give one of {', '.join(map(repr, inputs))}",
            )
        if not _alike(outputs[output], inputs[name]):
            raise RequestError(
                f"the output {output!r:.80} is {outputs[output]}, and the next value of "
                f"{name!r:.80} must be {inputs[name]}",
                remedy="give an output of the same type and shape",
            )
    if len(set(state.values())) != len(state):
        raise RequestError(
            "an input is the next value of two outputs", remedy="give each output one of its own"
        )


def closed_places(atoms: Atoms, state: Mapping[str, str]) -> frozenset[int]:
    """Places at which a cut would part a state's producer from its users."""
    makers = {name: number for number, atom in enumerate(atoms) for name in atom.outputs}
    closed: set[int] = set()
    for output, name in state.items():
        ends = [*atoms.users.get(name, ()), *([makers[output]] if output in makers else ())]
        if ends:
            closed.update(range(min(ends) + 1, max(ends) + 1))
    return frozenset(closed)


def zeros(
    values: Sequence[GraphValue],
    known: Sequence[GraphValue],
    arrays: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, NDArray[Any]]:
    """Zeros for the inputs `values`.

    A free dimension has the size that `arrays`, for the inputs `known`, give to its name, else that
    of `shapes`. Raises RequestError if none tells it.
    """
    sizes = {
        dimension: size
        for value in known
        if value.name in arrays and value.shape is not None
        for dimension, size in zip(value.shape, np.shape(arrays[value.name]), strict=False)
        if isinstance(dimension, str)
    }
    found = {}
    for value in values:
        wanted: Sequence[int | str | None] | None = value.shape
        told: Sequence[int | None] | None = shapes.get(value.name)
        if wanted is None:
            wanted = told
        if told is None or len(told) != len(wanted or ()):
            told = (None,) * len(wanted or ())
        shape = [
            size if isinstance(size, int) else sizes.get(str(size), other)
            for size, other in zip(wanted or (), told, strict=True)
        ]
        if wanted is None or None in shape:
            raise RequestError(
                f"the first state {value.name!r:.80} is {value}, and no input tells its sizes",
                remedy="give it in the sample",
            )
        empty = "" if value.dtype == "string" else 0
        found[value.name] = np.full([int(s or 0) for s in shape], empty, numpy_type(value.dtype))
    return found


def _alike(output: GraphValue, given: GraphValue) -> bool:
    if output.dtype != given.dtype:
        return False
    if output.shape is None or given.shape is None:
        return True
    return len(output.shape) == len(given.shape) and all(
        one == two or not (isinstance(one, int) and isinstance(two, int))
        for one, two in zip(output.shape, given.shape, strict=True)
    )
