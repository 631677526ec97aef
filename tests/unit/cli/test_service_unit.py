"""The units that `edge peer install` and `edge serve --install` write; containers of the docs."""

from __future__ import annotations

import plistlib
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from edge.cli.main import cli
from edge.cli.services.managers import MANAGERS, own_manager
from edge.cli.services.service import Service, install_service, peer_task, server_task
from edge.cli.services.systemd import Systemd
from edge.demos.bundled import MODEL
from edge.errors import RequestError
from tests.architecture.test_names import REPOSITORY
from tests.support.processes import edge as run_edge

SERVICE = Service(
    task=peer_task(Path("/etc/edge.toml")),
    python="/usr/bin/python3",
    is_system=False,
    user="root",
    environment=(),
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_it_runs_the_daemon_with_its_file() -> None:
    lines = Systemd().text(SERVICE).splitlines()
    assert "ExecStart=/usr/bin/python3 -P -m edge peer --config /etc/edge.toml" in lines
    assert "WantedBy=default.target" in lines
    assert "NoNewPrivileges=yes" in lines
    assert not any(line.startswith(("User=", "Protect")) for line in lines)


def test_for_the_system_it_is_somebodys_and_hardened_further() -> None:
    lines = Systemd().text(replace(SERVICE, is_system=True, user="anna")).splitlines()
    assert {"User=anna", "WantedBy=multi-user.target", "ProtectSystem=full"} <= set(lines)
    assert all("sudo" in line or "journalctl" in line for line in Systemd().next_commands(
        replace(SERVICE, is_system=True)
    ))  # fmt: skip


def test_words_that_systemd_would_read_otherwise_are_quoted() -> None:
    service = replace(
        SERVICE,
        python='/opt/a "b"/python',
        task=peer_task(Path("/data/100%/$HOME/c d.toml")),
        environment=(("EDGE_CACHE", "/x y/50%$"),),
    )
    text = Systemd().text(service)
    assert 'ExecStart="/opt/a \\"b\\"/python" -P' in text
    assert '"/data/100%%/$$HOME/c d.toml"' in text
    assert 'Environment="EDGE_CACHE=/x y/50%%$"' in text
    with pytest.raises(RequestError, match="cannot be part of a service"):
        Systemd().text(replace(SERVICE, task=peer_task(Path("/a\nExecStart=b"))))


@pytest.mark.parametrize("is_system", [False, True])
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("serves", [False, True])
def test_systemd_finds_nothing_wrong(is_system: bool, serves: bool, tmp_path: Path) -> None:
    folder = tmp_path / "100% of it"
    folder.mkdir()
    task = server_task(("m.gguf", "--port", "0"), folder) if serves else peer_task(folder / "a")
    unit = tmp_path / f"{task.name}.service"
    unit.write_text(
        Systemd().text(
            replace(SERVICE, is_system=is_system, task=task, python=shutil.which("sh") or "sh")
        )
    )
    command = ["systemd-analyze", "verify", "--man=no", *(["--user"] * (not is_system)), str(unit)]
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_it_is_written_and_says_what_comes_next(settings: Path) -> None:
    file = settings / "edge.toml"
    file.write_text('memory = "4GiB"')
    printed = run_edge("peer", "install", "--print", "--config", file)
    assert (printed.code, printed.err) == (0, "")
    unit = settings / "systemd" / "user" / "edge-peer.service"
    assert not unit.exists()
    for _ in range(2):
        installed = run_edge("peer", "install", "--config", file)
        assert installed.code == 0
        assert unit.read_text() == printed.out
    assert installed.out.startswith(f"Wrote {unit}. Type next:\n")
    assert "  systemctl --user enable --now edge-peer\n" in installed.out
    assert str(file) in printed.out


def test_a_file_with_a_wrong_option_is_not_installed(settings: Path) -> None:
    file = settings / "edge.toml"
    file.write_text("memroy = 1")
    assert "do you mean memory?" in run_edge("peer", "install", "--config", file).sentence()
    assert not (settings / "systemd").exists()


def test_options_of_the_daemon_are_not_forgotten(settings: Path) -> None:
    outcome = run_edge("peer", "--memory", "4GiB", "install")
    assert outcome.code == 2
    assert (
        "options of the daemon go into a file; write edge peer install --config FILE" in outcome.err
    )
    assert not (settings / "systemd").exists()


def test_the_unit_of_somebody_else_stays(settings: Path) -> None:
    unit = settings / "systemd" / "user" / "edge-peer.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Unit]\n")
    assert "not written by edge peer install" in run_edge("peer", "install").sentence()
    assert unit.read_text() == "[Unit]\n"


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(RequestError, match="print it instead"):
        install_service(Systemd(), SERVICE)


def test_launchd_gets_the_same_command() -> None:
    service = replace(
        SERVICE,
        task=peer_task(Path("/data/a <b> & c.toml")),
        environment=(("EDGE_CACHE", "/x y"),),
    )
    text = MANAGERS["launchd"].text(service)
    assert "Written by edge peer install" in text
    told = plistlib.loads(text.encode())
    words = ["/usr/bin/python3", "-P", "-m", "edge", "peer", "--config", "/data/a <b> & c.toml"]
    assert told["ProgramArguments"] == words
    assert told["EnvironmentVariables"] == {"EDGE_CACHE": "/x y"}
    assert told["RunAtLoad"] is True
    assert "UserName" not in told
    place = MANAGERS["launchd"].place(service)
    assert place == Path.home() / "Library/LaunchAgents/org.edge-inference.edge-peer.plist"
    system = replace(service, is_system=True, user="anna")
    assert plistlib.loads(MANAGERS["launchd"].text(system).encode())["UserName"] == "anna"
    assert MANAGERS["launchd"].place(system).parent == Path("/Library/LaunchDaemons")
    assert any("bootstrap system" in line for line in MANAGERS["launchd"].next_commands(system))


