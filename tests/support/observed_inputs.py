"""What each matrix of a tiny checkpoint is multiplied with, in plain numpy; and which experts its
tokens go through, by `transformers`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from edge.models.experts import Experts
from edge.weights.observation import ObservedRun
from tests.support.checkpoints import TinyCheckpoint
from tests.support.reference_model import ReferenceModel

_MODULES = {
    "qkv": "self_attn.q_proj",
    "output": "self_attn.o_proj",
    "gate_up": "mlp.gate_proj",
    "down": "mlp.down_proj",
}
"""Of matrices that are fused, the first: all of them are given the same."""

Array = NDArray[np.float32]


class ObservedInputs(ReferenceModel):
    """Inputs of every matrix while the model reads prompts, one after the other."""

    def __init__(self, checkpoint: TinyCheckpoint, prompts: Iterable[Sequence[int]]) -> None:
        super().__init__(checkpoint)
        self._inputs: dict[str, list[Array]] = defaultdict(list)
        for prompt in prompts:
            self.logits(prompt)

    def difference(self, run: ObservedRun, gram: Array) -> float:
        """The largest difference of a Gram matrix over the largest value it should have."""
        module = "lm_head"
        if run.matrix != "head":
            _layers, layer, name = run.matrix.split(".")
            module = f"model.layers.{layer}.{_MODULES[name]}"
        columns = slice(run.columns.start, run.columns.stop)
        inputs = np.concatenate(self._inputs[module])[:, columns].astype(np.float64)
        expected = inputs.T @ inputs
        assert gram.shape == expected.shape
        return float(np.abs(gram - expected).max() / np.abs(expected).max())

    def _linear(self, x: Array, name: str) -> Array:
        self._inputs[name].append(x)
        return super()._linear(x, name)


def uses_by_transformers(
    checkpoint: TinyCheckpoint, texts: Iterable[Sequence[int]], layer: int
) -> list[float]:
    """How many of these tokens go through each of a layer's experts."""
    block = checkpoint.spec.layer(layer).feed_forward
    assert isinstance(block, Experts)
    uses = np.zeros(block.num_experts)
    before = (checkpoint.spec.layer(each).feed_forward for each in range(layer))
    place = sum(isinstance(each, Experts) for each in before)
    for tokens in texts:
        with torch.no_grad():
            told = checkpoint.model(torch.tensor([list(tokens)]), output_router_logits=True)
        chosen = told.router_logits[place].topk(block.top_k, dim=-1).indices
        uses += np.bincount(chosen.numpy().reshape(-1), minlength=block.num_experts)
    found: list[float] = uses.tolist()
    return found
