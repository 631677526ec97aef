"""Embeddings in OpenAI's and Ollama's APIs: reads requests and writes replies."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.scheduling.fairness import Priority
from edge.server.bodies import MOST_INPUTS, Embeddings, OllamaEmbed, OllamaEmbeddings
from edge.server.fields import Fields
from edge.server.priorities import priority_of

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Texts or token ids to embed."""

    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None = None
    as_base64: bool = False
    cuts: bool = False
    """Whether inputs longer than the context are cut."""
    priority: Priority = "normal"


def openai_asked(body: Fields) -> EmbeddingRequest:
    """Reads the fields of /v1/embeddings. `input`: a text, token ids, or a list of either."""
    asked = body.shaped(Embeddings)
    return EmbeddingRequest(
        inputs=_inputs(body, "input"),
        dimensions=asked.dimensions,
        as_base64=asked.encoding_format == "base64",
        priority=priority_of(asked.priority, asked.service_tier),
    )


def ollama_asked(body: Fields) -> EmbeddingRequest:
    """Reads the fields of /api/embed. Long texts are cut, unless `truncate` is false."""
    asked = body.shaped(OllamaEmbed)
    return EmbeddingRequest(
        inputs=_inputs(body, "input"),
        dimensions=asked.dimensions,
        cuts=asked.truncate is not False,
        priority=priority_of(asked.priority),
    )


def ollama_prompt(body: Fields) -> EmbeddingRequest:
    """Reads the fields of /api/embeddings, the older interface, which takes one text."""
    asked = body.shaped(OllamaEmbeddings)
    return EmbeddingRequest(inputs=(asked.prompt,), cuts=True, priority=priority_of(asked.priority))


def openai_reply(
    asked: EmbeddingRequest, vectors: NDArray[np.float32], *, model: str, tokens: int
) -> Json:
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _in_base64(vector) if asked.as_base64 else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def ollama_reply(vectors: NDArray[np.float32], *, model: str, tokens: int, began_s: float) -> Json:
    return {
        "model": model,
        "embeddings": vectors.tolist(),
        "total_duration": round(1e9 * (time.perf_counter() - began_s)),
        "load_duration": 0,
        "prompt_eval_count": tokens,
    }


def _in_base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _inputs(body: Fields, name: str) -> Sequence[str | Sequence[int]]:
    value = body.raw(name)
    if isinstance(value, str) or (isinstance(value, list) and value and _are_ids(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise body.refuse(name, "must be a text, token ids, or a list of either")
    if len(value) > MOST_INPUTS:
        raise body.refuse(name, f"has {len(value)} texts, and {MOST_INPUTS} are the most")
    for index, each in enumerate(value):
        if not each or not (isinstance(each, str) or (isinstance(each, list) and _are_ids(each))):
            raise body.refuse(f"{name}[{index}]", "must be a text or token ids, and not be empty")
    return value


def _are_ids(values: list[Any]) -> bool:
    return all(type(each) is int and each >= 0 for each in values)
