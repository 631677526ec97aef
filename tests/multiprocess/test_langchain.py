"""LangChain against `edge serve`: answers, streams, forms, tools and vectors.

It is imported where it is used: that takes 2 s of a processor, of all who only look for tests.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.model_folders import calling_model
from tests.support.processes import PATIENCE_S, edge_process
from tests.support.slow_cases import shown_in_parts

pytestmark = [
    # Each road of the server that it takes.
    shown_in_parts(
        "multiprocess/test_server_clients.py", "multiprocess/test_structured_answers.py"
    ),
    # It leaves the connections of its clients to the end of the process.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

QUESTION = "Where does the cat live?"
ANSWER = "In the barn."
FORM = {
    "title": "place",
    "description": "Where it is",
    "type": "object",
    "properties": {"where": {"enum": ["barn", "roof"]}},
    "required": ["where"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with the bundled model, and a template that takes tools."""
    folder = calling_model(tmp_path_factory.mktemp("caller"))
    arguments = ("--local", "1", "--dtype", "float32", "--port", "0", "--json")
    with edge_process("serve", folder, *arguments) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def chat(kind: str, url: str) -> Any:
    import langchain_ollama
    import langchain_openai

    if kind == "ollama":
        return langchain_ollama.ChatOllama(model="default", base_url=url, temperature=0)
    return langchain_openai.ChatOpenAI(
        model="default",
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        use_responses_api=kind == "responses",
        stream_usage=True,
    )


@pytest.mark.parametrize("kind", ["openai", "responses", "ollama"])
def test_it_is_answered(kind: str, url: str) -> None:
    model = chat(kind, url)
    whole = model.invoke([("system", "Be kind."), ("human", QUESTION)])
    assert whole.text == ANSWER
    assert whole.usage_metadata["output_tokens"] > 0
    parts = list(model.stream(QUESTION))
    assert "".join(part.text for part in parts) == ANSWER
    assert (
        sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata)
        == (whole.usage_metadata["output_tokens"])
    )
    assert [each.text for each in model.batch([QUESTION, QUESTION])] == [ANSWER, ANSWER]
    form = model.with_structured_output(FORM, method="json_schema")
    assert form.invoke(QUESTION)["where"] in {"barn", "roof"}


@pytest.mark.parametrize("kind", ["openai", "responses"])
def test_its_tools_are_called(kind: str, url: str) -> None:
    """And what they bring goes back."""
    tools = chat(kind, url).bind_tools([FORM], tool_choice="place")
    called = tools.invoke(QUESTION)
    (call,) = called.tool_calls
    assert (call["name"], list(call["args"])) == ("place", ["where"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Yes."}
    answer = chat(kind, url).invoke([("human", QUESTION), called, result, ("human", QUESTION)])
    assert answer.text == ANSWER


def test_its_vectors(url: str) -> None:
    """Cut by nobody: LangChain counts tokens as OpenAI's models do, and fetches what for."""
    import langchain_ollama
    import langchain_openai

    openai = langchain_openai.OpenAIEmbeddings(
        model="default", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    ollama = langchain_ollama.OllamaEmbeddings(model="default", base_url=url)
    one = openai.embed_documents([QUESTION, ANSWER])
    other = ollama.embed_documents([QUESTION, ANSWER])
    assert len(one) == len(other) == 2
    assert one[0] == pytest.approx(other[0], abs=1e-5)
