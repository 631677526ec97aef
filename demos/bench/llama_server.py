"""llama-server, llama.cpp's own server, beside what is measured."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

_DIRECTLY = build_opener(ProxyHandler({}))


@contextlib.contextmanager
def served_by_llama(program: str, file: Path, *arguments: str) -> Iterator[str]:
    """The address of a llama-server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "-m", str(file), "--port", str(port), *arguments]
    quiet, url = subprocess.DEVNULL, f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            while True:
                with contextlib.suppress(OSError), _DIRECTLY.open(f"{url}/health"):
                    break
                if process.poll() is not None:
                    raise SystemExit(f"{program} did not start")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def tokens_per_s(url: str, prompt: Sequence[int], new_tokens: int) -> float:
    """The speed at which it decodes a greedy answer, by its own count, with nothing cached."""
    found = answered(url, prompt, new_tokens, cache_prompt=False)
    return float(found["timings"]["predicted_per_second"])


def answered(
    url: str, prompt: Sequence[int], new_tokens: int, *, cache_prompt: bool
) -> dict[str, Any]:
    """A greedy answer: its `tokens`, and its times by the server's own count (`timings`)."""
    asked: Mapping[str, Any] = {
        "prompt": list(prompt), "n_predict": new_tokens, "temperature": 0, "ignore_eos": True,
        "cache_prompt": cache_prompt, "return_tokens": True,
    }  # fmt: skip
    kind = {"Content-Type": "application/json"}
    request = Request(f"{url}/completion", json.dumps(asked).encode(), kind)
    with _DIRECTLY.open(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
