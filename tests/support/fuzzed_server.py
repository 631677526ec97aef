"""Requests made up from the document of a server, to one with the bundled model and a template that
takes tools: it may refuse them, and must not fail. Needs schemathesis, which the tests do without.

scripts/fuzz-server 200
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.model_folders import calling_model
from tests.support.processes import edge_process


def main() -> None:
    """Ends with the status of schemathesis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="Requests to each of its paths.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    arguments = ("--local", "1", "--context", "64", "--port", "0", "--json")
    with (
        tempfile.TemporaryDirectory() as folder,
        edge_process(
            "serve", calling_model(Path(folder)), *arguments, stderr=subprocess.DEVNULL
        ) as server,
    ):
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        found = subprocess.run(
            [
                *(
                    sys.executable,
                    "-c",
                    "from schemathesis.cli import schemathesis; schemathesis()",
                ),
                *("run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
                *("--max-examples", str(given.count), "--seed", str(given.seed)),
                *("--request-timeout", "600"),
            ],
            check=False,
            cwd=folder,  # it keeps what it found there
        )
        assert server.poll() is None, "the server ended"
    raise SystemExit(found.returncode)


if __name__ == "__main__":
    main()
