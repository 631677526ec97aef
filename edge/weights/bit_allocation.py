"""Bit allocation: the bits of each matrix, for a given mean of all. Pure.

The choice is greedy: starting with the coarsest kind for every matrix, take the step that saves
most loss for its bytes, while there are bytes. Losses of matrices are added as if they were
independent. Layers get their bits in three classes, by total sensitivity, because each class is a
kind of layer for plans and kernels. On SmolLM2-135M this loses nothing against a choice for each
layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge.weights.block_matrices import Blocks
from edge.weights.file_blocks import FileBlocks

_CLASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KindChoice:
    """A possible kind of a matrix, with its loss."""

    kind: Blocks | FileBlocks
    num_bytes: int
    loss: float
    """Nats that it adds to the KL divergence."""


Choices = Mapping[str, Sequence[KindChoice]]
"""The choices of each role, from coarse to fine."""


def allocate_bits(choices: Choices, total_bytes: float) -> dict[str, KindChoice]:
    """A choice for each matrix, within `total_bytes` in all, or else the smallest of each."""
    members = _alike(choices)
    merged = {name: _sum([choices[role] for role in roles]) for name, roles in members.items()}
    found = dict.fromkeys(merged, 0)
    left = total_bytes - sum(each[0].num_bytes for each in merged.values())
    while True:
        steps = [
            ((now.loss - then.loss) / (then.num_bytes - now.num_bytes), name, at)
            for name, each in merged.items()
            for now in (each[found[name]],)
            for at, then in enumerate(each)
            if 0 < then.num_bytes - now.num_bytes <= left and then.loss < now.loss
        ]
        if not steps:
            break
        _gain, name, at = max(steps)
        left -= merged[name][at].num_bytes - merged[name][found[name]].num_bytes
        found[name] = at
    return {role: choices[role][found[name]] for name, roles in members.items() for role in roles}


def _alike(choices: Choices) -> dict[str, list[str]]:
    """Groups of roles that get the same kind."""
    layers: dict[str, float] = defaultdict(float)
    for role, each in choices.items():
        if role.startswith("layers."):
            layers[role.split(".")[1]] += each[0].loss
    order = sorted(layers, key=lambda layer: (-layers[layer], int(layer)))
    classes = {layer: number * _CLASSES // len(order) for number, layer in enumerate(order)}
    found: dict[str, list[str]] = defaultdict(list)
    for role, each in choices.items():
        name = role
        if role.startswith("layers."):
            _layers, layer, local = role.split(".", 2)
            # Layers of other sizes may have other choices.
            kinds = [e.kind.words for e in each]
            name = f"{classes[layer]} {local} {kinds}"
        found[name].append(role)
    return found


def _sum(several: Sequence[Sequence[KindChoice]]) -> list[KindChoice]:
    return [
        KindChoice(
            kind=alike[0].kind,
            num_bytes=sum(choice.num_bytes for choice in alike),
            loss=sum(choice.loss for choice in alike),
        )
        for alike in zip(*several, strict=True)
    ]
