"""Tensors that stay in the process of a part between its runs: states, and caches of decoders.

They lie in slots, one for each sequence of inputs, under the names of the inputs that they are.
Needs numpy and the standard library alone, as tensors.py does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What of a run stays where it was computed."""

    slot: str
    take: tuple[str, ...] = ()
    """Inputs that are not sent, because they are kept."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """Outputs, and the names of inputs under which they are kept for the next run."""
    hold: tuple[str, ...] = ()
    """Inputs that are sent, and kept for the next run, too."""
    give: tuple[str, ...] = ()
    """Outputs that are sent back."""
    order: tuple[int, ...] = ()
    """Rows of `ordered` that are kept, in this order, before the run; empty: all stay."""
    ordered: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    """Slots that are needed no more."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class KeptTensors:
    """The slots of one part. A run that fails changes none, but for the order of rows."""

    def __init__(self) -> None:
        self._slots: dict[str, Tensors] = {}

    def add_to(self, inputs: Tensors, asked: Mapping[str, Any]) -> bool:
        """Add what the run takes to its inputs. False: it is not there any more."""
        for name in asked["drop"]:
            self._slots.pop(name, None)
        slot = self._slots.get(asked["slot"], {})
        if not slot.keys() >= set(asked["take"]):
            return False
        if asked["order"]:
            rows = np.asarray(asked["order"], np.int64)
            slot.update({name: slot[name][rows] for name in asked["ordered"]})
        inputs.update({name: slot[name] for name in asked["take"]})
        return True

    def take_from(self, inputs: Tensors, results: Tensors, asked: Mapping[str, Any]) -> Tensors:
        """Keep what the run asks for. The results that are sent back."""
        slot = self._slots.setdefault(asked["slot"], {})
        # Inputs share the memory of a request, which is not kept.
        slot.update({name: np.array(inputs[name]) for name in asked["hold"]})
        slot.update({name: results[output] for output, name in asked["keep"].items()})
        return {name: results[name] for name in asked["give"]}
