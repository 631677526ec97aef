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
from tests.support.slow_cases import shown_in_parts

ON_OTHER_PLANS = shown_in_parts(
    "multiprocess/test_prefixes_of_other_plans.py", "multiprocess/test_stored_prefixes.py"
)
"""Prompts of a family without states are found by the same plan there, of one with states here."""


class Asked:
    """Two devices with disks, and a prompt that they are asked on one plan after the other."""

    def __init__(self, checkpoint: TinyCheckpoint, folder: Path) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        self._prompt = checkpoint.prompt(300)

    def on(self, *plans: tuple[str, str], loses: str = "") -> list[int]:
        """Found tokens on each plan: its layout, and its devices. Both devices have just started,
        so there are only files at first. loses: a device that is lost in the last answer."""
        found = []
        with ExitStack() as stack:
            daemons = {name: stack.enter_context(self._daemon(name)) for name in "ab"}
            addresses = [daemon.address for daemon in daemons.values()]
            cluster = stack.enter_context(edge.Cluster.connect(addresses))
            for number, (layout, devices) in enumerate(plans, start=1):
                with (
                    self._load(cluster, layout, devices) as model,
                    model.stream(self._prompt, max_new_tokens=12) as stream,
                ):
                    for _token in range(3):
                        next(stream)
                    if loses and number == len(plans):
                        daemons[loses].kill()
                    for _rest in stream:
                        pass
                    reply = stream.reply()
                self._checkpoint.check_greedy(self._prompt, reply.token_ids, 12)
                found.append(int(reply.statistics["found_tokens"]))
        return found

    def _daemon(self, name: str) -> Daemon:
        disk = f"{self._folder}/kv-{name}:1GiB"
        options = "--name", name, "--no-announce", "--kv-disk", disk
        return Daemon(self._folder / name, *options)

    def _load(self, cluster: edge.Cluster, layout: str, devices: str) -> edge.Model:
        path, spec = self._checkpoint.path, self._checkpoint.spec
        plan = make_plan(spec, layout, model=path.name, devices=devices)
        return cluster.load(path, dtype="float32", plan=plan, context_tokens=400, concurrency=2)


@pytest.mark.parametrize(
    ("family", "has_states"),
    [
        ("qwen3_5", True),
        *(
            pytest.param(*case, marks=ON_OTHER_PLANS)
            for case in (("llama", False), ("lfm2", True), ("gemma3", True))
        ),
    ],
)
def test_devices_take_what_they_have_stored_and_get_the_rest_from_others(
    tiny_checkpoint: Callable[..., TinyCheckpoint], family: str, has_states: bool, tmp_path: Path
) -> None:
    """One was the whole model. Then it has half of the layers and another device, which is new, the
    rest. And where each had half of the layers only, it has some heads of all layers then."""
    asked = Asked(tiny_checkpoint(family), tmp_path)
    stored = 296 if has_states else 256
    assert asked.on(("solo", "a")) == [0]
    (joined,) = asked.on(("pipeline_2", "ab"))
    assert joined >= stored
    asked = Asked(tiny_checkpoint(family), tmp_path / "again")
    first, *found = asked.on(("pipeline_2", "ab"), ("tensor_2", "ba"), ("pipeline_2", "ba"))
    assert first == 0
    assert min(found) >= 288, f"{found}: in memory, in blocks of 16 tokens"


def test_after_a_loss_a_prompt_is_found_on_the_device_that_is_left(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    """It was the whole model before. What is found is counted for the plan that ends the answer."""
    asked = Asked(tiny_checkpoint("qwen3_5"), tmp_path)
    assert asked.on(("solo", "a"), ("pipeline_2", "ab"), loses="b") == [0, 296]
