"""LoRA adapters made by the package peft, and what it makes of a model with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import tqdm
from numpy.typing import NDArray

from tests.support.checkpoints import hub

EVERY_MATRIX = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 4

_peft: Any = peft
tqdm.tqdm.monitor_interval = 0  # no thread that watches progress bars that nobody sees


def write_adapter(
    folder: Path, model: Path, *, seed: int = 0, **settings: Any
) -> dict[str, NDArray[np.float32]]:
    """Of random numbers, where a new one adds nothing. Returns the weights it makes of the model's.

    settings: of peft.LoraConfig. Weights are by their names in the model, in float32.
    """
    torch.manual_seed(seed)
    base = hub.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = _peft.LoraConfig(
        **{
            "r": RANK,
            "lora_alpha": 6,
            "target_modules": list(EVERY_MATRIX),
            "init_lora_weights": False,
            "task_type": "CAUSAL_LM",
            **settings,
        }
    )
    with warnings.catch_warnings():  # it asks transformers for what that no longer likes
        warnings.simplefilter("ignore", FutureWarning)
        adapted = _peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.01 * torch.randn_like(parameter))
    with warnings.catch_warnings():  # it says that it saves a head's own weights, too
        warnings.simplefilter("ignore", UserWarning)
        adapted.save_pretrained(folder)
    merged = adapted.merge_and_unload().state_dict()
    return {name: tensor.detach().numpy().copy() for name, tensor in merged.items()}
