"""A user without a home folder, or a name, is told what to set."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from edge.cli.commands.completion import _place_for
from edge.cli.services.service import Service, peer_task
from edge.cli.services.systemd import Systemd
from edge.errors import RequestError
from edge.host.cache_paths import CACHE_VARIABLE, cache_root
from edge.host.home import expanded, home_or_none
from edge.host.state_paths import STATE_VARIABLE, state_root
from edge.membership.store import CONFIG_VARIABLE, config_root

UNKNOWN = (
    *("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "SUDO_USER"),
    *("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *(CACHE_VARIABLE, STATE_VARIABLE, CONFIG_VARIABLE),
)


@pytest.fixture(autouse=True)
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an id that has no line in /etc/passwd, and an empty environment."""

    def nobody(_: object) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(pwd, "getpwnam", nobody)
    for name in UNKNOWN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("root", "variable"),
    [(cache_root, CACHE_VARIABLE), (state_root, STATE_VARIABLE), (config_root, CONFIG_VARIABLE)],
)
def test_a_folder_of_edge(
    root: Callable[[], Path], variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=f"no home folder .* set HOME, or {variable} "):
        root()
    monkeypatch.setenv(variable, "~/edge")
    with pytest.raises(RequestError, match="~/edge: the home folder that ~ stands for"):
        root()
    monkeypatch.setenv(variable, str(tmp_path))
    assert root() == tmp_path
    monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in root().parents


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_the_place_of_completions(shell: str) -> None:
    with pytest.raises(RequestError, match="set HOME"):
        _place_for(shell)


def test_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="has no name on this system; set USER"):
        Service.of_this_process(peer_task(None), is_system=False)
    monkeypatch.setenv("USER", "somebody")
    service = Service.of_this_process(peer_task(None), is_system=False)
    assert service.user == "somebody"
    with pytest.raises(RequestError, match="set HOME"):
        Systemd().place(service)


def test_a_path_of_somebody_unknown() -> None:
    with pytest.raises(RequestError, match="write the path without ~"):
        expanded("~nobody/x")
    assert home_or_none() is None
