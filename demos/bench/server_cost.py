"""What a server adds to the time of a token, for one stream."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bundled import MODEL
from edge.server.app import Server
from edge.server.connections import WebServer, web_config
from edge.server.guard import Rules
from edge.server.model_pool import ModelPool

_FIRST_TOKENS = 8
"""First tokens of an answer, which are not looked at."""

_PROMPT = "the cat sat on a mat and saw dogs run far from home " * 3

_MOST_PROMPT_TOKENS = 128

_CLIENT = """
import http.client, json, sys, time
to = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
to.request("POST", "/v1/completions", sys.stdin.buffer.read(), {"content-type": "application/json"})
came_s = [time.perf_counter() for line in to.getresponse() if b'"text"' in line]
print(json.dumps(came_s))
"""


def _token_ms(came_s: list[float]) -> float:
    """The mean over those that are looked at: some come together, on either way."""
    looked_at = came_s[_FIRST_TOKENS:]
    if len(looked_at) < 2:
        raise SystemExit(
            f"{len(came_s)} tokens came as text; a model is needed whose tokens are text"
        )
    return 1e3 * (looked_at[-1] - looked_at[0]) / (len(looked_at) - 1)


def _never_ends(model: edge.AsyncModel) -> dict[int, float]:
    """The tokens with which an answer ends do not come: random weights choose them soon."""
    return dict.fromkeys(model._held.end_ids, -100.0)


async def _over_http(port: int, model: edge.AsyncModel, new_tokens: int) -> list[float]:
    body = {
        "model": model.name,
        "prompt": _PROMPT,
        "max_tokens": new_tokens,
        "temperature": 0,
        "logit_bias": _never_ends(model),
        "stream": True,
    }
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CLIENT, str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await client.communicate(json.dumps(body).encode())
    came_s: list[float] = json.loads(told)
    return came_s


async def _from_python(model: edge.AsyncModel, new_tokens: int) -> list[float]:
    options = edge.GenerationOptions(
        max_new_tokens=new_tokens, temperature=0.0, logit_bias=_never_ends(model)
    )
    return [time.perf_counter() async for _ in model.stream(_PROMPT, options)]


async def _compared(model: edge.AsyncModel, given: Given) -> Figures:
    async def load(name: str, whole: bool) -> edge.AsyncModel:
        raise AssertionError("it is loaded")

    server = Server(ModelPool({model.name: ""}, load, loaded={model.name: model}), rules=Rules())
    listening = socket.create_server(("127.0.0.1", 0))
    running = WebServer(web_config(server.app, most_connections=64))
    serving = asyncio.create_task(running.serve(sockets=[listening]))
    port, new_tokens, figures = listening.getsockname()[1], given.new_tokens, Figures()
    try:
        await _over_http(port, model, new_tokens)
        for number in range(given.rounds):
            if number % 2:
                http = await _over_http(port, model, new_tokens)
            python = await _from_python(model, new_tokens)
            if not number % 2:
                http = await _over_http(port, model, new_tokens)
            assert abs(len(http) - len(python)) <= 1, "not the same answer"
            figures.add("between tokens, from Python", "ms", _token_ms(python))
            figures.add("between tokens, over HTTP", "ms", _token_ms(http))
            figures.add("over HTTP / from Python", "ratio", _token_ms(http) / _token_ms(python))
    finally:
        running.should_exit = True
        await serving
    return figures


@case.case(
    "what a server adds to a token's time",
    click.option("--file", type=click.Path(exists=True, path_type=Path), default=MODEL),
    *case.peers(2, 1, "auto"),
    case.number("--new-tokens", 200, least=16),
    case.rounds(15),
)
def server_cost(given: Given) -> Iterator[Found]:
    """Time of a token over HTTP, and from Python.

    One loaded model is asked in turn from Python, in the process that coordinates it, and over HTTP
    by a client in a process of its own, with the same prompt. The times are those at which tokens
    came: a model is needed whose tokens are text, as a server sends nothing before a letter is
    whole.
    """

    async def measure() -> Figures:
        context = _MOST_PROMPT_TOKENS + given.new_tokens
        async with (
            await edge.AsyncCluster.local(given.peers, threads=given.threads) as cluster,
            await cluster.load(
                given.file, plan=given.plan, context_tokens=context, speculate="off", progress=False
            ) as model,
        ):
            return await _compared(model, given)

    yield Found(
        figures=asyncio.run(measure()),
        variant=f"one stream of {given.new_tokens} tokens, {given.arrangement}",
        model=given.file.name,
    )
