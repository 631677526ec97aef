"""LoRA adapters made by the package peft, and what it makes of a model with them.

In a process of its own: peft leaves things behind that complain when Python ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

EVERY_MATRIX = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 4
_MERGED = "merged.safetensors"

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One to be made: its folder, for which model, and how. settings: of peft.LoraConfig, which
    without them gets one of every matrix."""

    folder: str
    model: str
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


def write_adapters(wanted: Sequence[Adapter]) -> list[Weights]:
    """Of random numbers, where new ones add nothing. Returns the weights they make of the models'.

    Weights are by their names in the model, in float32.
    """
    told = json.dumps([asdict(each) for each in wanted])
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [_merged(Path(each.folder)) for each in wanted]


def _merged(folder: Path) -> Weights:
    file = folder / _MERGED
    weights: Weights = load_file(file)
    file.unlink()
    return weights


def _make(wanted: Adapter) -> None:
    import peft
    import torch
    import transformers
    from safetensors.torch import save_file

    libraries: Any = (peft, transformers)
    lora, hub = libraries
    torch.manual_seed(wanted.seed)
    base = hub.AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32)
    config = lora.LoraConfig(
        **{
            "r": RANK,
            "lora_alpha": 6,
            "target_modules": list(EVERY_MATRIX),
            "init_lora_weights": False,
            "task_type": "CAUSAL_LM",
            **wanted.settings,
        }
    )
    adapted = lora.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.01 * torch.randn_like(parameter))
    adapted.save_pretrained(wanted.folder)
    merged = adapted.merge_and_unload().state_dict()
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in merged.items()}
    save_file(copies, Path(wanted.folder) / _MERGED)


if __name__ == "__main__":
    for each in json.load(sys.stdin):
        _make(Adapter(**each))
