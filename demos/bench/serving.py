"""Many clients of `edge serve` for some minutes: errors, who got how much, memory, tokens a second.

python -m edge.demos.bench.serving --shape M --clients 64 --minutes 3
python -m edge.demos.bench.serving --shape M --clients 8 --greedy 50 --concurrency 1
python -m edge.demos.bench.serving --file model.gguf --clients 64 --llama-server llama-server

First as many as there is room for ask from Python, without a server: what the program alone
reaches. Then the same plan is served. Each client has a key of its own and asks over HTTP, one
answer after the other, streamed. With --greedy the first of them asks for this number at once.
Before them one client asks alone, in the same minute. With --llama-server the same clients ask that
program next, with the same file, as many threads, and room for as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import click
import numpy as np
import psutil

import edge
from edge.demos.bench import results
from edge.demos.bench.left_behind import Held
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Metric
from edge.demos.processes import child
from edge.demos.shapes import checkpoint, described
from edge.weights.formats import Dtype

_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs", "run", "far", "home")
_ALONE_S = 20.0
_LOOK_EVERY_S = 5.0
_MOST_WITHOUT_SERVER_S = 120.0


@dataclass(slots=True, kw_only=True)
class Seen:
    """By clients, and by who looked at the processes."""

    answers: Counter[int] = field(default_factory=Counter)
    """Whole ones, by client."""
    tokens: int = 0
    """Tokens of whole answers."""
    errors: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """What the server counted meanwhile."""
    held: list[list[Held]] = field(default_factory=list)
    """By the server and its peers, at each look."""


def _prompt(random: np.random.Generator, words: int) -> str:
    return " ".join(random.choice(_WORDS, size=words))


@dataclass(slots=True, kw_only=True)
class Clients:
    """Clients of one server."""

    url: str
    keys: list[str]
    prompt_words: int
    new_tokens: int
    random: np.random.Generator
    seen: Seen = field(default_factory=Seen)

    async def ask(self, number: int) -> None:
        """One answer, streamed."""
        body = {
            "model": "default",
            "prompt": _prompt(self.random, self.prompt_words),
            "max_tokens": self.new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        sent, to = json.dumps(body).encode(), urlsplit(self.url)
        reader, writer = await asyncio.open_connection(to.hostname, to.port)
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                f"authorization: Bearer {self.keys[number]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(sent)}\r\n\r\n".encode()
                + sent
            )
            status = await reader.readline()
            told = (await reader.read()).decode()
            if b" 200 " not in status or 'data: {"error"' in told or "data: [DONE]" not in told:
                raise OSError(f"{status.decode()}: {told[-500:]}")
            usages = [line for line in told.splitlines() if '"completion_tokens"' in line]
            if not usages:
                raise OSError(f"an answer without its usage: {told[-500:]}")
            usage = json.loads(usages[-1].removeprefix("data: "))["usage"]
            self.seen.answers[number] += 1
            self.seen.tokens += usage["completion_tokens"]
        except (OSError, ValueError, KeyError) as error:
            self.seen.errors.append(f"client {number}: {error}")
            click.echo(f"ERROR: {self.seen.errors[-1]}", err=True)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def run(self, clients: int, seconds: float, *, greedy: int, look: bool) -> Seen:
        """Each asks again and again; in the end what is under way is given up."""
        self.seen = Seen()

        async def again(number: int) -> None:
            while True:
                await self.ask(number)

        numbers = [*range(clients), *[0] * (greedy - 1)]
        tasks = [asyncio.create_task(again(number)) for number in numbers]
        before = await self.figures() if look else {}
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if look:
                self.seen.held.append([Held.by(each) for each in _processes()])
            await asyncio.sleep(min(left_s, _LOOK_EVERY_S))
        after = await self.figures() if look else {}
        self.seen.figures = {name: after[name] - before[name] for name in after}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.seen

    async def figures(self) -> dict[str, float]:
        """Figures of /metrics that have no labels."""
        to = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(to.hostname, to.port)
        writer.write(
            f"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"authorization: Bearer {self.keys[0]}\r\n\r\n".encode()
        )
        lines = [line.split() for line in (await reader.read()).decode().splitlines()]
        writer.close()
        return {
            line[0]: float(line[1])
            for line in lines
            if len(line) == 2 and line[0].startswith("edge_") and "{" not in line[0]
        }


def _mean(seen: Seen, name: str) -> float:
    sums, counts = (seen.figures[f"edge_{name}_seconds_{which}"] for which in ("sum", "count"))
    return sums / max(1.0, counts)


def _processes() -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


@contextlib.contextmanager
def served(path: Path, keys: list[str], arguments: list[str]) -> Iterator[str]:
    """The address of a server of its own process."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(keys))
        file.flush()
        command = [sys.executable, "-m", "edge", "serve", str(path), "--port", "0", "--json"]
        with child([*command, "--api-key-file", file.name, *arguments]) as process:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready:
                raise SystemExit("the server did not start; its message is above")
            try:
                yield json.loads(ready)["url"]
            finally:
                process.terminate()
                process.wait()


