"""Beginnings of prompts that were computed before are found on disk, and skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import edge
from edge.partition import Parallel
from edge.weights.formats import KvDtype
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import Daemon

CHUNK = 256
"""Tokens of a block, as of a step."""


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


def chunks(model: edge.Model) -> list[int]:
    """Steps of prompts that each peer computed since this was last asked."""
    return [times.prompt.steps for times in model.measure()]


def test_a_prompt_is_found_after_a_restart(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    prompt = checkpoint.prompt(300)
    other = [*prompt[:280], *checkpoint.prompt(20)]
    expected = checkpoint.greedy(prompt, 12)
    for has_run, is_damaged in ((False, False), (True, False), (True, True), (True, False)):
        if is_damaged:
            (file,) = (tmp_path / "kv" / "prefixes").iterdir()
            file.write_bytes(b"?" + file.read_bytes()[1:])
        with (
            Daemon(tmp_path / "cache", "--kv-disk", f"{tmp_path}/kv:1GiB") as daemon,
            edge.Cluster.connect([daemon.address]) as cluster,
            cluster.load(checkpoint.path, dtype="float32", context_tokens=400) as model,
        ):
            assert list(model.generate(prompt, max_new_tokens=12).token_ids) == expected
            skips = has_run and not is_damaged
            assert chunks(model) == [1 if skips else 2]
            assert list(model.generate(prompt, max_new_tokens=12).token_ids) == expected
            assert chunks(model) == [1]
            reply = model.generate(other, max_new_tokens=12)
            assert list(reply.token_ids) == checkpoint.greedy(other, 12)
            assert chunks(model) == [1]
            daemon.kill()


@pytest.mark.parametrize(("plan", "kv_dtype"), [("pipeline", "float32"), ("tensor", "int8")])
def test_every_shard_finds_it(
    checkpoint: TinyCheckpoint, tmp_path: Path, plan: Parallel, kv_dtype: KvDtype
) -> None:
    """Also where sampling looks back at what was skipped; not where every row is wanted."""
    prompt = checkpoint.prompt(300)
    with (
        edge.Cluster.local(peers=2, threads=1, kv_disk=f"{tmp_path}:1GiB") as cluster,
        cluster.load(
            checkpoint.path, dtype="float32", plan=plan, context_tokens=400, kv_dtype=kv_dtype
        ) as model,
    ):

        def ask() -> tuple[int, ...]:
            return model.generate(
                prompt, max_new_tokens=40, temperature=0.9, repetition_penalty=1.5, seed=5
            ).token_ids

        first = ask()
        assert chunks(model) == [2, 2]
        assert ask() == first
        assert chunks(model) == [1, 1]
        rows = model.logits(prompt)
        assert chunks(model) == [2, 2]
        if kv_dtype == "float32":
            assert np.allclose(rows, checkpoint.logits(prompt), rtol=1e-3, atol=1e-3)
        # One shard has lost its block: all compute it again.
        for file in (tmp_path / "local-2" / "prefixes").iterdir():
            file.unlink()
        assert ask() == first
        assert chunks(model) == [2, 2]
        assert ask() == first
        assert chunks(model) == [1, 1]
