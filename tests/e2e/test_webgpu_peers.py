"""Peers on a graphics adapter, here one in software, alone and with peers of the other kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import edge
from edge.backends.overlap import MIN_TOKENS
from tests.support.checkpoints import TinyCheckpoint
from tests.support.family_sizes import MORE_FAMILIES
from tests.support.plans import make_plan
from tests.support.processes import Daemon, cluster_of_daemons, start_together
from tests.support.reference_model import ReferenceModel
from tests.support.slow_cases import shown_in_parts
from tests.support.swiftshader import needs_swiftshader, webgpu_environment

pytestmark = needs_swiftshader

Checkpoints = Callable[..., TinyCheckpoint]

WEBGPU, CPU, TRITON = "local-1", "local-2", "local-3"
BACKENDS = {WEBGPU: "webgpu", CPU: "ort", TRITON: "triton"}
PROMPT_TOKENS = 24
"""More than every window."""
NEW_TOKENS = 24
LARGEST_DIFFERENCE = 1e-3
LARGEST_ERROR_OF_CODES = 1e-3

FAMILIES = (
    *("gemma2", "qwen3_5", "mixtral", "llama", "gpt2", "lfm2", "gemma4_small", "gpt_oss"),
    *("mistral", "qwen2", "qwen3", "phi3", "gemma3", "qwen3_moe", "glm4", "gemma4_moe"),
    *MORE_FAMILIES,
)


@contextlib.contextmanager
def cluster_of(folder: Path, *names: str) -> Iterator[edge.Cluster]:
    """Peers of these kinds, which get their names in the order that BACKENDS has."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            for name, value in webgpu_environment().items():
                patch.setenv(name, value)
            options = [("--backend", BACKENDS[name]) for name in names]
            opened = stack.enter_context(cluster_of_daemons(folder, *options))
        yield opened


@pytest.fixture(scope="module")
def cluster(
    nothing_left_running_by_the_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[edge.Cluster]:
    """A peer on the adapter and one on the CPU."""
    with cluster_of(tmp_path_factory.mktemp("daemons"), WEBGPU, CPU) as cluster:
        yield cluster


@shown_in_parts("contract/test_stage_program.py", "contract/test_webgpu_operators.py")
@pytest.mark.parametrize("family", dict.fromkeys(FAMILIES))
def test_families_alone_equal_transformers(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints, family: str
) -> None:
    """Of a prompt, and of two requests at once."""
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    plan = make_plan(checkpoint.spec, "solo", model=checkpoint.path.name, devices=[WEBGPU])
    with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
        logits = model.logits(prompt)
        replies = model.generate([prompt, prompt[3:]], max_new_tokens=12)
    assert np.abs(logits - checkpoint.logits(prompt)).max() <= LARGEST_DIFFERENCE
    for reply, given in zip(replies, (prompt, prompt[3:]), strict=True):
        checkpoint.check_greedy(given, reply.token_ids, 12)


@shown_in_parts("e2e/test_triton_peers.py", "contract/test_webgpu_operators.py")
@pytest.mark.parametrize("layout", ["pipeline_3", "tensor_3"])
def test_three_kinds_of_peers_compute_the_tokens_of_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, layout: str
) -> None:
    checkpoint = tiny_checkpoint("llama", layers=3)
    prompt = checkpoint.prompt(12)
    devices = [CPU, TRITON, WEBGPU] if layout == "tensor_3" else [CPU, WEBGPU, TRITON]
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name, devices=devices)
    with (
        cluster_of(tmp_path, *BACKENDS) as cluster,
        cluster.load(checkpoint.path, dtype="float32", plan=plan) as model,
    ):
        reply = model.generate(prompt, max_new_tokens=8, ignore_eos=True)
    assert list(reply.token_ids) == checkpoint.greedy(prompt, 8)