@contextlib.contextmanager
def served_by_llama(
    program: str, file: Path, keys: list[str], arguments: list[str]
) -> Iterator[str]:
    """The address of a llama-server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as key_file:
        key_file.write("\n".join(keys))
        key_file.flush()
        command = [program, "-m", str(file), "--port", str(port), "--api-key-file", key_file.name]
        quiet = subprocess.DEVNULL
        with subprocess.Popen([*command, *arguments], stdout=quiet, stderr=quiet) as process:
            url = f"http://127.0.0.1:{port}"
            try:
                while not _is_ready(url):
                    if process.poll() is not None:
                        raise SystemExit(f"{program} did not start")
                    time.sleep(0.2)
                yield url
            finally:
                process.terminate()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health") as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


@dataclass(slots=True, kw_only=True)
class Rounds:
    """What one program did: for a client alone before and after, and for all of them."""

    alone: list[float]
    """Tokens per second."""
    seen: Seen
    together: float


def _rounds(asking: Clients, clients: int, minutes: float, *, greedy: int, look: bool) -> Rounds:
    def alone() -> float:
        return asyncio.run(asking.run(1, _ALONE_S, greedy=1, look=False)).tokens / _ALONE_S

    asyncio.run(asking.run(1, _ALONE_S / 4, greedy=1, look=False))
    before = alone()
    seen = asyncio.run(asking.run(clients, 60 * minutes, greedy=greedy, look=look))
    return Rounds(alone=[before, alone()], seen=seen, together=seen.tokens / (60 * minutes))


async def _without_server(
    path: Path,
    load_options: edge.LoadOptions,
    *,
    peers: int,
    threads: int,
    prompt_words: int,
    new_tokens: int,
    seconds: float,
) -> tuple[float, str]:
    """Tokens per second, of as many askers as there is room for; and the plan as JSON, with the
    names that other peers have, too."""
    random, done = np.random.default_rng(0), 0
    async with (
        await edge.AsyncCluster.local(peers, threads=threads) as cluster,
        await cluster.load(path, load_options, progress=False) as model,
    ):

        async def again() -> None:
            nonlocal done
            while True:
                prompt, of_this = _prompt(random, prompt_words), 0
                async for _ in model.stream(prompt, max_new_tokens=new_tokens, temperature=0):
                    of_this += 1
                done += of_this

        tasks = [asyncio.create_task(again()) for _ in range(load_options.concurrency)]
        await asyncio.sleep(seconds)
        reached = done / seconds
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        chosen = json.dumps(model.plan.to_json())
        for id, peer in model.peers.items():
            chosen = chosen.replace(id, peer.name)
    return reached, chosen


@click.command()
@shape_option("M")
@click.option("--file", type=click.Path(path_type=Path), help="A model instead of the made-up one.")
@click.option("--llama-server", metavar="PROGRAM", help="Ask this program, too.")
@click.option("--clients", type=click.IntRange(2), default=64, show_default=True)
@click.option("--greedy", type=click.IntRange(1), default=1, show_default=True)
@click.option("--minutes", type=click.FloatRange(0.1), default=3.0, show_default=True)
@click.option("--peers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of each.")
@click.option("--plan", default="tensor", show_default=True)
@click.option("--dtype", default="int4", show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True)
@click.option("--context", type=click.IntRange(16), default=512, show_default=True)
@click.option("--prompt-words", type=click.IntRange(1), default=8, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True)
@folder_option
@append_option
def main(
    shape: str,
    file: Path | None,
    llama_server: str | None,
    clients: int,
    greedy: int,
    minutes: float,
    peers: int,
    threads: int,
    plan: str,
    dtype: Dtype,
    concurrency: int,
    context: int,
    prompt_words: int,
    new_tokens: int,
    folder: Path,
    append: bool,
) -> None:
    """What many clients see, beside one alone. It fails where one of them saw an error."""
    arguments = ["--local", str(peers), "--threads", str(threads)]
    arguments += ["--dtype", dtype] if file is None else []
    arguments += ["--context", str(context), "--concurrency", str(concurrency)]
    keys = [f"key-of-the-client-number-{number:04}" for number in range(clients)]
    path = file or checkpoint(shape, folder)

    def measure(url: str, *, look: bool) -> Rounds:
        asking = Clients(
            url=url,
            keys=keys,
            prompt_words=prompt_words,
            new_tokens=new_tokens,
            random=np.random.default_rng(0),
        )
        return _rounds(asking, clients, minutes, greedy=greedy, look=look)

    load_options = edge.LoadOptions(
        plan=plan,  # type: ignore[arg-type]  # checked by it
        context_tokens=context,
        concurrency=concurrency,
    )
    if file is None:
        load_options = replace(load_options, dtype=dtype)
    without_server, chosen = asyncio.run(
        _without_server(
            path,
            load_options,
            peers=peers,
            threads=threads,
            prompt_words=prompt_words,
            new_tokens=new_tokens,
            seconds=min(60 * minutes, _MOST_WITHOUT_SERVER_S),
        )
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as plan_file:
        plan_file.write(chosen)
        plan_file.flush()
        with served(path, keys, [*arguments, "--plan", plan_file.name]) as url:
            ours = measure(url, look=True)
    theirs = None
    if llama_server is not None:
        every = str(peers * threads)
        room = ["-np", str(concurrency), "-c", str(concurrency * context), "--no-webui"]
        with served_by_llama(llama_server, path, keys, [*room, "-t", every, "-tb", every]) as url:
            theirs = measure(url, look=False)
    seen = ours.seen
    answers = [seen.answers[number] for number in range(clients)]
    looks = seen.held[len(seen.held) // 3 :]
    grown = [
        (last.memory_bytes - first.memory_bytes) / (1 << 20)
        for first, last in zip(looks[0], looks[-1], strict=False)
    ]
    metrics = [
        Metric(name="answers", unit="answers", values=[seen.answers.total()]),
        Metric(name="errors", unit="answers", values=[len(seen.errors)]),
        Metric(name="answers of a client", unit="answers", values=answers),
        Metric(
            name="most served / least served",
            unit="x",
            values=[max(answers) / max(1, min(answers))],
        ),
        Metric(name="all clients together", unit="tok/s", values=[ours.together]),
        Metric(name="one client alone, before and after", unit="tok/s", values=ours.alone),
        Metric(
            name="together / alone", unit="x", values=[ours.together / each for each in ours.alone]
        ),
        Metric(name="without a server", unit="tok/s", values=[without_server]),
        Metric(
            name="together / without a server", unit="x", values=[ours.together / without_server]
        ),
        Metric(name="first token, mean", unit="s", values=[_mean(seen, "first_token")]),
        Metric(name="between tokens, mean", unit="ms", values=[1e3 * _mean(seen, "token")]),
        Metric(name="more memory, by process", unit="MiB", values=grown),
    ]
    if theirs is not None:
        metrics += [
            Metric(name="llama-server, errors", unit="answers", values=[len(theirs.seen.errors)]),
            Metric(name="llama-server, all clients", unit="tok/s", values=[theirs.together]),
            Metric(name="llama-server, one client alone", unit="tok/s", values=theirs.alone),
            Metric(
                name="Edge / llama-server, all clients",
                unit="ratio",
                values=[ours.together / max(1e-9, theirs.together)],
            ),
        ]
    results.publish(
        metrics,
        question="many clients of one server",
        variant=(
            f"{clients} clients{f', one with {greedy} at once' if greedy > 1 else ''}, "
            f"{minutes:g} minutes, {prompt_words} words + {new_tokens} tokens, "
            f"{dtype if file is None else 'as stored'}, room for "
            f"{concurrency} x {context} tokens, {peers} x {threads} threads, {plan}"
        ),
        link="TCP over loopback",
        model=described(shape) if file is None else file.name,
        keep=append,
    )
    if seen.errors:
        raise SystemExit(f"{len(seen.errors)} errors; the first: {seen.errors[0]}")


if __name__ == "__main__":
    main()
