"""Further heads for the small random checkpoints, and what they guess by the layers of
`transformers`, which itself leaves these heads out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import PLAIN, TinyCheckpoint, hub, random_weight


class ReferenceHead:
    """A head as a model of one layer, and what is before it."""

    def __init__(self, model: Any, before: dict[str, torch.Tensor], epsilon: float) -> None:
        """before: weights by name in checkpoints after DeepSeek-V3's."""
        self.model = model
        self.before = before
        self._epsilon = epsilon

    def guesses(self, states: NDArray[np.float32], tokens: Sequence[int], count: int) -> list[int]:
        """The tokens after `tokens`, from the model's state of each of them but the last."""
        embed = self.model.get_input_embeddings()
        found: list[int] = []
        known, following = torch.from_numpy(states.copy()), list(tokens[1:])
        with torch.inference_mode():
            while len(found) < count:
                embedded = embed(torch.tensor(following))
                joined = torch.cat(
                    [self._norm(embedded, "enorm"), self._norm(known, "hnorm")], dim=-1
                )
                output = self.model(
                    inputs_embeds=(joined @ self.before["eh_proj"].T)[None],
                    use_cache=False, output_hidden_states=True,
                )  # fmt: skip
                found.append(int(output.logits[0, -1].argmax()))
                following.append(found[-1])
                known = torch.cat([known, output.hidden_states[-1][0, -1:]])
        return found

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self._epsilon) * self.before[name]


_ALIKE = 0.15
"""What layers add, relative to what they added before."""


def add_further_head(
    checkpoint: TinyCheckpoint, *, own_tables: bool = True, alike: bool = False
) -> ReferenceHead:
    """Write a random head into the checkpoint's file. own_tables: it has an embedding and a head
    of its own; else those of the model. alike: it often guesses what the model says, because the
    layers of both add little to the embedding; the model is changed for that."""
    path, number = checkpoint.path / "model.safetensors", checkpoint.spec.num_layers
    values = json.loads((checkpoint.path / "config.json").read_text())
    values |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if "mlp_layer_types" in values:
        values["mlp_layer_types"] = ["sparse"]
    if "layer_types" in values:
        values["layer_types"] = ["full_attention"]
    config = hub.AutoConfig.for_model(values.pop("model_type"), **values)
    model = hub.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **PLAIN).eval()
    tensors = load_file(path)
    is_qwen = checkpoint.spec.family.startswith("qwen")
    added = _ALIKE / 4 if is_qwen else _ALIKE  # gated layers add more
    if alike:
        own_tables = False
        for name, tensor in tensors.items():
            if any(each in name for each in (".o_proj.", ".out_proj.", ".down_proj.")):
                tensor *= added
        tensors["model.embed_tokens.weight"] *= checkpoint.spec.hidden_size**0.5
    shared = {
        "model.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "lm_head.weight": tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]),
    }
    with torch.no_grad():
        buffers = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
        for name, parameter in (*model.named_parameters(), *buffers):
            values_of = random_weight(name, tuple(parameter.shape), "further head")
            is_shared = name in shared and not own_tables
            parameter.copy_(shared[name] if is_shared else torch.from_numpy(values_of))
            if alike and ("o_proj" in name or "down_proj" in name):
                parameter *= added
        if alike:
            model.model.norm.weight.copy_(tensors["model.norm.weight"])
    width = config.hidden_size
    before = {
        name: torch.from_numpy(random_weight(f"{name}.weight", shape, "further head"))
        for name, shape in {
            "enorm": (width,), "hnorm": (width,), "eh_proj": (width, 2 * width),
        }.items()
    }  # fmt: skip
    if alike:
        before["enorm"] = torch.full((width,), 1.0 - is_qwen)
        before["eh_proj"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=-1)
    found = _of_file(model, checkpoint.path / "head", number, own_tables=own_tables)
    found |= {f"model.layers.{number}.{name}.weight": each for name, each in before.items()}
    if is_qwen:
        found = {_of_qwen(name, number): each for name, each in found.items()}
        before |= {name: before[name] + 1 for name in ("enorm", "hnorm")}  # stored as 1 less
    save_file(tensors | found, path, metadata={"format": "pt"})
    return ReferenceHead(model, before, config.rms_norm_eps)


def _of_qwen(name: str, number: int) -> str:
    """The name of a tensor in Qwen's checkpoints."""
    own = name.removeprefix(f"model.layers.{number}.")
    names = {
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "eh_proj.weight": "fc.weight",
        "shared_head.norm.weight": "norm.weight",
    }
    return f"mtp.{names.get(own, f'layers.0.{own}')}"


def _of_file(model: Any, folder: Path, number: int, *, own_tables: bool) -> dict[str, torch.Tensor]:
    """The tensors of the one layer as `transformers` writes them, by their names in a checkpoint
    with a further head."""
    model.save_pretrained(folder)
    prefix = f"model.layers.{number}."
    names = {"model.norm.weight": f"{prefix}shared_head.norm.weight"}
    if own_tables:
        names["model.embed_tokens.weight"] = f"{prefix}embed_tokens.weight"
        names["lm_head.weight"] = f"{prefix}shared_head.head.weight"
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            found[name.replace("model.layers.0.", prefix)] = tensor
        elif name in names:
            found[names[name]] = tensor
    (folder / "model.safetensors").unlink()
    return found
