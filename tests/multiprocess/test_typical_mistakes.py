"""What people type wrong: one sentence with cause and remedy, and the exit code that fits."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edge.cli.main import cli
from edge.demos.bundled import MODEL
from tests.support.processes import Daemon
from tests.support.processes import edge as run_edge

USAGE = 2
ERROR = 1

# What was typed; its exit code; what the one sentence says. {...} are filled in.
MISTAKES: list[tuple[str, int, str]] = [
    ("run", USAGE, "Missing argument 'MODEL'"),
    (
        "run {model}",
        USAGE,
        "Missing option '-p' / '--prompt'; give one, or chat: edge chat",
    ),
    ("run {model} -p", USAGE, "requires an argument; write one behind -p"),
    ("run {model} Why?", USAGE, "extra argument 'Why?'; give the prompt with -p"),
    ("run {model} -p Is it so?", USAGE, "extra argument 'it'; put the whole prompt in quotes"),
    ("run {model} Why? --resume last", USAGE, "with the same prompt and options; leave out MODEL"),
    ("rnu {model} -p x", USAGE, "No such command 'rnu'; do you mean 'run'?"),
    ("chatt {model}", USAGE, "do you mean 'chat'?"),
    ("run {model} -p x --dtpe int4", USAGE, "write --dtype, --kv-dtype or --stop"),
    ("peers --zzz", USAGE, "No such option '--zzz'; leave it out; edge peers --help lists them"),
    ("run {model} -p x --dtype q4", USAGE, "'q4' is not one of its values; write auto, float32"),
    ("run {model} -p x --wire int4", USAGE, "'int4' is not one of its values; write float32"),
    ("run {model} -p x --kv-dtype int2", USAGE, "'int2' is not one of"),
    ("run {model} -p x --parallel both", USAGE, "'both' is not one of its values; write auto"),
    ("run {model} -p x --block-size 7", USAGE, "'7' is not one of its values; write 16"),
    ("run {model} -p x -n 0", USAGE, "0 is not in the range x>=1"),
    (
        "run {model} -p x -n many",
        USAGE,
        "'many' is not a whole number; write a whole number of at least 1",
    ),
    ("run {model} -p x --seed -3", USAGE, "-3 is not in the range x>=0"),
    ("run {model} -p x --context 0", USAGE, "0 is not in the range x>=1"),
    ("run {model} -p x --local 0", USAGE, "write a whole number from 1 to 64"),
    ("chat {model} --local two", USAGE, "'two' is not a whole number; write"),
    (
        "run {model} -p x --memory 1GiB",
        USAGE,
        "are for --local peers only; add --local N, or leave",
    ),
    (
        "run {model} -p x --local 1 {peer}",
        USAGE,
        "exclude each other; give either --local or --peer",
    ),
    ("run {model} -p x --plan none.json", USAGE, "'none.json' does not exist; write the path of"),
    ("plan {model} --prompt-tokens 0", USAGE, "0 is not in the range x>=1"),
    ("quantize {model}", USAGE, "Missing option '--out'; write edge quantize … --out PATH"),
    ("serve", USAGE, "Missing argument 'MODEL'; write edge serve [OPTIONS] MODEL"),
    ("cache cleen --all", USAGE, "No such command 'cleen'; write edge cache clean"),
    ("cache clean", USAGE, "nothing is chosen; give --older-than, --model or --all"),
    ("nonsense", USAGE, "No such command 'nonsense'; edge --help lists them"),
    ("pull org/name", USAGE, "'pull'; write edge run org/name, which downloads"),
    ("list", USAGE, "No such command 'list'; write edge models"),
    ("help", USAGE, "No such command 'help'; write edge --help"),
    ("help run", USAGE, "No such command 'help'; write edge run --help"),
    ("chat {model} hello", USAGE, "argument 'hello'; ask when the conversation has begun, or"),
    ("peers two words", USAGE, "arguments (two words); leave it out, or put an argument with spa"),
    ("quality {model} --text none.txt", USAGE, "'none.txt' does not exist"),
    ("run nothere -p x {peer}", ERROR, "nothere is not there; give the folder of a Hugging Face"),
    *(
        # Nobody is at this address: the model is looked for first.
        (f"{command} --peer 127.0.0.1:{{closed}}", ERROR, "nothere is not there; give the folder")
        for command in (
            "run nothere -p x",
            "chat nothere",
            "plan nothere",
            "bench nothere",
            "quality nothere",
            "quantize nothere --out new",
            "serve nothere --port 0",
            "serve {model} nothere --port 0",
        )
    ),
    ("run notes.txt -p x --peer 127.0.0.1:{closed}", ERROR, "is neither a folder nor a GGUF file"),
    ("run empty -p x --peer 127.0.0.1:{closed}", ERROR, "config.json is missing; give the folder"),
    ("chat strange --peer 127.0.0.1:{closed}", ERROR, "'strange' is not a family Edge runs"),
    ("inspect nothere", ERROR, "nothere is not there; give the folder"),
    ("inspect note.txt", ERROR, "(near: notes.txt); give the folder of a Hugging Face checkpoint"),
    ("run org/name -p x {peer}", ERROR, "org/name: nothing of it is in the cache"),
    ("run empty/name -p x {peer}", ERROR, "or hf://empty/name to look there"),
    ("run notes.txt -p x {peer}", ERROR, "notes.txt is neither a folder nor a GGUF file; give"),
    ("run empty -p x {peer}", ERROR, "config.json is missing; give the folder"),
    ("run {model} -p x --temperature -1 {peer}", ERROR, "temperature must be a number of at least"),
    (
        "run {model} -p x --top-p 3 {peer}",
        ERROR,
        "top_p must be a number of at least 0 and at most",
    ),
    ("run {model} -p x --context 99999 {peer}", ERROR, "context_tokens must be 1 to 512 for this"),
    ("run {model} -p x --local 1 --memory lots", ERROR, "'lots' is not a size; write 4GiB, 500MB"),
    ("run {model} -p x --peer localhost", ERROR, "localhost"),
    ("run {model} -p x --peer 127.0.0.1:99999", ERROR, "99999"),
    ("run {model} -p x --peer 127.0.0.1:{closed}", ERROR, "nothing listens there: check that"),
    ("run {model} -p x --peer nohost.invalid:5000", ERROR, "nohost.invalid"),
    ("run {model} -p x --interface wlan9", ERROR, "wlan9"),
    ("run {model} -p x --plan bad.json {peer}", ERROR, "bad.json cannot be read as JSON"),
    ("run {model} -p x --lora empty {peer}", ERROR, "no LoRA adapter: it has no adapter_config"),
    ("quantize {model} --out empty {peer}", ERROR, "is there already; remove it, or name another"),
    ("quantize {model} --out new --bits 2 {peer}", ERROR, "2 bits a weight are fewer than this"),
    ("plan {model} --what-if more {peer}", ERROR, "'more' is not a known change; write '+4GiB"),
    ("peer --listen 127.0.0.1:{taken}", ERROR, "{taken}"),
    ("peer --memory -1", ERROR, "'-1' is not a size; write 4GiB"),
    ("pair one two", ERROR, "a code has 6 words, not 2"),
    ("demo nodemo", ERROR, "there is no demo 'nodemo'; there are quickstart"),
]


def _tells_json(command: str) -> bool:
    known = cli.get_command(click.Context(cli), command)
    return known is not None and any("--json" in each.opts for each in known.params)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), "--no-announce") as daemon:
        yield daemon


@pytest.mark.parametrize(("typed", "code", "said"), MISTAKES, ids=[each[0] for each in MISTAKES])
def test_a_mistake_is_told_in_a_sentence(
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hi")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "strange"}')
    with socket.socket() as taken, socket.socket() as closed:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        words = {
            "model": MODEL,
            "peer": f"--peer {daemon.address}",
            "taken": taken.getsockname()[1],
            "closed": closed.getsockname()[1],
        }
        line = typed.format(**words).split()
        outcome = run_edge(*line)
        described = run_edge(line[0], "--json", *line[1:]) if _tells_json(line[0]) else None
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    if described is not None:
        assert described.code == code, described.err
        assert outcome.err.strip() == described.err.strip()
        told = json.loads(described.out)["error"]
        assert told.keys() == {"code", "message", "remedy"}
        assert told["message"] in outcome.err
        assert (told["code"] == "wrong_usage") == (code == USAGE)
        assert told["remedy"] in outcome.err
        if "give the folder of" in outcome.err:
            assert told["code"] == "bad_checkpoint"
            assert told["remedy"].startswith("give the folder of a Hugging Face checkpoint")
        assert told["remedy"]
    *_others, last = outcome.err.strip().splitlines()
    remedy = re.search(r"; (?!see )\S+ ", last) or re.search(r" must be ", last)
    assert remedy, f"nothing is said of what is to be done: {last}"
    if code == ERROR:
        assert said.format(**words) in outcome.sentence()
        return
    assert last.startswith("Error: ")
    assert said.format(**words) in last
    assert "Traceback" not in outcome.err
