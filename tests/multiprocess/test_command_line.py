"""The command line as people and scripts meet it: help, JSON, pipes, terminals, conversations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest

import edge
from edge.cli.main import COMMANDS
from edge.demos.bundled import MODEL
from edge.membership.store import CONFIG_VARIABLE, MembershipStore
from edge.partition import Plan
from edge.profiling.coordinator_links import coordinator_links
from edge.protocol.measurements import LinkTimes
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import PATIENCE_S, Daemon, edge_process
from tests.support.processes import edge as run_edge
from tests.support.slow_cases import shown_in_parts
from tests.support.swiftshader import needs_swiftshader, swiftshader_environment

of_another_shell = shown_in_parts("multiprocess/test_command_line.py")
"""What is completed is shown with bash."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), "--no-announce", "--name", "only") as daemon:
        yield daemon
        daemon.await_free()
        assert daemon.messages == ""


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_teaches_by_examples(command: str) -> None:
    outcome = run_edge(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "Examples:" in outcome.out
    assert f"\n    edge {command}" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100


def test_help_and_version_need_nothing() -> None:
    outcome = run_edge("--help")
    assert outcome.code == 0
    for command, summary in COMMANDS.items():
        assert command in outcome.out
        assert summary in outcome.out
    assert run_edge("--version").out.strip() == f"edge, version {edge.__version__}"


def test_json_of_every_command_that_has_it(
    checkpoint: TinyCheckpoint, daemon: Daemon, tmp_path: Path
) -> None:
    peer = ("--peer", daemon.address)
    (described,) = json.loads(run_edge("peers", "--json", *peer).out)
    assert described["name"] == "only"
    assert described["address"] == daemon.address
    assert described["models"] == []

    proposed = run_edge("plan", checkpoint.path, "--json", *peer)
    value = json.loads(proposed.out)
    plan = Plan.from_json(value["plan"])
    assert plan.devices == (described["id"],)
    assert value["devices"][0]["name"] == "only"

    file = tmp_path / "plan.json"
    file.write_text(proposed.out)
    reply = run_edge(
        "run", checkpoint.path, "-p", "hi", "-n", 5, "--json", "--plan", file, "--seed", 3, *peer
    )
    assert reply.code == 0
    value = json.loads(reply.out)
    assert len(value["token_ids"]) == 5
    assert value["finish_reason"] == "length"
    assert value["statistics"]["seed"] == 3


def test_the_answer_goes_to_stdout_and_figures_to_stderr(
    checkpoint: TinyCheckpoint, daemon: Daemon
) -> None:
    command = ("run", checkpoint.path, "-n", 8, "--peer", daemon.address)
    given = run_edge(*command, "-p", "Once")
    piped = run_edge(*command, "-p", "-", stdin="Once")
    whole = json.loads(run_edge(*command, "-p", "Once", "--json").out)
    assert given.out == piped.out == whole["text"] + "\n"
    likely = json.loads(run_edge(*command, "-p", "Once", "--json", "--logprobs", 2).out)
    assert [each["token_id"] for each in likely["logprobs"]] == whole["token_ids"]
    assert all(each["logprob"] == each["top"][0]["logprob"] for each in likely["logprobs"])
    assert (
        "--logprobs needs the reply's JSON; add --json"
        in run_edge(*command, "-p", "Once", "--logprobs", 2).err
    )
    cut, figures = given.err.splitlines()
    assert cut == "[cut at 8 tokens; -n N for longer ones]"
    assert figures.startswith("[8 tokens, first after ")
    assert " tok/s" in given.err
    assert given.err.endswith(", on 1 device]\n")


def test_a_plan_and_peers_as_tables(checkpoint: TinyCheckpoint, daemon: Daemon) -> None:
    plan = run_edge("plan", checkpoint.path, "--dtype", "int8", "--peer", daemon.address)
    assert plan.code == 0
    assert "llama, int8" in plan.out
    assert "0–3" in plan.out
    peers = run_edge("peers", "--peer", daemon.address)
    assert peers.code == 0
    assert "only" in peers.out


def test_the_doctor_finds_a_peer_and_a_missing_one(daemon: Daemon) -> None:
    sound = run_edge("doctor", "--json", "--peer", daemon.address)
    report = {each["subject"]: each for each in json.loads(sound.out)}
    assert report["peer only"]["remedy"] is None
    assert f"Edge {edge.__version__}" in report["peer only"]["found"]
    assert "peers" not in report
    assert daemon.address not in sound.out
    assert sound.code == int(any(each["remedy"] is not None for each in report.values()))

    taken = run_edge("doctor", "--listen", daemon.address, "--peer", daemon.address)
    assert taken.code == 1
    assert f"WRONG  listening: a daemon cannot listen on {daemon.address}" in taken.out
    assert "give edge peer --listen another port" in taken.out

    missing = run_edge("doctor", "--json", "--peer", "127.0.0.1:1")
    report = {each["subject"]: each for each in json.loads(missing.out)}
    assert missing.code == 1
    assert report["peers"]["remedy"] is not None
    assert "127.0.0.1" not in missing.out


@needs_swiftshader
def test_the_doctor_finds_graphics_adapters(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (swiftshader_environment() or {}).items():
        monkeypatch.setenv(name, value)
    with edge_process("doctor", "--json", "--peer", daemon.address) as process:
        report, _ = process.communicate(timeout=PATIENCE_S)
    (adapter,) = [each for each in json.loads(report) if "SwiftShader" in each["subject"]]
    assert adapter["subject"].startswith("graphics adapter SwiftShader Device")
    assert adapter["found"].startswith("software, SwiftShader driver")
    assert adapter["found"].endswith("not used unless --allow-software-adapter")
    assert adapter["remedy"] is None


def test_a_peer_tells_its_clock(daemon: Daemon) -> None:
    begun_s = time.time()
    ahead_s = daemon.describe().clock_ahead_s
    assert ahead_s is not None
    assert abs(ahead_s) <= time.time() - begun_s, "it is the same clock"


def test_the_doctor_tells_no_secrets(daemon: Daemon) -> None:
    """Of keys, ids, addresses and folders, also where something is wrong."""
    run_edge("cluster", "show")  # there are keys
    keys = Path(os.environ[CONFIG_VARIABLE])
    told = "".join(
        run_edge("doctor", "--json", "--peer", address).out
        for address in (daemon.address, "127.0.0.1:1")
    )
    membership = MembershipStore(keys).membership()
    assert membership is not None
    secrets = {membership.identity.id, membership.cluster_id, daemon.describe().id, str(keys)}
    secrets |= set(json.loads((keys / "membership.json").read_text()).values()) - {""}
    secrets |= {line for line in (keys / "identity.pem").read_text().splitlines() if len(line) > 9}
    secrets |= {str(Path.home()), socket.gethostbyname("localhost"), daemon.describe().host}
    assert len(secrets) > 10
    for secret in secrets:
        assert secret not in told
    assert not re.search("[0-9a-f]{16}", told), "an id, or what begins one"


def test_the_link_to_a_peer_is_measured(daemon: Daemon) -> None:
    peer = daemon.describe()
    found = asyncio.run(coordinator_links([peer]))
    times = found[peer.id]
    assert isinstance(times, LinkTimes)
    assert times.there_bytes_per_s > 0
    gone = asyncio.run(coordinator_links([replace(peer, address="127.0.0.1:1")]))
    assert isinstance(gone[peer.id], edge.NetworkError)


def test_what_a_checkpoint_is_asks_nobody(checkpoint: TinyCheckpoint) -> None:
    """Of a cluster that is not there, and on a terminal that shows little."""
    environment = {"PYTHONIOENCODING": "ascii", "COLUMNS": "120"}
    with edge_process("inspect", checkpoint.path, environment=environment) as process:
        out, messages = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, messages) == (0, "")
    assert out.isascii()
    assert "base 10,000, scaled by 8 (llama3)" in out
    assert f"edge plan {checkpoint.path} tells what would run where" in out
    value = json.loads(run_edge("inspect", checkpoint.path, "--json").out)
    assert (value["family"], value["num_layers"], value["problem"]) == ("llama", 4, None)


def test_a_reader_that_goes_away_is_no_error_worth_a_word(
    endless_checkpoint: TinyCheckpoint, daemon: Daemon
) -> None:
    with edge_process(
        "run", endless_checkpoint.path, "-p", "hi", "-n", 20_000, "--context", 20_100,
        "--peer", daemon.address,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE_S) == 1
    daemon.await_free()


def test_output_that_cannot_be_written(checkpoint: TinyCheckpoint, daemon: Daemon) -> None:
    for options in ((), ("--json",)):
        with (
            Path("/dev/full").open("w") as full,
            edge_process(
                "run",
                checkpoint.path,
                "-p",
                "hi",
                "-n",
                3,
                "--peer",
                daemon.address,
                *options,
                stdout=full,
            ) as process,  # fmt: skip
        ):
            assert process.stderr is not None
            assert process.stderr.read() == "edge: No space left on device; check the disk\n"
            assert process.wait() == 1


def test_what_a_terminal_cannot_show_becomes_a_question_mark(
    tmp_path: Path, checkpoint: TinyCheckpoint, daemon: Daemon
) -> None:
    folder = Path(shutil.copytree(checkpoint.path, tmp_path / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [
        {"id": token, "content": f"é{token}", "special": False, **added} for token in range(95, 128)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = ("run", folder, "-p", "hi", "-n", "60", "--peer", daemon.address, "--seed", "1",
               "--temperature", "2")  # fmt: skip
    with edge_process(*command, environment={"PYTHONIOENCODING": "ascii"}) as process:
        out, messages = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, messages
    shown = run_edge(*command).out
    assert not shown.isascii()
    assert out == shown.encode("ascii", "replace").decode()


def test_input_that_is_no_text(checkpoint: TinyCheckpoint, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"\xff\xfe")
    command = ("run", checkpoint.path, "--peer", daemon.address, "-p")
    strict = {"PYTHONIOENCODING": "utf-8:strict"}
    with (
        (tmp_path / "input").open() as file,
        edge_process(*command, "-", stdin=file, environment=strict) as process,
    ):
        out, messages = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert messages == (
        "edge: the text cannot be encoded; give a string of valid Unicode characters\n"
    )
    assert "cannot be encoded" in run_edge(*command, "\udcff").sentence()


def test_a_conversation(talker: Path, daemon: Daemon) -> None:
    lines = "Hello\n/new\nHello\nAnd now?\n"
    command = ("chat", talker, "-n", 6, "--peer", daemon.address, "--system", "Be brief.")
    outcome = run_edge(*command, stdin=lines)
    assert outcome.code == 0
    first, again, other = outcome.out.splitlines()
    assert first == again != other
    assert run_edge(*command, stdin="").out == ""
    resumed = run_edge(*command[:-2], "--resume", stdin="More?\n")
    whole = run_edge(*command, "--no-keep", stdin="Hello\nAnd now?\nMore?\n")
    assert resumed.out == whole.out.splitlines()[-1] + "\n"
    assert "leave out --system" in run_edge(*command, "--resume", stdin="").err
    unknown = run_edge(*command[:-2], "--resume", "00000000", stdin="")
    assert "no conversation '00000000' is kept here" in unknown.err


def test_a_conversation_that_outgrows_the_context_can_be_started_anew(
    talker: Path, daemon: Daemon
) -> None:
    long = "x" * 100
    outcome = run_edge(
        "chat", talker, "-n", 6, "--peer", daemon.address, "--context", 60,
        stdin=f"Hello\n{long}\nHello\n/new\nHello\n",
    )  # fmt: skip
    assert outcome.code == 0
    assert "the prompt has " in outcome.err
    assert "shorten it" in outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == lines[-1]


def test_a_chat_without_a_template_ends_before_anyone_types(
    checkpoint: TinyCheckpoint, daemon: Daemon
) -> None:
    outcome = run_edge("chat", checkpoint.path, "--peer", daemon.address, stdin="Hello\n")
    assert "has no default chat template; send a plain prompt" in outcome.sentence()


def test_a_model_with_a_chat_template_is_asked(talker: Path, daemon: Daemon) -> None:
    """And told what to go on from with --raw, for 128 tokens unless it is told to say more."""
    command = ("run", talker, "-p", "Hello", "--peer", daemon.address)
    asked = run_edge(*command, "-n", 6)
    told = run_edge("chat", talker, "-n", 6, "--peer", daemon.address, stdin="Hello\n")
    assert asked.out == told.out
    assert "[cut at 6 tokens; -n N for longer ones]" in asked.err
    raw = json.loads(run_edge(*command, "--raw", "--json").out)
    assert len(raw["token_ids"]) == 128
    more = json.loads(run_edge(*command, "--raw", "--json", "--min-tokens", 130).out)
    assert len(more["token_ids"]) == 130
    prompt = "<user>Hello<assistant>"
    by_hand = run_edge("run", talker, "-p", prompt, "--raw", "-n", 6, "--peer", daemon.address)
    assert by_hand.out == asked.out
    quick = run_edge(*command, "-n", 6, "--thinking", "off")
    by_hand = run_edge(
        *("run", talker, "-p", f"{prompt}<quick>", "--raw", "-n", 6, "--peer", daemon.address)
    )
    assert by_hand.out == quick.out != asked.out
    whole = run_edge(*command)
    assert "[the context of 512 tokens is full; the model was trained for no more]" in whole.err
    less = run_edge(*command, "--context", 40)
    assert "[the context of 40 tokens is full; --context makes it longer]" in less.err


def test_an_empty_answer_says_why(daemon: Daemon) -> None:
    ended = run_edge("run", MODEL, "-p", "Hi", "--logit-bias", "2=1000", "--peer", daemon.address)
    assert (ended.code, ended.out.strip()) == (0, ""), ended.err
    assert "[the answer is empty: the model wrote its end at once]" in ended.err


def test_tokens_are_chosen_as_the_models_files_say(
    talker: Path, daemon: Daemon, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(talker, tmp_path / "sampled"))
    said = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8}
    others = {"num_beams": 4, "typical_p": 1.0, "no_repeat_ngram_size": 3}
    (folder / "generation_config.json").write_text(json.dumps({**said, **others}))
    command = ("run", folder, "-p", "Hello", "-n", 20, "--peer", daemon.address, "--seed", 5)
    sampled = run_edge(*command, "--explain")
    assert (
        "sampling: temperature 0.7, top-k 9, top-p 0.8, min-p 0.0, repetition-penalty 1.0, seed 5; "
        "defaults are from the model's files" in sampled.err
    )
    asked = run_edge(*command, "--temperature", 0.7, "--top-k", 9, "--top-p", 0.8)
    greedy = run_edge(*command, "--temperature", 0, "--explain")
    assert sampled.out == asked.out != greedy.out
    unused = "not used: num_beams, no_repeat_ngram_size, which the model's generation_config"
    assert sampled.err.count(unused) == 1
    assert unused not in asked.err
    first = json.loads(run_edge(*command, "--json").out)["token_ids"][0]
    barred = run_edge(*command, "--json", "--explain", "--logit-bias", f"{first}=-1000")
    assert json.loads(barred.out)["token_ids"][0] != first
    assert f"logit-bias {first}=-1000" in barred.err
    assert "sampling: temperature 0 (greedy), repetition-penalty 1.0" in greedy.err
    plain = run_edge("run", talker, "-p", "Hello", "-n", 20, "--peer", daemon.address)
    assert greedy.out == plain.out
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 2}')
    assert "generation_config.json: top_p must be" in run_edge(*command).sentence()


@pytest.fixture
def with_edge(tmp_path: Path) -> dict[str, str]:
    """An environment where a shell finds the command, and a home without anything."""
    program = tmp_path / "bin" / "edge"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edge "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(tmp_path), "TERM": "xterm"}


@of_another_shell
@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_options_and_values(with_edge: dict[str, str]) -> None:
    script = "edge completion fish | source\n"
    for line in ("edge ru", "edge run --dt", "edge run --dtype int"):
        script += f"complete -C {line!r}\n"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        env=with_edge,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    offered = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert offered[:2] == ["run", "--dtype"]
    assert sorted(offered[2:]) == ["int2", "int3", "int4", "int4-pure", "int8"]
    assert "run\tAnswer one prompt." in done.stdout


@of_another_shell
@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_commands_options_and_values(with_edge: dict[str, str]) -> None:
    """As somebody types it: only its line editor completes."""
    with contextlib.closing(
        pexpect.spawn("zsh", ["-f", "-i"], env=with_edge, encoding="utf-8", timeout=PATIENCE_S)
    ) as shell:
        shell.sendline(
            "autoload -Uz compinit; compinit -D -u; "
            'eval "$(edge completion zsh)"; echo be""gun'  # the quotes are not in what it prints
        )
        shell.expect_exact("begun")
        shell.send("edge ru\t")
        shell.expect_exact("edge run")
        shell.send("--dt\t")
        shell.expect_exact("--dtype")
        shell.send("int4-\t")
        shell.expect_exact("int4-pure")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_values(with_edge: dict[str, str]) -> None:
    script = """
        eval "$(edge completion bash)"
        complete_line() {
            COMPREPLY=() COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
            _edge_completion edge
            echo "${COMPREPLY[@]}"
        }
        complete_line edge ru
        complete_line edge run --dt
        complete_line edge run --dtype int
    """
    done = subprocess.run(
        ["bash", "-c", script], env=with_edge, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["run", "--dtype", "int8 int4 int4-pure int3 int2"]


@pytest.mark.parametrize(
    ("shell", "place", "said"),
    [
        ("bash", ".local/share/bash-completion/completions/edge", "bash-completion"),
        ("zsh", ".zfunc/_edge", "fpath+="),
        ("fish", ".config/fish/completions/edge.fish", "read it"),
    ],
)
def test_completion_is_installed_where_the_shell_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, place: str, said: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / place
    first = run_edge("completion", shell, "--install")
    assert (first.code, first.err) == (0, "")
    assert first.out.splitlines()[0] == f"Wrote {file}"
    assert said in first.out
    written = file.read_text()
    assert written.startswith("#compdef edge\n# Written by" if shell == "zsh" else "# Written by")
    again = run_edge("completion", shell, "--install")
    assert again.out.splitlines()[0] == f"{file} is as it should be"
    file.write_text(written.replace("_EDGE_COMPLETE", "_OLD"))
    assert run_edge("completion", shell, "--install").out.startswith("Wrote ")
    assert file.read_text() == written
    file.write_text("my own")
    refused = run_edge("completion", shell, "--install")
    assert "exists already, and was not written by edge completion --install; move" in (
        refused.sentence()
    )
    assert file.read_text() == "my own"
    if shell == "bash":
        file.write_text(written)
        script = f"source {file} && complete -p edge"
        told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert "-F _edge_completion edge" in told.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told_how(shell: str) -> None:
    outcome = run_edge("completion", shell)
    assert outcome.code == 0
    assert outcome.out.startswith("# To install: ")
    assert "_EDGE_COMPLETE" in outcome.out


@pytest.mark.skipif(sys.platform == "win32", reason="of shells of Unix")
def test_closed_streams_are_not_taken_by_other_files() -> None:
    """Libraries, such as drivers of graphics adapters, write their errors there."""
    code = (
        "import os, edge.cli.main as cli; cli._prepare_streams();"
        "assert all(os.path.samestat(os.fstat(each), os.stat(os.devnull)) for each in range(3))"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, check=False).returncode == 0


def test_several_local_peers_are_one_unless_they_are_asked_for() -> None:
    asked = ("run", MODEL, "-p", "Where does the cat live?", "-n", 2, "--local", 2)
    told = run_edge(*asked)
    assert told.code == 0, told
    assert "one peer with all threads answers instead" in told.err
    assert "on 1 device" in told.err
