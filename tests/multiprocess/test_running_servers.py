"""`edge serve` while it runs: limits of keys, keys that change, ids in logs, and its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import urllib.parse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.demos.bundled import MODEL
from tests.multiprocess.test_server_clients import request
from tests.support.processes import PATIENCE_S, Daemon, edge_process, poll_until, start_together

KEY, LIMITED, LATER = (f"a-key-of-the-tests-{number}" for number in range(3))

LONG = 200
"""Tokens: most of them come after the signal, or are there before and wait to be read."""


def complete(url: str, key: str, **body: object) -> tuple[int, dict[str, str], Any]:
    asked = {"model": "default", "prompt": "<|user|>", "max_tokens": 3, **body}
    return request(url, "POST", "/v1/completions", asked, authorization=f"Bearer {key}")


@contextlib.contextmanager
def begun(url: str, key: str, **body: object) -> Iterator[http.client.HTTPResponse]:
    """A stream of which one token has come."""
    to = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(to.hostname or "", to.port, timeout=PATIENCE_S)
    asked = {"model": "default", "prompt": "<|user|>", "stream": True, "ignore_eos": True, **body}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        while not answer.readline().startswith(b"data: "):
            pass
        yield answer
    finally:
        connection.close()


def is_closed(url: str) -> bool:
    """Nobody new is let in."""
    to = urllib.parse.urlsplit(url)
    try:
        socket.create_connection((to.hostname or "", to.port or 0), timeout=PATIENCE_S).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        pass  # the listener closes between the packets of this connection
    return False


def records(messages: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in messages.splitlines()]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("serve", "nothere", "--port", 0), "nothere is not there; give"),
        (("peer", "--listen", "127.0.0.1:99999"), "99999"),
    ],
    ids=str,
)
def test_why_it_does_not_start_is_told_as_its_log_is(
    command: tuple[object, ...], said: str
) -> None:
    with edge_process(*command, "--log-format", "json") as process:
        _out, messages = process.communicate(timeout=PATIENCE_S)
    (told,) = records(messages)
    assert said in told["message"]
    assert process.returncode == 1


def test_keys_have_limits_and_change_and_a_request_has_one_id_everywhere(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"{KEY}\n{LIMITED} answers=1 priority=low\n")
    logs = ("--log-level", "debug", "--log-format", "json")
    starts = [
        partial(
            Daemon, tmp_path / name, "--no-announce", "--name", name, "--backend", "null", *logs
        )
        for name in ("attic", "cellar")
    ]
    with start_together(*starts) as daemons:
        at = [word for daemon in daemons for word in ("--peer", daemon.address)]
        options = ("--parallel", "tensor", "--api-key-file", keys, "--port", "0", "--json", *logs)
        with edge_process("serve", MODEL, *at, *options) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]

            status, headers, _ = complete(url, KEY, n=2)
            assert status == 200
            asked = headers["x-request-id"]
            status, headers, told = complete(url, LIMITED, n=2)
            assert (status, "may have at most 1 at once" in told["error"]["message"]) == (429, True)
            assert headers["retry-after"]
            assert complete(url, LIMITED)[0] == 200

            assert complete(url, LATER)[0] == 401
            keys.write_text("short\n")
            process.send_signal(signal.SIGHUP)
            assert complete(url, KEY)[0] == 200
            keys.write_text(f"{LATER}\n")
            process.send_signal(signal.SIGHUP)
            poll_until(lambda: complete(url, LATER)[0] == 200)
            assert complete(url, KEY)[0] == 401

            with begun(url, LATER, max_tokens=LONG) as answer:
                process.send_signal(signal.SIGTERM)
                poll_until(lambda: is_closed(url))  # before the rest is read
                events = [line for line in answer.read().decode().splitlines() if line]
            assert events[-1] == "data: [DONE]"
            ended = [json.loads(line.removeprefix("data: ")) for line in events[:-1]]
            assert [each["finish_reason"] for each in ended[-1]["choices"]] == ["length"]
            _out, messages = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        told = records(messages)
        assert any("the keys are not changed" in each["message"] for each in told)
        assert asked in [each.get("request") for each in told]
        assert not any(key in messages for key in (KEY, LIMITED, LATER))
        for daemon in daemons:
            of_it = [
                each["message"]
                for each in records(daemon.messages)
                if each.get("request") == f"{asked}-1"
            ]
            assert len(of_it) == 2
            assert "begins" in of_it[0]
            assert "is over" in of_it[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_before_it_is_ready_leaves_nothing(
    number: signal.Signals,
) -> None:
    """Whatever it is doing then: its peers were started, and perhaps a part of the model sent."""
    several = ("--local", "2", "--parallel", "pipeline")
    with edge_process("serve", MODEL, *several, "--port", "0", "--json") as process:
        peers: list[psutil.Process] = []

        def have_started() -> bool:
            peers[:] = psutil.Process(process.pid).children(recursive=True)
            return len(peers) >= 2

        poll_until(have_started)
        process.send_signal(number)
        out, _messages = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == (-signal.SIGTERM if number is signal.SIGTERM else 130) or out
    assert not psutil.wait_procs(peers, timeout=PATIENCE_S)[1]
