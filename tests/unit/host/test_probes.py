"""Trials of sockets and folders of this machine."""

from __future__ import annotations

import socket
from pathlib import Path

from edge.host.probes import existing, listen_failure, multicast_failure, write_failure


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listen_failure("127.0.0.1", port) is not None
    assert listen_failure("127.0.0.1", 0) is None


def test_multicast_comes_back_on_loopback_and_not_on_what_is_no_interface() -> None:
    assert multicast_failure("lo", "127.0.0.1") is None
    assert multicast_failure("lo", "203.0.113.9") is not None
    assert multicast_failure("nonesuch0", "fe80::1%nonesuch0") is not None


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert write_failure(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []
    assert write_failure(Path("/proc/nothing")) is not None
