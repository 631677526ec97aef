"""How long a newcomer waits: from the install to the first reply over two peers, in two commands.

python -m edge.demos.bench.first_reply

It runs scripts/first-reply, with no caches from before. What pip downloads does not count.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import click

from edge.demos.bench import results
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Figures

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "first-reply"
_TOLD = re.compile(r"first reply over two peers after (\d+) s: (\d+) s to install")


def wait() -> tuple[int, int]:
    """Seconds until the reply, and of them those of the install."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [_SCRIPT, Path(folder) / "venv"],
            cwd=_SCRIPT.parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
    if (told := _TOLD.search(done.stdout)) is None:
        raise SystemExit(f"{_SCRIPT} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return int(told[1]), int(told[2])


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@append_option
def main(rounds: int, append: bool) -> None:
    """Each round makes an environment of its own."""
    figures = Figures()
    for _ in range(rounds):
        reply_s, installed_s = wait()
        figures.add("to the first reply", "s", reply_s)
        figures.add("of it, to install", "s", installed_s)
    results.publish(
        figures.metrics(),
        question="a newcomer's first reply",
        variant="pip install ., then edge run --local 2 --parallel pipeline",
        link="TCP over loopback",
        model="bundled (1.3 M)",
        keep=append,
    )


if __name__ == "__main__":
    main()
