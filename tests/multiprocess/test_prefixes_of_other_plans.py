"""What was computed on one plan is found on another, by restarted daemons, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.processes import Daemon

FAMILIES = ["llama", "qwen3_5", "lfm2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_device_takes_its_part_of_what_it_has_stored(
    tiny_checkpoint: Callable[..., TinyCheckpoint], family: str, tmp_path: Path
) -> None:
    """It was the whole model on each of two, and is cut in heads and between layers after both have
    started again: there are only files then."""
    checkpoint = tiny_checkpoint(family)
    prompt = checkpoint.prompt(300)

    def ask(*layouts: str) -> list[int]:
        """Found tokens on each layout in turn."""
        with ExitStack() as stack:
            daemons = [
                stack.enter_context(
                    Daemon(
                        tmp_path / name,
                        *("--name", name, "--no-announce"),
                        *("--kv-disk", f"{tmp_path}/kv-{name}:1GiB"),
                    )
                )
                for name in "ab"
            ]
            addresses = [daemon.address for daemon in daemons]
            cluster = stack.enter_context(edge.Cluster.connect(addresses))
            found = []
            for number, layout in enumerate(layouts):
                devices = "ab"[number:] if layout == "solo" else "ab"
                plan = make_plan(
                    checkpoint.spec, layout, model=checkpoint.path.name, devices=devices
                )
                with cluster.load(
                    checkpoint.path, dtype="float32", plan=plan, context_tokens=400, concurrency=2
                ) as model:
                    reply = model.generate(prompt, max_new_tokens=12)
                checkpoint.check_greedy(prompt, reply.token_ids, 12)
                found.append(int(reply.statistics["found_tokens"]))
            return found

    stored = 256 if family == "llama" else 296
    assert ask("solo", "solo") == [0, 0]
    assert ask("tensor_2", "pipeline_2") == [stored, stored]
