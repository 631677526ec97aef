"""A comparison of a model on its peers with llama.cpp, in alternating rounds.

Alternation exposes both to the same noise of the machine. llama.cpp runs in a process of its own,
in any Python with llama-cpp-python: Edge does not depend on it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import RequestError
from edge.studies import llama_cpp_process
from edge.studies.benchmark import Spread, TimedModel, batch_tokens_per_s

_WARM_UP_TOKENS = 512


class Llama:
    """A llama.cpp process with one GGUF file. A context manager."""

    def __init__(
        self,
        gguf: Path,
        *,
        python: str,
        threads: int,
        context_tokens: int,
        requests: int = 1,
        flash: bool = True,
    ) -> None:
        """Start it. `flash`: llama.cpp may choose flash attention.

        Raises RequestError, after llama.cpp's own message, if it cannot start.
        """
        options = [str(threads), str(context_tokens), str(requests)]
        options += [] if flash else ["no-flash"]
        try:
            self._process = subprocess.Popen(
                [python, llama_cpp_process.__file__, str(gguf), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise RequestError(
                f"{python} cannot be started: {error.strerror}",
                remedy="name a Python that has llama-cpp-python",
            ) from error
        try:
            hello = self._answer()
        except BaseException:
            self.close()
            raise
        self.version = str(hello["version"])
        self.vocab_size = int(hello["vocab"])

    def run(self, prompt_tokens: int, new_tokens: int, requests: int = 1) -> dict[str, float]:
        """`prefill_s` and `decode_s` of this many replies at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{prompt_tokens} {new_tokens} {requests}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise RequestError(
                "llama.cpp's process ended without an answer: see its message above; it needs a "
                "Python with llama-cpp-python and numpy (--llama-python)"
            ) from None
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Tokens per second of both by round; ratios are of the same round."""

    version: str
    prompt_tokens: int
    new_tokens: int
    requests: int
    prefill: tuple[tuple[float, float], ...]
    """(Edge, llama.cpp) of each round."""
    decode: tuple[tuple[float, float], ...]
    batch: tuple[tuple[float, float], ...]
    """Rates of all `requests` replies together; empty for one request."""

    def to_json(self) -> dict[str, Any]:
        """p20, p50 and p80 of both and of the ratio."""
        found: dict[str, Any] = {
            "program": "llama.cpp",
            "version": self.version,
            "rounds": len(self.decode),
        }
        for name in ("prefill", "decode", "batch"):
            pairs: tuple[tuple[float, float], ...] = getattr(self, name)
            if pairs:
                found[name] = {
                    what: dataclasses.asdict(spread) for what, spread in spreads(pairs).items()
                }
        return found


def spreads(pairs: tuple[tuple[float, float], ...]) -> dict[str, Spread]:
    """Spreads of Edge's figures, of llama.cpp's, and of their ratios in the same round."""
    return {
        "edge": Spread.of([ours for ours, _theirs in pairs]),
        "llama.cpp": Spread.of([theirs for _ours, theirs in pairs]),
        "ratio": Spread.of([ours / theirs for ours, theirs in pairs]),
    }


def compare(
    model: TimedModel,
    llama: Llama,
    *,
    prompt_tokens: int,
    new_tokens: int,
    requests: int,
    rounds: int,
) -> Comparison:
    """Each round runs both once, end tokens ignored, after a warm-up with a shorter prompt.

    Raises RequestError if the file does not hold a model of the same vocabulary.
    """
    if llama.vocab_size != model.vocab_size:
        raise RequestError(
            f"the GGUF file has a vocabulary of {llama.vocab_size} tokens and {model.name} one of "
            f"{model.vocab_size}",
            remedy="give a file of the same model",
        )
    generator = np.random.default_rng(1)

    def measured(prompt_tokens: int) -> dict[str, tuple[float, float]]:
        """(Edge, llama.cpp) in tokens per second."""
        # A new prompt each time: an old one would be found in the prefix cache.
        prompt = generator.integers(model.vocab_size, size=prompt_tokens).tolist()
        ours = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
        theirs = llama.run(prompt_tokens, new_tokens)
        found = {
            "prefill": (
                prompt_tokens / ours.statistics["first_token_s"],
                prompt_tokens / theirs["prefill_s"],
            ),
            "decode": (ours.tokens_per_s, (new_tokens - 1) / theirs["decode_s"]),
        }
        if requests > 1:
            together = batch_tokens_per_s(
                model, requests=requests, prompt_tokens=prompt_tokens, new_tokens=new_tokens
            )
            other = llama.run(prompt_tokens, new_tokens, requests)
            found["batch"] = (together, requests * (new_tokens - 1) / other["decode_s"])
        return found

    measured(min(prompt_tokens, _WARM_UP_TOKENS))
    found = [measured(prompt_tokens) for _ in range(rounds)]
    prefill, decode, batch = (
        tuple(each[name] for each in found if name in each)
        for name in ("prefill", "decode", "batch")
    )
    return Comparison(
        version=llama.version,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        requests=requests,
        prefill=prefill,
        decode=decode,
        batch=batch,
    )
