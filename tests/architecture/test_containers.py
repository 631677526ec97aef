"""What an image is built of is what git has, and what it starts is a command of Edge."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest

from edge.cli.main import cli
from edge.server.app import HEALTH
from tests.architecture.test_environment import on_the_page
from tests.architecture.test_names import REPOSITORY
from tests.support.answering import answering, dead_proxy

PEER, SERVER = (REPOSITORY / "docs" / name for name in ("Containerfile", "Containerfile.serve"))


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = (line for line in file.read_text().splitlines() if line and not line.startswith("#"))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def the(file: Path, name: str) -> str:
    (found,) = [rest for word, rest in instructions(file) if word == name]
    return found


def health_check(file: Path) -> list[str]:
    command: list[str] = json.loads(the(file, "HEALTHCHECK").partition(" CMD ")[2])
    return command


def parsed(command: Sequence[str], further: Sequence[str] = ()) -> Mapping[str, Any]:
    """What Edge's command line makes of it."""
    program, name, *arguments = command
    assert program == "edge"
    context = click.Context(cli)
    found = cli.get_command(context, name)
    assert found is not None
    params: Mapping[str, Any] = found.make_context(
        name, [*arguments, *further], parent=context
    ).params
    return params


def test_what_git_ignores_is_in_no_image() -> None:
    ignored = (REPOSITORY / ".gitignore").read_text().split()
    left_out = (REPOSITORY / ".dockerignore").read_text().splitlines()
    names = {line.removeprefix("**/") for line in left_out if not line.startswith("#")}
    assert {name.rstrip("/") for name in ignored} <= names
    assert ".git" in names


def test_a_peer_is_started_and_asked_where_it_listens() -> None:
    started = parsed(json.loads(the(PEER, "ENTRYPOINT")))
    asked = parsed(health_check(PEER))
    port = the(PEER, "EXPOSE")
    assert f"0.0.0.0:{port}" in map(str, started.values())
    assert f"127.0.0.1:{port}" in str(asked)
    kept = dict(each.split("=") for each in the(PEER, "ENV").split())
    assert kept.keys() <= on_the_page()
    assert all(path.startswith(f"{the(PEER, 'VOLUME')}/") for path in kept.values())
    assert the(PEER, "USER") != "root"


def test_a_server_is_started_and_asked_where_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k")
    words = json.loads(the(SERVER, "ENTRYPOINT"))
    place = words.index("--api-key-file") + 1
    assert words[place].startswith(f"{the(PEER, 'VOLUME')}/")
    words[place] = str(keys)
    started = parsed(words, ["/models/a.gguf"])
    assert (started["host"], str(started["port"])) == ("0.0.0.0", the(SERVER, "EXPOSE"))
    program, option, script = health_check(SERVER)
    assert (program, option) == ("python", "-c")
    (url,) = re.findall(r"http://[^']+", script)
    asked: list[str] = []
    with dead_proxy(monkeypatch), answering(b"", asked) as there:
        exec(script.replace(f"http://127.0.0.1:{started['port']}", there), {})
    assert asked == [HEALTH]
    assert (urlsplit(url).port, urlsplit(url).path) == (started["port"], HEALTH)


def test_an_image_is_built_from_what_the_lines_before_it_build() -> None:
    for file in (PEER, SERVER):
        built = re.findall(r"podman build -t (\S+) -f (\S+) (\S+)", file.read_text())
        assert built
        # Or it leaves out the health check, which only that format has.
        assert file.read_text().count("BUILDAH_FORMAT=docker podman build") == len(built)
        for _tag, path, context in built:
            assert (REPOSITORY / path).is_file()
            assert (REPOSITORY / context).is_dir()
        assert all((REPOSITORY / path).name in {PEER.name, SERVER.name} for _, path, _ in built)
    tags = [tag for tag, _, _ in re.findall(r"build -t (\S+) -f (\S+) (\S+)", SERVER.read_text())]
    assert the(SERVER, "FROM") == tags[0]
