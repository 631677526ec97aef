"""/v1/rerank orders documents by the probability of yes against no, as transformers computes it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.scripted_models import Visit

YES, NO = 95, 96
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
USUAL = "Given a web search query, retrieve relevant passages that answer the query"
QUERY = "Where was Tom?"
DOCUMENTS = ["Cats sleep.", "Tom was in the barn.", "x", "The roof is red; nobody was there."]


@pytest.fixture(scope="module")
def folder(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny model whose tokenizer has yes and no, with the template of Qwen 3."""
    source = tiny_checkpoint("llama").path
    made = Path(shutil.copytree(source, tmp_path_factory.mktemp("reranker") / "reranker"))
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] = [
        {"id": id, "content": word, **rules} for id, word in ((YES, "yes"), (NO, "no"))
    ]
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    (made / "chat_template.jinja").write_text(template)
    return made


def expected(folder: Path, query: str, document: str, instruction: str) -> float:
    import torch
    import transformers

    prompt = (
        f"<system>{SYSTEM}<user><Instruct>: {instruction}\n<Query>: {query}\n"
        f"<Document>: {document}<assistant><think></think>"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids).logits[0, -1].double().numpy()
    return float(1 / (1 + np.exp(logits[NO] - logits[YES])))


CHOSEN: dict[str, Any] = {
    "documents": [{"text": each} for each in DOCUMENTS],
    "top_n": 2,
    "return_documents": True,
    "instruction": "Find cats",
}


def test_documents_are_ordered_by_their_relevance(folder: Path) -> None:
    async def main() -> None:
        async with (
            await edge.AsyncCluster.local(1, threads=1) as cluster,
            await cluster.load(folder, dtype="float32", progress=False) as model,
        ):
            check(folder, USUAL, await asked(model, {"query": QUERY, "documents": DOCUMENTS}))
            told = await asked(model, {"query": QUERY, **CHOSEN})
            order = check(folder, "Find cats", told)
            assert told["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
            assert len(told["results"]) == 2

    asyncio.run(main())


def check(folder: Path, instruction: str, told: Any) -> list[int]:
    """The right order."""
    scores = [expected(folder, QUERY, each, instruction) for each in DOCUMENTS]
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    found = told["results"]
    assert [each["index"] for each in found] == order[: len(found)]
    relevance = [each["relevance_score"] for each in found]
    np.testing.assert_allclose(relevance, [scores[each["index"]] for each in found], rtol=1e-4)
    assert told["usage"]["total_tokens"] > 4 * len(SYSTEM)
    return order


async def asked(model: edge.AsyncModel, body: dict[str, Any]) -> Any:
    visit = Visit(cast(Any, model), "/v1/rerank", body)
    await visit.running
    assert visit.status == 200, visit.text
    return json.loads(visit.text)
