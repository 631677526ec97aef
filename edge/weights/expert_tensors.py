"""Whether a folder has a tensor for every expert, in the layout of the model's family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from reprlib import repr as shown

from edge.errors import CheckpointError
from edge.models.experts import Experts, expert_number
from edge.models.spec import ModelSpec
from edge.weights.packed.mxfp4 import BLOCKS

_REMEDY = "take the folder as the model's makers publish it, all of it"


def check_experts(
    spec: ModelSpec,
    tensor_name: Callable[[str], str],
    *,
    files: Collection[str],
    found: Collection[str],
    wholes: Mapping[str, str],
    source: str,
) -> None:
    """Raises CheckpointError for an expert without a tensor: it names the tensor of the files.

    files: names of their tensors; found: of those that are made of them, too. wholes: by the name
    of an expert's tensor, that in which the family has those of all experts.
    """
    for layer in range(spec.num_layers):
        part = spec.layer(layer).feed_forward
        if not isinstance(part, Experts):
            continue
        for own in part.shapes(spec.hidden_size):
            role = f"layers.{layer}.{own}"
            number = expert_number(role)
            name = tensor_name(role)
            if number is None or name in found:
                continue
            cause = _cause(name, number, wholes.get(name), files, spec.family)
            raise CheckpointError(f"{source}: {cause}", remedy=_REMEDY)


def _cause(name: str, number: int, whole: str | None, files: Collection[str], family: str) -> str:
    """What is wrong where there is no tensor of this name, for expert `number` of its layer."""
    for stored in (whole, f"{whole}{BLOCKS}"):
        if stored in files:
            return f"tensor {stored} has no expert {number}, and config.json counts more"
    before = f"{name.partition('.experts.')[0]}.experts."
    others = [each for each in files if each.startswith(before)]
    together = [each for each in others if not each[len(before) :][:1].isdigit()]
    if whole is not None and len(together) == len(others):
        return f"tensor {whole}, with all experts of a layer, is missing"
    if whole is None and together:
        return (
            f"tensor {min(together)} has all experts of a layer, where models of family "
            f"{shown(family)} have tensors for each: {name} is missing"
        )
    return f"tensor {name} is missing"
