"""Three pinned peers on two cores: a model runs on them, and nothing of them stays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import edge
from edge.demos.bench.clusters.bed import open_bed, remove_leftovers, why_not
from edge.demos.bench.clusters.networks import PREFIX
from edge.demos.bench.clusters.table import MBIT, Device
from edge.demos.bench.clusters.wire import NAMESPACES
from edge.demos.bundled import MODEL
from edge.demos.control_groups import ROOT
from tests.support.plans import bundled_plan

QUESTION = "Where does the cat live?"


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no pinned peers here: {reason}")


def left(owner: int) -> list[str]:
    """Namespaces, groups and interfaces of beds of this process."""
    places = (NAMESPACES, ROOT, ROOT / "memory", Path("/sys/class/net"))
    names = (f"{PREFIX}-{owner}-", f"eb{owner}c")
    return [
        str(each)
        for place in places
        if place.is_dir()
        for each in place.iterdir()
        if each.name.startswith(names)
    ]


@pytest.mark.parametrize("delay_s", [0.0, 0.001], ids=["bridge", "wire"])
def test_a_model_runs_over_three_devices_of_which_nothing_stays(
    tmp_path: Path, delay_s: float
) -> None:
    rate = 100 * MBIT if delay_s else None
    devices = [
        Device(name=name, core=core, quota=quota, bytes_per_s=rate, delay_s=delay_s)
        for name, core, quota in (("a", 0, 1), ("b", 0, 0.5), ("c", 0, 1))
    ]
    plan = bundled_plan("tensor_3", devices=("a", "b", "c"))
    with open_bed(devices, tmp_path) as (addresses, _groups):
        assert len(left(os.getpid())) >= 3 * len(devices)
        with (
            edge.Cluster.connect(addresses) as cluster,
            cluster.load(MODEL, dtype="float32", plan=plan, progress=False) as model,
        ):
            assert [peer.name for peer in cluster.peers] == ["a", "b", "c"]
            prompt = model.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
            reply = model.generate(prompt, max_new_tokens=8)
            assert reply.text.startswith("In the barn.")
            if delay_s:  # each way is twice as long, and two sums of a layer wait for each other
                sums = 2 * len(model.plan.stages[0].layers)
                token_s = reply.statistics["decode_s"] / (len(reply.token_ids) - 1)
                assert token_s > sums * 2 * delay_s
    assert left(os.getpid()) == []


def test_a_bed_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with (
        pytest.raises(OSError, match="the daemon of a did not start"),
        open_bed([Device(name="a", core=0)], tmp_path / "file"),
    ):
        pass
    assert left(os.getpid()) == []


def test_what_a_dead_bench_left_is_removed() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    name = f"{PREFIX}-{process.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    remove_leftovers()
    assert left(process.pid) == []
