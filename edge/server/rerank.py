"""/v1/rerank: documents by their relevance to a query, with a generative reranker.

The model is asked whether a document meets a query, in the words that Qwen3-Reranker was trained
on. The relevance is the probability of "yes" against "no" as the next token.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge.answers.terms import GenerationOptions
from edge.api.async_model import AsyncModel
from edge.concurrency.blocking import run_blocking
from edge.scheduling.fairness import Priority
from edge.server.bodies import MOST_LOGPROBS, Rerank
from edge.server.efforts import switched
from edge.server.fields import Fields
from edge.server.keys import Caller
from edge.server.priorities import priority_of
from edge.server.refusals import Refusal
from edge.text.tokenizer import Tokenizer

Json = dict[str, Any]

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_AT_ONCE = 16
"""Documents of one request under way together."""
_FORCED = 100.0
"""Logit bias of a token that must be chosen, so that its own logprob is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest:
    """A query and the documents to order."""

    query: str
    documents: Sequence[str]
    instruction: str = _INSTRUCTION
    most: int | None = None
    """Most results; None: one for each document."""
    tells_documents: bool = False
    priority: Priority = "normal"
    cache_salt: str = ""


def rerank_asked(body: Fields) -> RerankRequest:
    """`documents`: texts, or objects with a text."""
    asked = body.shaped(Rerank)
    texts = []
    for place, document in enumerate(asked.documents):
        text = document.get("text") if isinstance(document, Mapping) else document
        if not isinstance(text, str) or not text:
            raise body.refuse(f"documents[{place}]", "must be a text, or an object with a text")
        texts.append(text)
    return RerankRequest(
        query=asked.query,
        documents=texts,
        instruction=asked.instruction or _INSTRUCTION,
        most=asked.top_n,
        tells_documents=asked.return_documents is True,
        priority=priority_of(asked.priority, asked.service_tier),
        cache_salt=asked.cache_salt or "",
    )


def rerank_reply(asked: RerankRequest, scores: Sequence[float], *, model: str, tokens: int) -> Json:
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: asked.most]
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": [
            {
                "index": place,
                "relevance_score": scores[place],
                **({"document": {"text": asked.documents[place]}} if asked.tells_documents else {}),
            }
            for place in order
        ],
    }


async def relevance(
    model: AsyncModel, asked: RerankRequest, caller: Caller
) -> tuple[list[float], int]:
    """The relevance of each document, 0 to 1, and the number of tokens of all prompts.

    Raises Refusal for a model that cannot be asked.
    """
    words = _words(model)
    salt = "\0".join(filter(None, (caller.cache_salt, asked.cache_salt)))
    options = GenerationOptions(
        max_new_tokens=1,
        temperature=0.0,
        logprobs=MOST_LOGPROBS,
        priority=caller.priority(asked.priority),
    )
    limit = asyncio.Semaphore(_AT_ONCE)

    async def logprobs(prompt: Sequence[int], options: GenerationOptions) -> dict[int, float]:
        stream = model.stream(prompt, options, client=caller.name, cache_salt=salt)
        async with stream:
            async for token in stream:
                top = {each.token_id: each.logprob for each in token.top_logprobs}
                assert token.logprob is not None, "logprobs were asked for"
                return {**top, token.token_id: token.logprob}
        raise AssertionError("an answer has a token")

    async def score(document: str) -> tuple[float, int]:
        async with limit:
            prompt = await run_blocking(lambda: _prompt(model.tokenizer, asked, document))
            found = await logprobs(prompt, options)
            for word in words:
                if word not in found:
                    found |= await logprobs(prompt, replace(options, logit_bias={word: _FORCED}))
        # A token that even a bias does not bring to the top is less likely than all that are told.
        yes, no = (found.get(word, min(found.values())) for word in words)
        return 1 / (1 + math.exp(min(no - yes, 700.0))), len(prompt)

    tasks = [asyncio.ensure_future(score(each)) for each in asked.documents]
    try:
        found = [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [relevance for relevance, _tokens in found], sum(tokens for _score, tokens in found)


def _words(model: AsyncModel) -> tuple[int, int]:
    """The tokens of "yes" and "no"."""
    if not model.can_chat:
        raise Refusal(
            400,
            "reranking needs a generative model with a chat template, such as Qwen3-Reranker; "
            "cross-encoders are not read",
            param="model",
        )
    for before in ("", "▁"):
        yes, no = (model.tokenizer.token_id(before + word) for word in ("yes", "no"))
        if yes is not None and no is not None:
            return yes, no
    raise Refusal(400, "the model has no tokens for yes and no, so it ranks nothing", param="model")


def _prompt(tokenizer: Tokenizer, asked: RerankRequest, document: str) -> list[int]:
    text = f"<Instruct>: {asked.instruction}\n<Query>: {asked.query}\n<Document>: {document}"
    messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": text}]
    return tokenizer.encode_chat(messages, variables=switched(False))
