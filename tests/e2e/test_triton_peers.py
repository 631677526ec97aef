"""Peers on Triton (interpreted) and on ONNX Runtime in one model, as real daemons over real TCP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import edge
from edge.partition import Plan
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan, streaming
from tests.support.processes import Daemon, cluster_of_daemons
from tests.support.processes import edge as run_edge
from tests.support.reference_model import ReferenceModel
from tests.support.slow_cases import repeats_are_slow, shown_in_parts
from tests.support.specs import shape

Checkpoints = Callable[..., TinyCheckpoint]

PROMPT_TOKENS = 9
NEW_TOKENS = 3
"""Together more than gemma2's window; a prompt is one step, each new token another."""
SHORT_PROMPT_TOKENS = 3
HEADS = (4, 2)
DEVICES = {"triton": "local-1", "ort": "local-2"}
LARGEST_DIFFERENCE = 1e-4
LARGEST_ERROR_OF_CODES = 1e-3


@pytest.fixture(autouse=True)
def rates() -> None:
    """Measured."""


@pytest.fixture(scope="module")
def cluster(
    nothing_left_running_by_the_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[edge.Cluster]:
    """A peer on Triton and one on ONNX Runtime."""
    folder = tmp_path_factory.mktemp("daemons")
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            options = [("--backend", backend) for backend in DEVICES]
            opened = stack.enter_context(cluster_of_daemons(folder, *options))
        yield opened


def plan_of(checkpoint: TinyCheckpoint, layout: str, first: str, *, multiple: int = 1) -> Plan:
    """The peer on the back end `first` is the first stage, or the first rank."""
    order = [DEVICES[first], *(name for kind, name in DEVICES.items() if kind != first)]
    return make_plan(
        checkpoint.spec, layout, model=checkpoint.path.name, column_multiple=multiple, devices=order
    )


def test_a_model_without_kernels_on_gpus_is_computed_by_the_others(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    """The plan leaves the GPU peer out and says so; one by hand that uses it is refused at once."""
    checkpoint = tiny_checkpoint("gemma4_moe")
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    with cluster.load(checkpoint.path, dtype="float32") as model:
        proposal = model.proposal
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS)
    (device,) = proposal.plan.devices
    assert proposal.cluster.device(device).name == DEVICES["ort"]
    assert proposal.notes[0].startswith(
        f"{DEVICES['triton']} is not used: its back end triton has no kernel for experts with "
        "norms of their own, "
    )
    assert list(reply.token_ids) == checkpoint.greedy(prompt, NEW_TOKENS)
    by_hand = plan_of(checkpoint, "pipeline_2", "ort")
    with pytest.raises(edge.RequestError, match=r"by hand gives layers to local-1: .*; start it"):
        cluster.load(checkpoint.path, dtype="float32", plan=by_hand)


@pytest.mark.parametrize(
    ("family", "layout", "first"),
    repeats_are_slow(
        [
            ("llama", "pipeline_2", "triton"),
            ("llama", "tensor_2", "triton"),
            ("gemma2", "tensor_2", "triton"),
            ("gpt_oss", "tensor_2", "ort"),
            ("glm4", "tensor_2", "ort"),
            ("qwen3_moe", "pipeline_2", "triton"),
            ("gpt2", "tensor_2", "triton"),
            ("lfm2", "tensor_2", "triton"),
            ("qwen3_5", "pipeline_2", "ort"),
            ("gemma4_small", "pipeline_2", "triton"),
        ],
        of=(1, 2),
    ),
)
def test_greedy_tokens_are_those_of_transformers(
    cluster: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    family: str,
    layout: str,
    first: str,
) -> None:
    layers = 4 if layout == "pipeline_2" else 2
    if family == "gemma4_small":
        layers = 8  # of which some have keys of one that the other device has
    heads = None if family == "gpt2" else HEADS  # which divide its width into odd parts
    checkpoint = tiny_checkpoint(family, layers=layers, heads=heads)
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    plan = plan_of(checkpoint, layout, first)
    with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    assert list(reply.token_ids) == checkpoint.greedy(prompt, NEW_TOKENS)
    logits = torch.from_numpy(checkpoint.logits([*prompt, *reply.token_ids]))
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1].double(), -1)
    best = expected.topk(2).values.numpy()
    found = [[each.logprob for each in top] for top in reply.top_logprobs]
    np.testing.assert_allclose(found, best, atol=LARGEST_DIFFERENCE)
    assert [each.logprob for each in reply.logprobs] == [each[0] for each in found], "greedy"