def test_the_task_scheduler_gets_the_same_command() -> None:
    python = r"C:\Program Files\Python\python.exe"
    service = replace(SERVICE, python=python, task=peer_task(Path("/data/a <b> & c.toml")))
    text = MANAGERS["task-scheduler"].text(service)
    assert "Written by edge peer install" in text
    root = ElementTree.fromstring(text)
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}

    def value(path: str) -> str | None:
        return root.findtext(path, namespaces=space)

    assert value("t:Actions/t:Exec/t:Command") == python
    arguments = value("t:Actions/t:Exec/t:Arguments")
    assert arguments == '-P -m edge peer --config "/data/a <b> & c.toml"'
    assert value("t:Triggers/t:LogonTrigger/t:Enabled") == "true"
    assert value("t:Settings/t:ExecutionTimeLimit") == "PT0S"
    assert value("t:Settings/t:StopIfGoingOnBatteries") == "false"
    assert root.findtext("t:Triggers/t:BootTrigger/t:Enabled", namespaces=space) is None
    create = MANAGERS["task-scheduler"].next_commands(service)[-2]
    assert create.startswith("schtasks /Create /F /TN edge-peer /XML ")


def test_the_task_is_one_that_its_user_may_create_and_not_a_slow_one() -> None:
    text = MANAGERS["task-scheduler"].text(replace(SERVICE, user="Zoë"))
    assert text.isascii(), "schtasks reads a file without a declared encoding in its code page"
    root = ElementTree.fromstring(text)
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    begins = root.find("t:Triggers/t:LogonTrigger", space)
    assert begins is not None
    assert [each.tag.partition("}")[2] for each in begins] == ["Enabled", "UserId"]
    assert begins.findtext("t:UserId", namespaces=space) == "Zoë"
    assert root.findtext("t:Settings/t:Priority", namespaces=space) in ("4", "5", "6")
    times = root.findtext("t:Settings/t:RestartOnFailure/t:Count", namespaces=space)
    assert times is not None
    assert int(times) <= 255


def test_this_system_has_systemd() -> None:
    assert isinstance(own_manager(), Systemd)
    printed = run_edge("peer", "install", "--print", "--manager", "launchd")
    assert plistlib.loads(printed.out.encode())["ProgramArguments"][-1] == "peer"


def test_a_server_is_installed_as_it_was_typed(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = settings / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    typed = ["serve", MODEL, "--install", "user", "--local", "2", "--port", "8000", "--json"]
    installed = run_edge(*typed)
    assert (installed.code, installed.err) == (0, "")
    unit = settings / "systemd" / "user" / "edge-serve.service"
    lines = unit.read_text().splitlines()
    assert installed.out.startswith(f"Wrote {unit}. Type next:\n")
    assert "  systemctl --user enable --now edge-serve\n" in installed.out
    (started,) = (line for line in lines if line.startswith("ExecStart="))
    assert shlex.split(started)[4:] == ["serve", str(MODEL), *typed[4:]]
    assert f"WorkingDirectory={folder}" in lines
    assert not any(line.startswith("ExecReload=") for line in lines), "it would end the server"
    printed = run_edge("serve", "--install=print", *typed[1:2], *typed[4:])
    assert printed.out.splitlines() == lines


def test_a_server_with_a_wrong_option_is_not_installed(settings: Path) -> None:
    typed = ("serve", MODEL, "--host", "0.0.0.0", "--install", "user")
    assert "give --api-key-file" in run_edge(*typed).sentence()
    assert not (settings / "systemd").exists()


@pytest.mark.parametrize(
    ("file", "commands", "port"),
    [
        ("Containerfile", [["edge", "peers"], ["edge", "peer"], ["edge", "pair"]], "5000"),
        ("Containerfile.serve", [["edge", "serve"], ["edge", "pair"]], "11435"),
    ],
)
def test_commands_of_the_containers_exist(
    file: str, commands: list[list[str]], port: str, tmp_path: Path
) -> None:
    text = (REPOSITORY / "docs" / file).read_text()
    found = [shlex.split(re.sub(r"[\[\],]", " ", each)) for each in
             re.findall(r"(?:ENTRYPOINT|CMD) (\[\"edge\".*\])", text)]  # fmt: skip
    found += [["edge", *shlex.split(each)] for each in re.findall(r"\bexec .*? edge (\w+)", text)]
    assert [words[:2] for words in found] == commands
    for _program, name, *arguments in found:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        keys = tmp_path / "keys.txt"
        keys.touch()
        given = [str(keys) if each.startswith("/data/") else each for each in arguments]
        model = ["m.gguf"] if name == "serve" else []
        command.make_context(name, [*given, *model])  # options that are none raise
    assert f"EXPOSE {port}" in text
    assert port in text.rpartition("ENTRYPOINT")[2]