@shown_in_parts("contract/test_step_in_halves.py", "contract/test_webgpu_operators.py")
def test_a_long_prompt_is_computed_in_halves_beside_a_cpu(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    """Sums of the first half overlap products of the second."""
    checkpoint = tiny_checkpoint("llama", layers=1)
    prompt = checkpoint.prompt(MIN_TOKENS + 4)
    plan = make_plan(checkpoint.spec, "tensor_2", model=checkpoint.path.name, devices=[WEBGPU, CPU])
    with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
        logits = model.logits(prompt)
    assert np.abs(logits - checkpoint.logits(prompt)).max() <= LARGEST_DIFFERENCE


def test_codes_are_those_of_other_peers(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    checkpoint = tiny_checkpoint("llama", layers=1)
    prompt = checkpoint.prompt(4)
    plan = make_plan(
        checkpoint.spec, "tensor_2", model=checkpoint.path.name, devices=[WEBGPU, CPU],
        column_multiple=32,
    )  # fmt: skip
    with cluster.load(checkpoint.path, dtype="int4", accuracy="high", plan=plan) as model:
        found = model.logits(prompt)
    expected = ReferenceModel(checkpoint, dtype="int4", packed=True).logits(prompt)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= LARGEST_ERROR_OF_CODES


def test_rounded_keys_and_values_are_left_to_other_peers(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    checkpoint = tiny_checkpoint("llama")
    with cluster.load(checkpoint.path, dtype="float32", kv_dtype="int8") as model:
        assert all(peer.name != WEBGPU for peer in _used(model, cluster))
        notes = " ".join(model.proposal.notes)
    assert f"{WEBGPU} is not used: its back end webgpu has no kernel for rounded keys" in notes


def _used(model: edge.Model, cluster: edge.Cluster) -> list[edge.PeerInfo]:
    return [peer for peer in cluster.peers if peer.id in model.proposal.plan.devices]


@shown_in_parts("unit/backends/test_webgpu_backend.py", "multiprocess/test_lost_peers.py")
def test_an_answer_goes_on_when_the_adapter_is_lost(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same tokens, on the CPU; and the adapter, opened anew, computes the next model."""
    checkpoint = tiny_checkpoint("llama")
    prompt, lost = checkpoint.prompt(PROMPT_TOKENS), tmp_path / "lost"
    for name, value in {**webgpu_environment(), "LOST_FROM": str(lost)}.items():
        monkeypatch.setenv(name, value)
    program = "tests.support.lost_adapter"
    options = "--no-announce", "--name"
    gpu = partial(
        Daemon, tmp_path / "gpu", *options, WEBGPU, "--backend", "webgpu", program=program
    )
    other = partial(Daemon, tmp_path / "cpu", *options, CPU)
    plan = make_plan(checkpoint.spec, "solo", model=checkpoint.path.name, devices=[WEBGPU])
    with (
        start_together(gpu, other) as daemons,
        edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster,
    ):
        with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
            stream = model.stream(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            tokens = []
            for number, piece in enumerate(stream):
                tokens.append(piece.token_id)
                if number == 3:
                    lost.touch()
            assert not lost.exists(), "the adapter was never lost"
            (recovery,) = model.recoveries
        assert tokens == checkpoint.greedy(prompt, NEW_TOKENS)
        assert "VK_ERROR_DEVICE_LOST" in recovery.reason
        with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
            reply = model.generate(prompt, max_new_tokens=3, ignore_eos=True)
        assert list(reply.token_ids) == checkpoint.greedy(prompt, 3)


@shown_in_parts("contract/test_stage_program.py")
def test_replies_at_once_are_those_alone(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    """Requests come, share steps and go."""
    checkpoint = tiny_checkpoint("lfm2")
    prompts = [checkpoint.prompt(length) for length in (5, 9, 14)]
    plan = make_plan(checkpoint.spec, "solo", model=checkpoint.path.name, devices=[WEBGPU])
    with cluster.load(checkpoint.path, dtype="float32", plan=plan, concurrency=3) as model:

        def answer(prompt: list[int]) -> list[int]:
            return list(model.generate(prompt, max_new_tokens=10, ignore_eos=True).token_ids)

        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(answer, prompts))
    assert found == [checkpoint.greedy(prompt, 10) for prompt in prompts]
