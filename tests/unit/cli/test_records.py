"""Records as tables, and `--json` of the commands that list something."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from edge.answers.journal_folder import JournalFolder
from edge.cli.commands import cache, models, peers, ps, replies, top
from edge.cli.records import by_place, make_table, print_table
from edge.protocol.kept_files import KeptFiles
from edge.protocol.lease import Lease
from tests.support.kept_journals import asked
from tests.support.peer_infos import peer_info
from tests.unit.cli.test_top_and_ps import VIEW, shard

PEER = peer_info("attic", models=(shard("m", 0, 0), shard("other", 0, 0)))
KEPT = KeptFiles(
    kind="shards", name="f", model="org/m", bytes=1 << 20, unused_s=9000.0, in_use=False
)


def shown(width: int, *, is_terminal: bool) -> list[str]:
    out = io.StringIO()
    rows = [("[red]attic[/red] :smile:", "8"), ("a\x1b[2Jb", "12"), ("x" * 150, "123")]
    table = make_table(rows, by_place("name", "count"), title="[all]", right=("count",))
    print_table(table, Console(file=out, width=width, force_terminal=is_terminal))
    return out.getvalue().splitlines()


def test_cells_are_shown_as_they_are_and_without_controls() -> None:
    lines = shown(80, is_terminal=False)
    assert lines[0].strip() == "[all]"
    assert any("[red]attic[/red] :smile:" in line for line in lines)
    assert any("a\\x1b[2Jb" in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_numbers_end_at_the_right() -> None:
    ends = [line.rstrip("│ ").split()[-1] for line in shown(80, is_terminal=False)[4:7]]
    assert ends == ["8", "12", "123"]
    assert len({len(line.rstrip("│")) for line in shown(80, is_terminal=False)[4:7]}) == 1


def test_elsewhere_than_on_a_terminal_each_row_is_one_line() -> None:
    assert any("x" * 150 in line for line in shown(80, is_terminal=False))
    assert not any("x" * 150 in line for line in shown(80, is_terminal=True))


def test_what_is_not_known_is_a_dash() -> None:
    out = io.StringIO()
    print_table(make_table([1], {"size": lambda _each: None}), Console(file=out))
    assert "–" in out.getvalue()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One peer for the commands that look for some; nothing else is here."""

    def unused(*_given: object) -> None:
        raise AssertionError("looking makes no plans, and removes nothing")

    fake = SimpleNamespace(
        peers=(PEER,), kept=lambda _peer: (KEPT,), propose=unused, remove_kept=unused
    )

    @contextlib.contextmanager
    def open_cluster(*_given: object, **_named: object) -> Iterator[SimpleNamespace]:
        yield fake

    for module in (cache, models, peers, ps):
        monkeypatch.setattr(module, "open_cluster", open_cluster)
    for module in (cache, models):
        monkeypatch.setattr(module, "hub_cache", lambda: tmp_path / "hub")
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))


def as_json(command: Any, *arguments: str) -> Any:
    outcome = CliRunner().invoke(command, [*arguments, "--json"])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.output)


@pytest.mark.usefixtures("cluster")
def test_ps_prints_each_model_with_its_shards() -> None:
    found = as_json(ps.command)
    assert [each["name"] for each in found] == ["m", "other"]
    (part,) = found[0]["shards"]
    assert part == {
        "peer": "attic",
        "stage": 0,
        "rank": 0,
        "weight_bytes": 20,
        "kv_bytes": 10,
        "buffer_bytes": 1,
        "streamed_bytes": 0,
    }


@pytest.mark.usefixtures("cluster")
def test_peers_prints_what_each_peer_says_of_itself() -> None:
    (found,) = as_json(peers.command)
    assert found["name"] == "attic"
    assert [each["name"] for each in found["models"]] == ["m", "other"]
    assert {"memory_bytes", "free_bytes"} <= found.keys()


@pytest.mark.usefixtures("cluster")
def test_models_prints_models_what_is_kept_of_them_and_a_note() -> None:
    found = as_json(models.command)
    assert found == {
        "models": [],
        "kept": [{"device": "attic", "model": "org/m", "bytes": 1 << 20}],
        "note": None,
    }


@pytest.mark.usefixtures("cluster")
def test_cache_prints_files_by_device() -> None:
    (found,) = as_json(cache.command, "show", "--peers")
    assert (found["device"], found["bytes"], found["unused_s"]) == ("attic", 1 << 20, 9000.0)
    assert as_json(cache.command, "show") == []


def test_top_prints_a_line_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_look", lambda _address, _key: VIEW)
    outcome = CliRunner().invoke(top.command, ["--once", "--json"])
    (line,) = outcome.output.splitlines()
    assert json.loads(line) == VIEW


def test_replies_prints_those_that_are_not_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = JournalFolder(tmp_path)
    monkeypatch.setattr(replies, "kept_replies", lambda: kept)
    assert as_json(replies.command, "show") == []
    begun = kept.begin(asked(), Lease(run="a run"))
    assert begun is not None
    begun.close()
    (found,) = as_json(replies.command, "show")
    assert (found["id"], found["prompt_tokens"], found["new_tokens"]) == (begun.id, 3, 0)
    assert found["is_under_way"] is False
    assert found["why_not"] is None
