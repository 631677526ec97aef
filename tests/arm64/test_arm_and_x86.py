"""An emulated ARM64 peer and an x86 peer compute one plan: make test-arm64

scripts/arm64-peer starts the ARM64 peer; its first start fetches packages and wheels.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

import edge
from edge.membership.current import CurrentMembership
from edge.partition import Plan
from edge.weights.formats import weight_format
from tests.arm64.products import products
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.processes import PATIENCE_S, ROOT, Daemon

pytestmark = pytest.mark.arm64

CPUS = ("max", "cortex-a72")
"""The first has every instruction that QEMU knows, the second no products of bytes."""

LAYOUTS = {"pipeline_2": ("x86", "arm"), "tensor_2": ("arm", "x86")}
"""Which device comes first. The ARM64 one computes logits in both."""

LARGEST_DIFFERENCE = 1e-4
"""Of logits in float32."""

LARGEST_ROUNDING = {"float32": 1e-5, "high": 1e-3, "fast": 0.05}
"""Of a product on one processor and on the other, as a part of its largest value."""

LARGEST_DRIFT = {"int8": 0.1, "int4": 0.1}
"""Of logits, as a part of the largest."""

NEW_TOKENS = 20
PROMPT_TOKENS = 24

Checkpoints = Callable[..., TinyCheckpoint]
Array = NDArray[np.float32]


def in_arm64(cpu: str, *arguments: str) -> list[str]:
    """The command line of scripts/arm64-peer."""
    return [str(ROOT / "scripts/arm64-peer"), "--cpu", cpu, *arguments]


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("EDGE_")}
"""The system is kept where a user's is, not with this session's caches."""


@dataclass(frozen=True)
class ArmPeer:
    """A daemon of this session's cluster, on another processor."""

    address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """As a power cut would end it."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def arm_peer(cpu: str) -> Iterator[ArmPeer]:
    options = ("--json", "--handed-keys", "--no-announce", "--listen", "127.0.0.1:0")
    with subprocess.Popen(
        in_arm64(cpu, *options, "--threads", "1", "--name", "arm"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(CurrentMembership("tests").current().handed() + b"\n")
        process.stdin.flush()
        ready = json.loads(process.stdout.readline() or b"{}")
        try:
            assert ready, f"the peer ended with {process.wait()}"
            yield ArmPeer(ready["addresses"][0], process)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()


@pytest.fixture(scope="module", params=CPUS)
def cpu(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def x86_peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    folder = tmp_path_factory.mktemp("peers")
    with (
        Daemon(folder / "x86", "--no-announce", "--name", "x86") as one,
        Daemon(folder / "other", "--no-announce", "--name", "other") as other,
    ):
        yield one, other


@pytest.fixture(scope="module")
def cluster(cpu: str, x86_peers: tuple[Daemon, Daemon]) -> Iterator[edge.Cluster]:
    """The ARM64 peer, and two on this processor."""
    with arm_peer(cpu) as arm:
        addresses = [arm.address, *(each.address for each in x86_peers)]
        with edge.Cluster.connect(addresses) as connected:
            yield connected


def cut(
    checkpoint: TinyCheckpoint, layout: str, devices: tuple[str, ...], dtype: str = "float32"
) -> Plan:
    form = weight_format(checkpoint.spec, dtype, 32)
    return make_plan(
        form.graded(checkpoint.spec),
        layout,
        model=checkpoint.path.name,
        devices=devices,
        column_multiple=form.recipe.column_multiple({"down.weight"}),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_gives_the_logits_and_tokens_of_transformers(
    layout: str, cluster: edge.Cluster, tiny_checkpoint: Checkpoints
) -> None:
    checkpoint = tiny_checkpoint("llama")
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    plan = cut(checkpoint, layout, LAYOUTS[layout])
    with cluster.load(checkpoint.path, dtype="float32", plan=plan) as model:
        logits = model.logits(prompt)
        reply = model.generate(prompt, max_new_tokens=NEW_TOKENS)
    assert np.abs(logits - checkpoint.logits(prompt)).max() <= LARGEST_DIFFERENCE
    checkpoint.check_greedy(prompt, reply.token_ids, NEW_TOKENS)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounded_weights_give_nearly_what_one_kind_of_processor_gives(
    layout: str,
    dtype: edge.Dtype,
    cpu: str,
    cluster: edge.Cluster,
    tiny_checkpoint: Checkpoints,
    record_property: Callable[[str, object], None],
) -> None:
    """The distance, and how many tokens agree, are printed with -s."""
    checkpoint = tiny_checkpoint("llama")
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    logits: dict[str, Array] = {}
    tokens: dict[str, list[int]] = {}
    for second in ("arm", "other"):
        devices = tuple(second if name == "arm" else name for name in LAYOUTS[layout])
        plan = cut(checkpoint, layout, devices, dtype)
        with cluster.load(checkpoint.path, dtype=dtype, plan=plan) as model:
            logits[second] = model.logits(prompt)
            reply = model.generate(prompt, max_new_tokens=NEW_TOKENS)
            tokens[second] = list(reply.token_ids)
    found = distance(logits["arm"], logits["other"])
    assert found <= LARGEST_DRIFT[dtype]
    assert [len(each) for each in tokens.values()] == [NEW_TOKENS, NEW_TOKENS]
    agree = next(
        (i for i in range(NEW_TOKENS) if tokens["arm"][i] != tokens["other"][i]), NEW_TOKENS
    )
    record_property("logits", found)
    record_property("first tokens that agree", agree)
    print(f"\n{cpu}, {layout}, {dtype}: logits differ by {found:.2g}, {agree} tokens agree")


def test_products_differ_by_their_rounding(cpu: str) -> None:
    """Of inputs, where they are rounded; the distances are printed with -s."""
    command = in_arm64(cpu, "--python", "-m", "tests.arm64.products")
    ran = subprocess.run(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S
    )
    theirs, ours = np.load(io.BytesIO(ran.stdout)), products()
    assert set(theirs) == set(ours)
    for name, mine in ours.items():
        found = distance(theirs[name], mine)
        print(f"\n{cpu}, {name} rows: {found:.2g}", end="")
        (allowed,) = (most for kind, most in LARGEST_ROUNDING.items() if kind in name)
        assert found <= allowed, name


def test_an_answer_goes_on_when_the_arm_peer_is_lost(
    x86_peers: tuple[Daemon, Daemon], tiny_checkpoint: Checkpoints
) -> None:
    checkpoint = tiny_checkpoint("llama")
    prompt = checkpoint.prompt(5)
    with arm_peer(CPUS[0]) as arm:
        addresses = [arm.address, *(each.address for each in x86_peers)]
        plan = cut(checkpoint, "tensor_2", LAYOUTS["tensor_2"])
        with (
            edge.Cluster.connect(addresses) as cluster,
            cluster.load(checkpoint.path, dtype="float32", plan=plan) as model,
        ):
            stream = model.stream(prompt, max_new_tokens=NEW_TOKENS)
            next(stream)
            arm.kill()
            for _token in stream:
                pass
            reply = stream.reply()
    checkpoint.check_greedy(prompt, reply.token_ids, NEW_TOKENS)
    (recovery,) = reply.recoveries
    assert recovery.reason.startswith("peer arm: ")


def distance(found: Array, expected: Array) -> float:
    """The largest difference, as a part of the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