@pytest.mark.linux_ways
def test_layers_that_stream_on_both_kinds_of_peer_change_no_token(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    """Of the GPU's three layers, which are the last ones, two are held at once."""
    checkpoint = tiny_checkpoint("llama", layers=4, heads=HEADS)
    prompt = checkpoint.prompt(SHORT_PROMPT_TOKENS)
    plan = streaming(plan_of(checkpoint, "pipeline_2", "ort"), 3)
    with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert model.proposal.rows[1].streamed_layers == 3
    assert list(reply.token_ids) == checkpoint.greedy(prompt, NEW_TOKENS)


def test_both_kinds_of_peer_compute_with_the_same_codes(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    checkpoint = tiny_checkpoint("llama", layers=2, heads=HEADS)
    prompt = checkpoint.prompt(SHORT_PROMPT_TOKENS)
    plan = plan_of(checkpoint, "tensor_2", "ort", multiple=32)
    with cluster.load(checkpoint.path, dtype="int4", accuracy="high", plan=plan) as model:
        found = model.logits(prompt)
    expected = ReferenceModel(checkpoint, dtype="int4", packed=True).logits(prompt)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= LARGEST_ERROR_OF_CODES


@shown_in_parts("contract/test_stage_program.py", "e2e/test_kv_dtypes.py")
def test_replies_at_once_with_rounded_caches(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    """Each peer rounds keys and values in its own way; requests come, share steps and go."""
    checkpoint = tiny_checkpoint("llama", layers=4, heads=HEADS)
    plan = plan_of(checkpoint, "pipeline_2", "triton")
    prompts = [checkpoint.prompt(length) for length in (1, 2, 3)]
    with cluster.load(
        checkpoint.path, dtype="float32", plan=plan, kv_dtype="int8", concurrency=2,
        context_tokens=16,
    ) as model:  # fmt: skip

        def answer(prompt: list[int]) -> tuple[int, ...]:
            return model.generate(prompt, max_new_tokens=3, ignore_eos=True).token_ids

        alone = [answer(prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(answer, prompts)) == alone


def test_every_peer_says_what_it_computes_with(cluster: edge.Cluster) -> None:
    peers = cluster.peers
    assert [(peer.backend, peer.processor) for peer in peers] == [
        ("triton", "CPU, Triton interpreted"),
        ("ort", "CPU"),
    ]
    addresses = [part for peer in peers for part in ("--peer", peer.address)]
    shown = json.loads(run_edge("peers", "--json", *addresses).out)
    assert [(each["backend"], each["processor"]) for each in shown] == [
        (peer.backend, peer.processor) for peer in peers
    ]
    assert "triton" in run_edge("peers", *addresses).out


def test_a_host_holds_what_its_device_has_no_room_for(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checkpoint = tiny_checkpoint("llama", layers=4, heads=(2, 1))
    prompt = checkpoint.prompt(SHORT_PROMPT_TOKENS)
    options = ("--backend", "triton", "--name", "gpu", "--no-announce", "--host-memory", "1MiB")
    with (
        Daemon(tmp_path / "peer", *options, "--kv-disk", f"{tmp_path}/kv:1MiB") as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
    ):
        plan = make_plan(checkpoint.spec, "solo", model=checkpoint.path.name, devices=["gpu"])
        with cluster.load(
            checkpoint.path, dtype="float32", plan=streaming(plan, 4), context_tokens=32
        ) as model:
            reply = model.generate(prompt, max_new_tokens=3, ignore_eos=True)
            (row,) = model.proposal.rows
            assert (row.streamed_layers, row.host_layers) == (4, 4)
            (held,) = daemon.describe().models
            assert held.host_bytes == row.memory.streamed_bytes
            assert held.streamed_bytes == 0, "nothing comes from disk"
            shown = run_edge("peers", "--json", "--peer", daemon.address).out
            assert json.loads(shown)[0]["host_memory_bytes"] < 1 << 20
        assert daemon.await_free().host_memory_bytes == 1 << 20
    assert list(reply.token_ids) == checkpoint.greedy(prompt, 3)


@shown_in_parts("contract/test_stage_program.py", "multiprocess/test_kv_disk.py")
def test_a_request_longer_than_the_memory_of_both_kinds_of_peer(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one that fits, and that takes turns with it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checkpoint = tiny_checkpoint("llama", layers=2, heads=HEADS)
    prompts = [checkpoint.prompt(18), checkpoint.prompt(2)]
    spec = checkpoint.spec
    token_bytes = 2 * 4 * spec.num_layers * shape(spec).num_kv_heads * shape(spec).head_size
    with (
        edge.Cluster.local(
            peers=2, threads=1, backend=list(DEVICES), kv_memory=20 * token_bytes,
            kv_disk=f"{tmp_path}:1MiB",
        ) as cluster,
        cluster.load(
            checkpoint.path, dtype="float32", context_tokens=22,
            plan=plan_of(checkpoint, "tensor_2", "triton"),
        ) as model,
    ):  # fmt: skip

        def answer(prompt: list[int]) -> list[int]:
            return list(model.generate(prompt, max_new_tokens=3, ignore_eos=True).token_ids)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(answer, prompts))
        assert all(times.kv_written_bytes for times in model.measure())
    assert found == [checkpoint.greedy(prompt, 3) for prompt in prompts]


def test_a_plan_is_chosen_for_unequal_back_ends(
    cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    """Both measure themselves, and the one that is interpreted does not take minutes for it."""
    checkpoint = tiny_checkpoint("llama", layers=1, heads=HEADS)
    with cluster.load(checkpoint.path, dtype="float32", plan="tensor") as model:
        reply = model.generate(checkpoint.prompt(3), max_new_tokens=2, ignore_eos=True)
    assert list(reply.token_ids) == checkpoint.greedy(checkpoint.prompt(3), 2)
