"""A model with a LoRA adapter over real daemons gives what `transformers` gives with both."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

import edge
from edge.demos.bundled import MODEL
from tests.support.checkpoints import TinyCheckpoint, hub
from tests.support.lora_adapters import EVERY_MATRIX, RANK, Weights
from tests.support.plans import make_plan, streaming
from tests.support.processes import edge as run_edge
from tests.support.slow_cases import shown_in_parts

LARGEST_DIFFERENCE = 1e-4
PROMPT_TOKENS = 24
ALPHA = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the folder of an adapter of every matrix, and the weights that the two make."""

    model: TinyCheckpoint
    adapter: Path
    weights: Weights


def write_adapter(folder: Path, model: TinyCheckpoint) -> Weights:
    """One of every matrix, as peft writes them, whose own `tests/unit/weights/test_lora.py` reads.

    Of random numbers. Returns the weights that it makes of the model's.
    """
    random, weights = np.random.default_rng(0), dict(model.weights)
    parts: Weights = {}
    for name, weight in model.weights.items():
        *_, part, kind = name.split(".")
        if part not in EVERY_MATRIX or kind != "weight":
            continue
        rows, columns = weight.shape
        down = random.uniform(-1, 1, (RANK, columns)).astype(np.float32) * columns**-0.5
        up = random.uniform(-1, 1, (rows, RANK)).astype(np.float32) * RANK**-0.5
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        parts |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        weights[name] = weight + ALPHA / RANK * (up @ down)
    folder.mkdir()
    save_file(parts, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "target_modules": list(EVERY_MATRIX)})
    )
    return weights


@pytest.fixture(scope="module")
def cases(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    models = {
        "float32": tiny_checkpoint("llama"),
        "bfloat16": tiny_checkpoint("qwen2", stored_type="bfloat16"),
        "bundled": TinyCheckpoint(MODEL),
    }
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: Case(model=model, adapter=folder / name, weights=write_adapter(folder / name, model))
        for name, model in models.items()
    }


def logits_of(weights: dict[str, Any], model: Path, prompt: list[int]) -> NDArray[np.float32]:
    made = hub.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    made.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()})
    with torch.inference_mode():
        found: NDArray[np.float32] = made.eval()(torch.tensor([prompt])).logits[0].numpy()
    return found


@pytest.mark.linux_ways
def test_every_plan_computes_with_it(five_peers: edge.Cluster, cases: dict[str, Case]) -> None:
    case = cases["float32"]
    checkpoint = case.model
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    expected = logits_of(case.weights, checkpoint.path, prompt)
    assert np.abs(expected - checkpoint.logits(prompt)).max() > 100 * LARGEST_DIFFERENCE
    tensor = make_plan(checkpoint.spec, "tensor_3", model=checkpoint.path.name)
    pipeline = make_plan(checkpoint.spec, "pipeline_2", model=checkpoint.path.name)
    for plan in (tensor, streaming(pipeline, 2)):
        options = edge.LoadOptions(dtype="float32", plan=plan, lora=case.adapter)
        with five_peers.load(checkpoint.path, options) as model:
            logits = model.logits(prompt)
        assert np.abs(logits - expected).max() <= LARGEST_DIFFERENCE
    # Without it the model is itself again, though its weights were sent under another name.
    with five_peers.load(checkpoint.path, dtype="float32", plan=tensor) as model:
        logits = model.logits(prompt)
    assert np.abs(logits - checkpoint.logits(prompt)).max() <= LARGEST_DIFFERENCE


@shown_in_parts(
    "unit/weights/test_lora.py", "e2e/test_exactness_quantized.py", "e2e/test_quantizing.py"
)
def test_it_is_rounded_with_the_model(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["bfloat16"]
    checkpoint, adapter = case.model, case.adapter
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    expected = logits_of(case.weights, checkpoint.path, prompt)
    with edge.Cluster.local(1, threads=1) as cluster:
        with cluster.load(checkpoint.path, dtype="int8", accuracy="high", lora=adapter) as model:
            rounded = model.logits(prompt)
        local = ("--local", "1", "--threads", "1", "--windows", "4", "--window-tokens", "16")
        out = tmp_path / "out"
        made = run_edge("quantize", checkpoint.path, "--lora", adapter, "--out", out, *local)
        assert made.code == 0, made.err
        with cluster.load(out, accuracy="high") as model:
            quantised = model.logits(prompt)
    away = np.abs(checkpoint.logits(prompt) - expected).mean()
    assert np.abs(rounded - expected).mean() < 0.1 * away
    assert np.abs(quantised - expected).mean() < 0.7 * away


def test_the_command_line(cases: dict[str, Case], tmp_path: Path) -> None:
    local = ("--local", "1", "--threads", "1")
    told = [
        run_edge("run", MODEL, "-p", "Ada", "-n", "8", *local, *lora)
        for lora in ((), ("--lora", cases["bundled"].adapter))
    ]
    assert [each.code for each in told] == [0, 0], told
    assert told[0].out != told[1].out
    wrong = run_edge("run", MODEL, "-p", "Ada", "--lora", tmp_path, *local)
    assert wrong.code == 1
    assert wrong.err.count("\n") == 1
    assert "is no LoRA adapter" in wrong.err
