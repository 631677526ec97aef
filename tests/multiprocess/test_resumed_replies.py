"""Replies whose coordinator was killed or interrupted, or lost its peers, go on as they were."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.answers.journal_records import JournalContent
from edge.api.kept_reply import kept_replies
from edge.demos.bundled import MODEL
from edge.host.state_paths import STATE_VARIABLE
from edge.protocol.step import Speculation
from edge.weights.formats import Dtype
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import bundled_plan, make_plan
from tests.support.processes import (
    PATIENCE_S,
    Daemon,
    edge_process,
    poll_until,
    start_together,
    stopped,
)
from tests.support.processes import edge as run_edge
from tests.support.slow_cases import repeats_are_slow

SAMPLED = edge.GenerationOptions(
    max_new_tokens=50,
    ignore_eos=True,
    temperature=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    logprobs=2,
    seed=7,
    journal=True,
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    folder = tmp_path_factory.mktemp("daemons")
    names = ("attic", "cellar")
    starts = [partial(Daemon, folder / name, "--no-announce", "--name", name) for name in names]
    with start_together(*starts) as daemons:
        yield daemons
        for daemon in daemons:
            assert daemon.messages == ""
            daemon.await_free()


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """Who writes to it waits for ever, so no answer that is shown there is at its end too soon."""
    reads, writes = os.pipe()
    try:
        os.write(writes, bytes(fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)))
        yield writes
    finally:
        os.close(reads)
        os.close(writes)


def await_tokens(process: subprocess.Popen[str]) -> None:
    """Until it has written some into its journal."""

    def are_there() -> bool:
        assert process.poll() is None, process.communicate()
        kept = [each for _entry, each in kept_replies().read()]
        return any(isinstance(each, JournalContent) and len(each.tokens) >= 5 for each in kept)

    poll_until(are_there)


def addresses(daemons: list[Daemon]) -> list[str]:
    return [daemon.address for daemon in daemons]


def by_address(daemons: list[Daemon]) -> list[str]:
    """Options of a command."""
    return [part for address in addresses(daemons) for part in ("--peer", address)]


@pytest.fixture(scope="module")
def command(
    two: list[Daemon], endless_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    """An answer of both, by hand: so nothing is measured first."""
    names = [daemon.name for daemon in two]
    model = endless_checkpoint.path.name
    plan = make_plan(endless_checkpoint.spec, "tensor_2", model=model, devices=names)
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps(plan.to_json()))
    return (
        "run", str(endless_checkpoint.path), "-p", "hi", "-n", "400", "--dtype", "float32",
        "--temperature", "0.8", "--seed", "5", "--plan", str(file), *by_address(two),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(command: tuple[str, ...]) -> str:
    """What it writes undisturbed."""
    outcome = run_edge(*command, "--no-journal")
    assert outcome.code == 0, outcome.err
    return outcome.out


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At the end: a finished reply is not."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    yield
    assert kept_replies().entries() == []


@pytest.mark.parametrize(
    ("layout", "dtype", "speculate"),
    repeats_are_slow(
        [
            ("pipeline_2", "float32", "auto"),
            ("tensor_2", "auto", "lookup"),
            ("tensor_2", "auto", "auto"),
            ("pipeline_2", "auto", "auto"),
        ]
    ),
)
def test_the_tokens_of_an_undisturbed_reply(
    layout: str, dtype: Dtype, speculate: Speculation, two: list[Daemon]
) -> None:
    """Drawn, with penalties, and with likelihoods to the last bit: by the plan that it had."""
    plan = bundled_plan(layout, devices=[daemon.name for daemon in two])
    sampled = replace(SAMPLED, speculate=speculate)
    with edge.Cluster.connect(addresses(two)) as cluster:
        with cluster.load(MODEL, dtype=dtype, plan=plan, context_tokens=128) as model:
            undisturbed = model.generate("The cat", sampled)
            assert speculate == "auto" or undisturbed.statistics["drafted_tokens"]
            with model.stream("The cat", sampled) as stream:
                shown = [next(stream) for _number in range(20)]
                id = stream.kept_as
        assert id is not None
        with edge.KeptReply.open(id) as kept:
            assert kept.new_tokens >= 20
            with cluster.load(kept.model, kept.options, resumes=kept) as model:
                names = [model.peers[device].name for device in model.plan.devices]
                assert names == list(plan.devices)
                with model.stream_resume(kept) as resumed:
                    tokens = list(resumed)
                    reply = resumed.reply()
    assert "".join(token.text for token in tokens) == undisturbed.text
    assert [each.text for each in tokens[:20]] == [each.text for each in shown]
    assert reply.token_ids == undisturbed.token_ids
    assert (reply.logprobs, reply.top_logprobs) == (undisturbed.logprobs, undisturbed.top_logprobs)
    assert reply.statistics["resumed_tokens"] == kept.new_tokens


FORCED: dict[str, Any] = {
    "type": "object",
    "properties": {"name_of_the_cat": {"enum": ["Tom"]}, "cats": {"type": "integer"}},
    "required": ["name_of_the_cat", "cats"],
    "additionalProperties": False,
}


def test_stop_strings_and_schemas_go_on(two: list[Daemon]) -> None:
    """Whatever is half done: a stop string that has begun, a JSON text that is open."""
    options = edge.GenerationOptions(journal=True, max_new_tokens=40)
    with (
        edge.Cluster.connect(addresses(two[:1])) as cluster,
        cluster.load(MODEL, dtype="int8", context_tokens=256) as model,
    ):
        plain = model.generate("Where does the cat live?", options, ignore_eos=True)
        stop = plain.text[-12:-6]
        cases = (
            replace(options, stop=stop, ignore_eos=True),
            replace(options, json_schema="object", seed=3),
            replace(options, json_schema=FORCED, speculate="auto", logprobs=0),
        )
        for case in cases:
            whole = model.generate("Where does the cat live?", case)
            for count in (1, 12, len(whole.token_ids) - 1):
                with model.stream("Where does the cat live?", case) as stream:
                    for _number in range(count):
                        next(stream)
                again = model.resume()
                assert (again.text, again.token_ids) == (whole.text, whole.token_ids)
                assert again.finish_reason == whole.finish_reason
                assert again.logprobs == whole.logprobs
        assert whole.statistics["accepted_tokens"]


def test_what_cannot_go_on_is_told(two: list[Daemon], endless_checkpoint: TinyCheckpoint) -> None:
    with edge.Cluster.connect(addresses(two[:1])) as cluster:
        with cluster.load(MODEL, dtype="int8", context_tokens=128) as model:
            stream = model.stream("The cat", SAMPLED)
            next(stream)
            with pytest.raises(edge.RequestError, match="has this reply under way"):
                model.resume(stream.kept_as or "")
            stream.close()
        with (
            cluster.load(MODEL, dtype="float32", context_tokens=128) as model,
            pytest.raises(edge.RequestError, match="has dtype float32 instead of int8"),
        ):
            model.resume()
        with (
            cluster.load(endless_checkpoint.path, dtype="int8", context_tokens=128) as model,
            pytest.raises(edge.RequestError, match="this is another model, or its files have ch"),
        ):
            model.resume()
        kept = edge.KeptReply.open()
        kept.close()
        with (
            cluster.load(MODEL, dtype="int8", context_tokens=128) as model,
            pytest.raises(edge.RequestError, match="was closed; open it again"),
        ):
            model.resume(kept)
    outcome = run_edge("run", "--resume", "last", "--dtype", "int8")
    assert outcome.code == 2
    assert "leave out --dtype" in outcome.err
    assert kept.id in run_edge("replies", "show").out
    assert run_edge("replies", "clean", kept.id).out == "1 removed.\n"
    assert "no reply" in run_edge("run", "--resume", kept.id).sentence()


def test_a_killed_command_goes_on(two: list[Daemon], command: tuple[str, ...], whole: str) -> None:
    with full_pipe() as nobody_reads, edge_process(*command, stdout=nobody_reads) as process:
        await_tokens(process)
        process.send_signal(signal.SIGKILL)
    resumed = run_edge("run", "--resume", "last", *by_address(two))
    assert (resumed.code, resumed.out) == (0, whole), resumed.err
    assert "of them resumed" in resumed.err


def test_a_coordinator_that_is_taken_over_ends(
    two: list[Daemon],
    command: tuple[str, ...],
    whole: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its journal goes on elsewhere while it is stopped, as one that is cut off: at once, although
    its connections are open. When it wakes, it is told, and ends."""
    with edge_process(*command) as process:
        await_tokens(process)
        with stopped(process):
            copied = shutil.copytree(tmp_path, tmp_path.with_name("copied"))
            with monkeypatch.context() as patch:
                patch.setenv(STATE_VARIABLE, str(copied))
                resumed = run_edge("run", "--resume", "last", *by_address(two))
            assert (resumed.code, resumed.out) == (0, whole), resumed.err
            for daemon in two:
                daemon.await_free()
        _out, messages = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "another coordinator has taken over this run (term 2)" in messages
    assert run_edge("replies", "clean", "--all").out == "1 removed.\n"


def test_a_reply_without_peers_goes_on_on_others(
    two: list[Daemon], command: tuple[str, ...], whole: str, tmp_path: Path
) -> None:
    """By another plan, and a longer answer: in float32 that changes no token."""
    alone = (*command[: command.index("--plan")], "-n", "1200")
    with Daemon(tmp_path, "--no-announce") as daemon:
        with edge_process(*alone, "--peer", daemon.address) as process:
            await_tokens(process)
            daemon.kill()
            _out, messages = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "none of the model's peers answers any more" in messages
    (entry,) = kept_replies().entries()
    assert f"[edge run --resume {entry.id} continues this answer]" in messages
    resumed = run_edge("run", "--resume", entry.id, *by_address(two[:1]))
    assert resumed.code == 0, resumed.err
    assert resumed.out.startswith(whole.removesuffix("\n"))
