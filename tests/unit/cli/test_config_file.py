"""Options of `edge peer` in a file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from edge.cli.commands.peer import command
from tests.support.processes import edge as run_edge

EVERY_OPTION = """\
name = "attic"
listen = "127.0.0.1:0"
threads = 3
memory = "4GiB"
model-memory = 1073741824
host-memory = "1GiB"
backend = "null"
allow-software-adapter = false
kv-memory = "100MiB"
kv-disk = "/fast/kv:20GiB"
cluster = "house"
interface = ["lo", "127.0.0.1"]
cache-limit = "1GiB"
allow = "use=0123456789abcdef"
each-user = "memory=4GiB,sessions=2"
audit = "/var/log/edge/audit"
on-battery = "off"
idle-only = false
spare-memory = "1GiB"
log-level = "info"
log-format = "json"
log-file = "/var/log/edge/peer.log"
log-days = 3
no-announce = true
insecure = false
json = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "edge.toml"


def printed(file: Path, *arguments: str) -> str:
    outcome = run_edge("peer", "--config", file, *arguments, "--print-config")
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def test_every_option_can_be_in_a_file_by_its_name(file: Path) -> None:
    file.write_text(EVERY_OPTION)
    said, shown = tomllib.loads(EVERY_OPTION), tomllib.loads(printed(file))
    assert shown == {**said, "model-memory": "1073741824"}, "a size is a text"
    hidden = {"config", "print-config", "handed-keys", "supervised", "gpu"}
    options = {max(option.opts, key=len).removeprefix("--") for option in command.params}
    assert said.keys() == options - hidden, "gpu needs one"


def test_the_command_line_outweighs_the_file_and_the_file_the_defaults(file: Path) -> None:
    file.write_text('name = "attic"\ninterface = ["lo"]\nmemory = "4GiB"\n')
    lines = printed(file, "--memory", "2GiB", "--interface", "eth0").splitlines()
    assert 'name = "attic"  # file' in lines
    assert 'memory = "2GiB"  # command line' in lines
    assert 'interface = ["eth0"]  # command line' in lines
    assert 'cluster = "default"  # default' in lines
    assert "# model-memory: all that is left" in lines


def test_what_is_printed_is_a_file_that_says_the_same(file: Path) -> None:
    file.write_text('name = "a \\"b\\" ü\\\\"\n')
    once = tomllib.loads(printed(file))
    file.write_text(printed(file))
    assert tomllib.loads(printed(file)) == once
    assert once["name"] == 'a "b" ü\\'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('memroy = "4GiB"', "there is no option 'memroy'; do you mean memory?"),
        ("cache_limit = 1", "there is no option 'cache_limit'; do you mean cache-limit?"),
        ("xyz = 1", "there is no option 'xyz'; there are name, listen,"),
        ("supervised = true", "there is no option 'supervised'"),
        ('config = "other.toml"', "there is no option 'config'"),
        ("[peer]\nthreads = 1", "there is no option 'peer'"),
        ("threads = true", "threads: True is not a whole number"),
        ("threads = 0", "threads: 0 is not in the range 1<=x<=1024."),
        ('threads = "2"', "threads: '2' is not a whole number"),
        ("threads = 1.5", "threads: 1.5 is not a whole number"),
        ('interface = "lo"', "interface: 'lo' is not a list of texts"),
        ("interface = [1]", "interface: [1] is not a list of texts"),
        ("insecure = 1", "insecure: 1 is not true or false"),
        ("name = [1]", "name: [1] is not a text"),
        ('memory = "much"', "memory: 'much' is not a size; write 4GiB"),
        ('allow = "me"', "allow: 'me' names no devices that may use this peer"),
        ('backend = "cpu"', "backend: 'cpu' is not one of"),
        ("threads", "Expected '=' after a key in a key/value pair"),
        ("a = 1\na = 2", "Cannot overwrite a value"),
        (f"a = {'[' * 5000}", "write it in TOML"),
        ("a" * 70_000, "70,000 bytes are more than 65,536"),
    ],
)
def test_what_a_file_cannot_say(file: Path, text: str, sentence: str) -> None:
    file.write_text(text)
    told = run_edge("peer", "--config", file, "--print-config").sentence()
    assert told.startswith(f"--config {file}: ")
    assert sentence in told


def test_a_file_that_cannot_be_read(file: Path) -> None:
    told = run_edge("peer", "--config", file).sentence()
    assert told == f"--config {file}: No such file or directory; name a file that can be read"
    file.write_bytes(b"\xff\xfe")
    assert "can't decode" in run_edge("peer", "--config", file).sentence()
