"""The short form of the bench of faults: replies go on, the same, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import passing_time
from tests.support.processes import run_bench
from tests.support.slow_cases import shown_in_parts


@shown_in_parts("multiprocess/test_lost_peers.py")
def test_connections_that_break_cost_no_reply(tmp_path: Path) -> None:
    """Reset, or with bytes that nobody sent, between peers and to their coordinator; and links
    that take everything and bring nothing."""
    record = tmp_path / "faults.jsonl"
    options = ["--faults", "6", "--each", "6"]
    options += ["--peers", "3", "--new-tokens", "24", "--requests", "2", "--dtype", "int4"]
    options += ["--seed", "3", "--record", str(record)]
    kinds = ("link reset", "link garbled", "link swallowed", "control reset", "control garbled")
    for kind in kinds:
        options += ["--kind", kind]
    # Of a link that brings nothing nobody else tells.
    limits = {passing_time.VARIABLE: "edge.runs.dead_links.STALLED_AFTER_S=1.2"}
    done = run_bench("faults", tmp_path, *options, environment=limits)
    assert done.returncode == 0, done.stderr
    faults = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert len(faults) == 6
    assert faults[0]["kind"] == "link swallowed", "choose another seed"
    assert all(each["lost"] == each["different"] == 0 for each in faults)
    assert any(each["recovered"] for each in faults)
