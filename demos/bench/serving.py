"""Many clients of a server for some minutes: errors, shares, memory, tokens a second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np
import psutil

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.left_behind import Held
from edge.demos.bench.llama_server import served_by_llama
from edge.demos.bench.results import Figures
from edge.demos.processes import child

_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs", "run", "far", "home")
_ALONE_S = 20.0
_LOOK_EVERY_S = 5.0
_MOST_WITHOUT_SERVER_S = 120.0


@dataclass(slots=True, kw_only=True)
class Seen:
    """By clients, and of the processes meanwhile."""

    answers: Counter[int] = field(default_factory=Counter)
    """Whole ones, by client."""
    tokens: int = 0
    """Tokens of whole answers."""
    errors: list[str] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)
    """What the server counted meanwhile."""
    held: list[list[Held]] = field(default_factory=list)
    """By the server and its peers, at each look."""

    def mean(self, name: str) -> float:
        sums, counts = (self.counted[f"edge_{name}_seconds_{which}"] for which in ("sum", "count"))
        return sums / max(1.0, counts)


class Asking:
    """What is asked, again and again."""

    def __init__(self, given: Given) -> None:
        self._words, self.new_tokens = given.prompt_words, given.new_tokens
        self._random = np.random.default_rng(0)

    def prompt(self) -> str:
        return " ".join(self._random.choice(_WORDS, size=self._words))


async def _for_a_while(seconds: float, tasks: Sequence[Coroutine[Any, Any, None]]) -> None:
    """What is under way in the end is given up."""
    running = [asyncio.create_task(each) for each in tasks]
    await asyncio.sleep(seconds)
    for task in running:
        task.cancel()
    for end in await asyncio.gather(*running, return_exceptions=True):
        if not isinstance(end, asyncio.CancelledError | None):
            raise end


@dataclass(slots=True, kw_only=True)
class Clients:
    """Clients of one server."""

    url: str
    keys: list[str]
    asking: Asking

    async def _said(self, request: str, key: str, body: bytes = b"") -> str:
        to = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(to.hostname, to.port)
        try:
            writer.write(
                f"{request} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            return (await reader.read()).decode()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _ask(self, number: int, seen: Seen) -> None:
        """One answer, streamed."""
        body = {
            "model": "default",
            "prompt": self.asking.prompt(),
            "max_tokens": self.asking.new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        try:
            told = await self._said(
                "POST /v1/completions", self.keys[number], json.dumps(body).encode()
            )
            status = told.partition("\r\n")[0]
            if " 200 " not in status or 'data: {"error"' in told or "data: [DONE]" not in told:
                raise OSError(f"{status}: {told[-500:]}")
            usages = [line for line in told.splitlines() if '"completion_tokens"' in line]
            if not usages:
                raise OSError(f"an answer without its usage: {told[-500:]}")
            usage = json.loads(usages[-1].removeprefix("data: "))["usage"]
            seen.answers[number] += 1
            seen.tokens += usage["completion_tokens"]
        except (OSError, ValueError, KeyError) as error:
            seen.errors.append(f"client {number}: {error}")
            click.echo(f"ERROR: {seen.errors[-1]}", err=True)

    async def _run(self, clients: int, seconds: float, *, greedy: int, look: bool) -> Seen:
        seen = Seen()

        async def again(number: int) -> None:
            while True:
                await self._ask(number, seen)

        async def watch() -> None:
            while True:
                processes = psutil.Process().children(recursive=True)
                seen.held.append([Held.by(each) for each in processes])
                await asyncio.sleep(_LOOK_EVERY_S)

        before = await self._counted() if look else {}
        asked = [again(number) for number in (*range(clients), *[0] * (greedy - 1))]
        await _for_a_while(seconds, [*asked, *([watch()] if look else [])])
        after = await self._counted() if look else {}
        seen.counted = {name: after[name] - before[name] for name in after}
        return seen

    async def _counted(self) -> dict[str, float]:
        """Figures of /metrics that have no labels."""
        lines = [
            line.split() for line in (await self._said("GET /metrics", self.keys[0])).splitlines()
        ]
        return {
            line[0]: float(line[1])
            for line in lines
            if len(line) == 2 and line[0].startswith("edge_") and "{" not in line[0]
        }

    def rounds(
        self, clients: int, seconds: float, *, greedy: int, look: bool
    ) -> tuple[list[float], Seen]:
        """Tokens per second of a client alone, before and after; and what all of them see."""

        def alone(seconds: float = _ALONE_S) -> float:
            return asyncio.run(self._run(1, seconds, greedy=1, look=False)).tokens / seconds

        alone(_ALONE_S / 4)
        before = alone()
        seen = asyncio.run(self._run(clients, seconds, greedy=greedy, look=look))
        return [before, alone()], seen


@contextlib.contextmanager
def _temporary(content: str, suffix: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=suffix) as file:
        file.write(content)
        file.flush()
        yield file.name


@contextlib.contextmanager
def _served(path: Path, keys: str, arguments: list[str]) -> Iterator[str]:
    """The address of a server of its own process."""
    command = [sys.executable, "-m", "edge", "serve", str(path), "--port", "0", "--json"]
    with child([*command, "--api-key-file", keys, *arguments]) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready:
            raise SystemExit("the server did not start; its message is above")
        try:
            yield json.loads(ready)["url"]
        finally:
            process.terminate()
            process.wait()


async def _without_server(given: Given, seconds: float) -> tuple[float, str]:
    """Tokens per second, of as many askers as there is room for; and the plan as JSON, with the
    names that other peers have, too."""
    done, asking = 0, Asking(given)
    options: dict[str, Any] = {} if given.file else {"dtype": given.dtype}
    options |= {"context_tokens": given.context, "concurrency": given.concurrency}
    async with (
        await edge.AsyncCluster.local(given.peers, threads=given.threads) as cluster,
        await cluster.load(given.path, plan=given.plan, progress=False, **options) as model,
    ):

        async def again() -> None:
            nonlocal done
            while True:
                prompt, new_tokens = asking.prompt(), asking.new_tokens
                stream = model.stream(prompt, max_new_tokens=new_tokens, temperature=0)
                tokens = len([token async for token in stream])
                done += tokens

        await _for_a_while(seconds, [again() for _ in range(given.concurrency)])
        chosen = json.dumps(model.plan.to_json())
        for id, peer in model.peers.items():
            chosen = chosen.replace(id, peer.name)
    return done / seconds, chosen


@case.case(
    "many clients of one server",
    case.shape("M"),
    case.FILE,
    click.option("--llama-server", metavar="PROGRAM", help="Ask this program, too."),
    case.number("--clients", 64, least=2),
    case.number("--greedy", 1, "The first client asks for this many at once."),
    click.option("--minutes", type=click.FloatRange(0.1), default=3.0, show_default=True),
    *case.peers(2, 1),
    case.dtype(),
    case.number("--concurrency", 16),
    case.number("--context", 512, least=16),
    case.number("--prompt-words", 8),
    case.number("--new-tokens", 32, least=2),
    case.FOLDER,
)
def serving(given: Given) -> Iterator[Found]:
    """What many clients see, beside one alone. It fails where one of them saw an error.

    First as many as there is room for ask from Python, without a server: what the program alone
    reaches. Then the same plan is served. Each client has a key of its own and asks over HTTP, one
    answer after the other, streamed. Before and after them one client asks alone. With
    --llama-server the same clients ask that program next, with the same file, as many threads, and
    room for as much.
    """
    path, seconds = given.path, 60 * given.minutes
    context, concurrency = given.context, given.concurrency
    arguments = ["--local", str(given.peers), "--threads", str(given.threads)]
    arguments += [] if given.file else ["--dtype", given.dtype]
    arguments += ["--context", str(context), "--concurrency", str(concurrency)]
    keys = [f"key-of-the-client-number-{number:04}" for number in range(given.clients)]

    def measure(url: str, *, look: bool) -> tuple[list[float], Seen]:
        those = Clients(url=url, keys=keys, asking=Asking(given))
        return those.rounds(given.clients, seconds, greedy=given.greedy, look=look)

    without, chosen = asyncio.run(_without_server(given, min(seconds, _MOST_WITHOUT_SERVER_S)))
    with _temporary("\n".join(keys), ".txt") as key_file:
        with (
            _temporary(chosen, ".json") as plan_file,
            _served(path, key_file, [*arguments, "--plan", plan_file]) as url,
        ):
            ours = measure(url, look=True)
        theirs = None
        if given.llama_server is not None:
            every = str(given.peers * given.threads)
            room = ["-np", str(concurrency), "-c", str(concurrency * context), "--no-webui"]
            room += ["-t", every, "-tb", every]
            with served_by_llama(
                given.llama_server, path, "--api-key-file", key_file, *room
            ) as url:
                theirs = measure(url, look=False)
    alone, seen = ours
    several = f", one with {given.greedy} at once" if given.greedy > 1 else ""
    found = _figures(alone, seen, given.clients, seconds)
    together = seen.tokens / seconds
    found.add("without a server", "tok/s", without)
    found.add("together / without a server", "x", together / without)
    if theirs is not None:
        other_alone, other = theirs
        reached = other.tokens / seconds
        found.add("llama-server, errors", "answers", len(other.errors))
        found.add("llama-server, all clients", "tok/s", reached)
        found.add("llama-server, one client alone", "tok/s", *other_alone)
        found.add("Edge / llama-server, all clients", "ratio", together / max(1e-9, reached))
    yield Found(
        figures=found,
        variant=f"{given.clients} clients{several}, {given.minutes:g} minutes, "
        f"{given.prompt_words} words + {given.new_tokens} tokens, "
        f"{'as stored' if given.file else given.dtype}, room for {concurrency} x {context} tokens, "
        f"{given.arrangement}",
        model=given.model,
        bad=[f"{len(seen.errors)} errors; the first: {each}" for each in seen.errors[:1]],
    )


def _figures(alone: list[float], seen: Seen, clients: int, seconds: float) -> Figures:
    found, together = Figures(), seen.tokens / seconds
    answers = [seen.answers[number] for number in range(clients)]
    looks = seen.held[len(seen.held) // 3 :]
    grown = [
        (last.memory_bytes - first.memory_bytes) / (1 << 20)
        for first, last in zip(looks[0], looks[-1], strict=False)
    ]
    found.add("answers", "answers", seen.answers.total())
    found.add("errors", "answers", len(seen.errors))
    found.add("answers of a client", "answers", *answers)
    found.add("most served / least served", "x", max(answers) / max(1, min(answers)))
    found.add("all clients together", "tok/s", together)
    found.add("one client alone, before and after", "tok/s", *alone)
    found.add("together / alone", "x", *(together / each for each in alone))
    found.add("first token, mean", "s", seen.mean("first_token"))
    found.add("between tokens, mean", "ms", 1e3 * seen.mean("token"))
    found.add("more memory, by process", "MiB", *grown)
    return found
