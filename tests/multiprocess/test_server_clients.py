"""`edge serve`: the clients that people have talk with it unchanged; who errs is told so."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from edge.demos.bundled import MODEL
from tests.support import known_rates
from tests.support.processes import PATIENCE_S, edge_process, poll_until
from tests.support.processes import edge as run_edge

if TYPE_CHECKING:  # each takes seconds, which only these tests are to pay
    import openai

KEY = "a-key-of-the-tests-0123456789"
OTHER_KEY = "another-key-of-somebody"
QUESTION = "Where does the cat live?"
ANSWER = "In the barn."
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
MOST_FOR_NOBODY = 200
"""Tokens of an answer of 450 that somebody gives up: one that is being computed when the peers hear
of it (`test_common_beginnings.py` counts exactly), those that waited 40 ms to be told, and those
before on a busy machine."""
MOST_TRIES = 20
"""On a busy machine the answer can be over before its client has gone."""
USUAL_URL = "http://127.0.0.1:11435"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{OTHER_KEY}\n{KEY}\n")
    arguments = ("--local", "2", "--parallel", "tensor", "--dtype", "float32", "--port", "0")
    with edge_process(
        *("serve", MODEL, *arguments, "--json", "--api-key-file", keys, "--max-answers", "6"),
        *("--alias", "claude-of-ours", "--cors-origin", "https://mine.example"),
        program=known_rates.__name__,
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["model"] == MODEL.name
        yield ready["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def request(
    url: str, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    """Status, headers by lower-case name, and the JSON or text that came."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)) as to:
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        to.request(method, path, sent, {"authorization": f"Bearer {KEY}", **headers})
        answer = to.getresponse()
        text = answer.read().decode()
        told = {name.lower(): value for name, value in answer.getheaders()}
        is_json = told["content-type"] == "application/json"
        return answer.status, told, json.loads(text) if is_json else text


def chat(url: str, **body: object) -> tuple[int, dict[str, str], Any]:
    return request(
        url, "POST", "/v1/chat/completions", {"model": "default", "messages": ASKED, **body}
    )


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_chat(client: openai.OpenAI) -> None:
    model, alias = client.models.list().data
    assert client.models.retrieve(alias.id).id == alias.id == "claude-of-ours"
    assert client.models.retrieve(model.id).id == model.id == MODEL.name
    reply = client.chat.completions.create(
        model=model.id,
        messages=ASKED,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        n=2,
        seed=3,
        service_tier="flex",
    )
    assert [choice.message.content for choice in reply.choices] == [ANSWER] * 2
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 2
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2 * len(reply.choices[0].logprobs.content)  # type: ignore[union-attr,arg-type]
    for token in reply.choices[0].logprobs.content:  # type: ignore[union-attr]
        assert len(token.top_logprobs) == 2
        assert token.logprob == max(each.logprob for each in token.top_logprobs) <= 0
    cut = client.chat.completions.create(model=model.id, messages=ASKED, max_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    until = client.chat.completions.create(model=model.id, messages=ASKED, stop=[" barn"])
    assert until.choices[0].message.content == "In the"
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


def test_openai_chat_in_chunks(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="default",
        messages=ASKED,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_openai_completions(client: openai.OpenAI) -> None:
    prompt = "<|user|>"
    whole = client.completions.create(model="default", prompt=prompt, max_tokens=8, temperature=0)
    parts = client.completions.create(
        model="default", prompt=prompt, max_tokens=8, temperature=0, stream=True, logprobs=1
    )
    chunks = [part.choices[0] for part in parts]
    text = whole.choices[0].text
    assert "".join(chunk.text for chunk in chunks) == text
    told = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    offsets = [offset for each in told for offset in each.text_offset or ()]
    tokens = [token for each in told for token in each.tokens or ()]
    assert len(offsets) == len(tokens) == 8
    assert all(text.startswith(token, at) for token, at in zip(tokens, offsets, strict=True))
    both = client.completions.create(
        model="default", prompt=[prompt, "The cat"], max_tokens=8, temperature=0, n=2, seed=1
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices[:2]] == [text] * 2
    assert both.choices[2].text == both.choices[3].text != text
    kept = client.completions.create(
        model="default",
        prompt=prompt,
        max_tokens=100,
        extra_body={
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
        },
    )
    assert kept.choices[0].text == "7"


def test_openai_responses(client: openai.OpenAI, url: str) -> None:
    import openai
    from openai.types.responses import Response

    whole = client.responses.create(
        model="default",
        instructions="Answer.",
        input=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        ],
        max_output_tokens=3,
    )
    assert (whole.status, whole.object) == ("incomplete", "response")
    assert whole.incomplete_details is not None
    assert whole.usage is not None
    assert whole.usage.output_tokens == 3
    asked = {
        "instructions": "Answer.",
        "metadata": {"run": "7"},
        "tools": [{"type": "web_search"}],
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "store": True,
    }
    _, _, told = request(
        url, "POST", "/v1/responses", {**asked, "model": "default", "input": QUESTION}
    )
    checked = Response.model_validate(told, strict=True)
    assert (checked.instructions, checked.metadata) == ("Answer.", {"run": "7"})
    assert (len(checked.tools), told["store"]) == (1, False)
    logprobs = told["output"][0]["content"][0]["logprobs"]
    assert "".join(each["token"] for each in logprobs[:5]).startswith(ANSWER[:2])
    assert [len(each["top_logprobs"]) for each in logprobs] == [2] * len(logprobs)
    assert len(logprobs) == told["usage"]["output_tokens"]
    with client.responses.stream(model="default", input=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert (final.output_text, final.status) == (ANSWER, "completed")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.BadRequestError, match="whole conversation"):
        client.responses.create(model="default", input="x", previous_response_id="resp_1")


def test_what_the_page_shows(url: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "serving.md").read_text()
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", page, re.M | re.S)
    shown = [
        (language, each)
        for language, code in blocks
        if USUAL_URL in code and not code.startswith("export")
        for each in (re.split(r"^(?=curl)", code, flags=re.M)[1:] if language == "bash" else [code])
    ]
    question = "Why is the sky blue?"
    for language, code in shown:
        here = (
            code.replace(USUAL_URL, url).replace(question, QUESTION).replace('"none"', f'"{KEY}"')
        )
        if language == "bash":
            if shutil.which("curl") is None:
                continue  # this machine has none
            here = here.replace(" -d ", f' -H "x-api-key: {KEY}" -d ')
        run = ["sh", "-c", here] if language == "bash" else [sys.executable, "-c", here]
        done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        told = "128" if "embeddings" in code else ANSWER
        parts = re.findall(r'"(?:delta|text|content)": ?"([^"]*)"', done.stdout)
        assert told in done.stdout or told in "".join(parts), code
    languages = [language for language, _code in shown]
    assert languages == ["bash", "python", *["bash"] * 3, "python"]


def test_programs_find_the_server_by_what_the_page_says(url: str) -> None:
    """By their environment alone; Codex by its file."""
    import anthropic
    import openai

    text = (Path(__file__).parents[2] / "docs" / "guide" / "serving.md").read_text()
    told = dict(re.findall(r"^export ([A-Z_]+)=(\S+)$", text, re.M))
    told |= {name: KEY for name, value in told.items() if value == "none"}
    told = {name: value.replace(USUAL_URL, url) for name, value in told.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        with openai.OpenAI(max_retries=0) as client:
            reply = client.chat.completions.create(model="default", messages=ASKED, temperature=0)
            assert reply.choices[0].message.content == ANSWER
        with anthropic.Anthropic(max_retries=0) as other:
            for name in ("MODEL", *(f"DEFAULT_{each}_MODEL" for each in ("OPUS", "HAIKU"))):
                message = other.messages.create(
                    model=told[f"ANTHROPIC_{name}"], max_tokens=2, messages=ASKED
                )
                assert message.usage.output_tokens == 2
    assert request(told["OLLAMA_HOST"], "GET", "/api/version")[0] == 200
    (config,) = re.findall(r"^```toml\n(.*?)^```$", text, re.M | re.S)
    settings = tomllib.loads(config)
    provider = settings["model_providers"][settings["model_provider"]]
    base = provider["base_url"].replace(USUAL_URL, url)
    path = f"{urlsplit(base).path}/{provider['wire_api']}"
    asked = {"model": settings["model"], "input": QUESTION, "stream": True}
    assert "response.completed" in request(url, "POST", path, asked)[2]


def test_anthropic(url: str) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        model, alias = client.models.list()
        assert (model.type, alias.display_name) == ("model", "claude-of-ours")
        same = client.models.retrieve(model.id)
        assert (same.id, same.created_at) == (MODEL.name, model.created_at)
        assert model.max_input_tokens
        with pytest.raises(anthropic.NotFoundError, match="is not here") as missing:
            client.models.retrieve("another")
        body = missing.value.body
        assert isinstance(body, dict)
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        counted = client.messages.count_tokens(model="default", messages=ASKED)
        whole = client.messages.create(model="default", max_tokens=40, messages=ASKED)
        assert [(block.type, block.text) for block in whole.content] == [("text", ANSWER)]  # type: ignore[union-attr]
        assert (whole.stop_reason, whole.usage.input_tokens) == ("end_turn", counted.input_tokens)
        with client.messages.stream(model="default", max_tokens=3, messages=ASKED) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert ANSWER.startswith(text)
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 3)
        until = client.messages.create(
            model="default", max_tokens=20, messages=ASKED, stop_sequences=["x", " barn"]
        )
        assert (until.stop_reason, until.stop_sequence) == ("stop_sequence", " barn")
        with pytest.raises(anthropic.NotFoundError, match="is not here"):
            client.messages.create(model="another", max_tokens=1, messages=ASKED)
        with pytest.raises(anthropic.BadRequestError, match="role"):
            client.messages.create(
                model="default",
                max_tokens=1,
                messages=[{"role": "robot", "content": "x"}],  # type: ignore[list-item,misc]
            )


def test_ollama(url: str) -> None:
    model, alias = request(url, "GET", "/api/tags")[2]["models"]
    assert (model["name"], alias["name"]) == (MODEL.name, "claude-of-ours")
    assert model["digest"] != alias["digest"]
    assert model["size"] > 0
    assert model["details"]["quantization_level"] == "float32"
    (running,) = request(url, "GET", "/api/ps")[2]["models"]
    assert running["digest"] == model["digest"]
    _, _, shown = request(url, "POST", "/api/show", {"model": alias["name"]})
    assert shown["capabilities"] == ["completion", "embedding"]
    assert shown["model_info"]["edge.context_length"] == running["context_length"] > 0
    assert request(url, "POST", "/api/show", {"model": "x"})[0] == 404
    assert request(url, "POST", "/api/show", {})[0] == 400
    body: dict[str, Any]
    body = {"model": "default", "messages": ASKED, "options": {"temperature": 0}}
    _, _, lines = request(url, "POST", "/api/chat", body)
    told = [json.loads(line) for line in lines.splitlines()]
    assert "".join(line["message"]["content"] for line in told) == ANSWER
    assert [line["done"] for line in told] == [*[False] * (len(told) - 1), True]
    _, _, whole = request(url, "POST", "/api/chat", {**body, "stream": False})
    assert whole["message"]["content"] == ANSWER
    body = {"model": "default", "prompt": QUESTION, "stream": False, "options": {"temperature": 0}}
    assert request(url, "POST", "/api/generate", body)[2]["response"] == ANSWER
    for stays, why in ((None, "load"), (0, "unload"), (None, "load")):
        body = {"model": f"{MODEL.name}:latest", "messages": [], "keep_alive": stays}
        _, _, told = request(url, "POST", "/api/chat", body)
        assert (told["done"], told["done_reason"]) == (True, why)


def test_embeddings(client: openai.OpenAI, url: str) -> None:
    import openai

    texts = [QUESTION, ANSWER]
    reply = client.embeddings.create(model="default", input=texts)  # as base64, unasked
    vectors = np.array([each.embedding for each in reply.data])
    assert [each.index for each in reply.data] == [0, 1]
    assert (reply.model, reply.usage.total_tokens) == (MODEL.name, reply.usage.prompt_tokens)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    whole = client.embeddings.create(model="default", input=ANSWER, encoding_format="float")
    np.testing.assert_allclose(whole.data[0].embedding, vectors[1], atol=1e-5)
    short = client.embeddings.create(model="default", input=[[5, 9], [7]], dimensions=4)
    assert [len(each.embedding) for each in short.data] == [4, 4]
    assert short.usage.prompt_tokens == 3
    np.testing.assert_allclose(np.linalg.norm(short.data[0].embedding), 1, atol=1e-5)
    ids = client.embeddings.create(model="default", input=[5, 9]).data[0].embedding
    cut = np.array(ids[:4]) / np.linalg.norm(ids[:4])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-5)
    with pytest.raises(openai.NotFoundError, match="is not here"):
        client.embeddings.create(model="another", input="x")
    wrong: dict[str, Any]
    for wrong, what in (
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[1], -1]}, "input"),
        ({"input": ["x", ""]}, r"input\[1\]"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [10**9]}, "not one of the model's"),
        ({"input": [1] * 5000}, "context length is"),
        ({"input": ["x"] * 2049}, "2048 are the most"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 10**6}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ):
        with pytest.raises(openai.BadRequestError, match=what):
            client.embeddings.create(model="default", **wrong)
    body = {"model": "default", "input": texts}
    _, _, told = request(url, "POST", "/api/embed", body)
    np.testing.assert_allclose(told["embeddings"], vectors, atol=1e-5)
    assert told["prompt_eval_count"] == reply.usage.prompt_tokens
    long = {"model": "default", "input": "word " * 5000}
    assert request(url, "POST", "/api/embed", long)[0] == 200
    assert request(url, "POST", "/api/embed", {**long, "truncate": False})[0] == 400
    body = {"model": "default", "prompt": ANSWER}
    told = request(url, "POST", "/api/embeddings", body)[2]
    np.testing.assert_allclose(told["embedding"], vectors[1], atol=1e-5)


def test_what_openai_clients_raise(client: openai.OpenAI, url: str) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=ASKED)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "word " * 9000}]
        )
    assert long.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "[0].content[0]"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [7]}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 1 << 70}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"x": 1}}, "logit_bias has a name that"),
        ({"logit_bias": {"99999999": 1}}, "token"),
        ({"frequency_penalty": 9}, "frequency_penalty"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 7}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "takes no tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "regex"}}, "response_format.type"),
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
    ],
)
def test_what_is_wrong_in_a_body_is_named(url: str, body: dict[str, Any], place: str) -> None:
    status, _, told = chat(url, **body)
    assert status == 400, told
    assert place in told["error"]["message"]
    assert told["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b"7" * 5000),
        b'{"model": "default", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "default", "messages": [], "logit_bias": {"\\ud800": 1}}',
        b'{"model": "default", "temperature": 1' + b"0" * 400 + b"}",
        b'{"model": "default", "metadata": {"x": 1e999}}',
    ],
)
def test_what_is_no_question_is_refused(url: str, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
        status, _, told = request(url, "POST", path, body)
        if told.get("done_reason") == "load":  # by no message Ollama's clients load a model
            assert path == "/api/chat"
            continue
        assert status == 400, told
        assert told["error"]


def test_a_reply_repeats_what_no_utf8_has(url: str) -> None:
    form = {"type": "json_schema", "name": "\ud800", "schema": {"type": "object"}}
    body = {"model": "default", "input": "x", "max_output_tokens": 1, "text": {"format": form}}
    status, _, told = request(url, "POST", "/v1/responses", json.dumps(body).encode())
    assert status in {200, 400}, told


def test_who_may_come_in(url: str) -> None:
    assert request(url, "GET", "/health", authorization="")[0] == 200
    for key in ("", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", "Bearer \xff"):
        status, headers, _ = request(url, "GET", "/v1/models", authorization=key)
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
    assert request(url, "GET", "/v1/models", authorization="", **{"x-api-key": KEY})[0] == 200
    assert request(url, "GET", "/v1/models", host="evil.example")[0] == 403
    assert request(url, "GET", "/v1/models", host="localhost:1")[0] == 200
    assert request(url, "GET", "/nothing")[0] == 404
    assert request(url, "GET", "/v1/messages")[0] == 405
    assert request(url, "POST", "/v1/messages", b" " * (33 << 20))[0] == 413
    status, headers, _ = request(url, "GET", "/v1/models", origin="https://evil.example")
    assert status == 200
    assert "access-control-allow-origin" not in headers
    _, headers, _ = request(url, "GET", "/v1/models", origin="https://mine.example")
    assert headers["access-control-allow-origin"] == "https://mine.example"
    assert headers["x-request-id"].startswith("req_")


def figure(url: str, name: str) -> float:
    """One of /metrics, its labels included in the name."""
    found = re.search(
        rf"^{re.escape(name)} (\S+)$", request(url, "GET", "/metrics")[2], re.MULTILINE
    )
    return float(found.group(1)) if found else 0.0


def test_who_goes_away_ends_the_answer(url: str) -> None:
    """One that streams, and one that waits for the whole: little more is computed for them, and
    then there is room for others."""
    computed = f'edge_computed_tokens_total{{model="{MODEL.name}",of="answers"}}'

    def for_nobody() -> float:
        return figure(url, computed) - figure(url, "edge_generated_tokens_total")

    def given_up() -> float:
        return figure(url, 'edge_answers_total{end="given up"}')

    parts = urlsplit(url)
    body = {"model": "default", "prompt": "x", "max_tokens": 450, "logit_bias": {"0": -100}}

    def leave(stream: bool) -> None:
        to = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=PATIENCE_S)
        with closing(to):
            sent = json.dumps({**body, "stream": stream}).encode()
            to.request("POST", "/v1/completions", sent, {"authorization": f"Bearer {KEY}"})
            if stream:
                to.getresponse().read(20)
            else:
                poll_until(lambda: figure(url, "edge_answers_under_way"))
        poll_until(lambda: figure(url, "edge_answers_under_way") == 0)

    for stream in (True, False):
        before, unheard = given_up(), for_nobody()
        tries = 0
        while given_up() == before and tries < MOST_TRIES:
            leave(stream)
            tries += 1
        assert given_up() == before + 1
        # An answer is made after it, so the steps of the other one are over.
        assert chat(url, max_tokens=2)[0] == 200
        assert for_nobody() - unheard <= tries + MOST_FOR_NOBODY


def test_a_key_finds_what_it_has_left_and_no_other_does(url: str) -> None:
    said = [{"role": "user", "content": " ".join(["the cat sat on a mat and saw dogs run"] * 6)}]

    def found(key: str, **body: object) -> int:
        sent = {"model": "default", "messages": said, "max_tokens": 2, **body}
        keyed = {"authorization": f"Bearer {key}"}
        status, _, told = request(url, "POST", "/v1/chat/completions", sent, **keyed)
        assert status == 200, told
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert found(KEY) < 16
    assert found(KEY) > 16
    assert found(OTHER_KEY) < 16
    assert found(KEY, cache_salt="of somebody") < 16
    assert found(OTHER_KEY) > 16


def test_too_many_at_once_are_told_to_come_again(url: str) -> None:
    status, headers, told = chat(url, n=7)
    assert (status, headers["retry-after"]) == (429, "2")
    assert told["error"]["code"] == "rate_limit_exceeded"
    assert chat(url, n=6)[0] == 200


def test_the_cluster_is_described_without_secrets(url: str) -> None:
    _, _, view = request(url, "GET", "/api/cluster")
    assert {device["name"] for device in view["devices"]} == {"local-1", "local-2"}
    assert sum(device["memory_bytes"] > 0 for device in view["devices"]) == 2
    assert KEY not in json.dumps(view)
    assert chat(url, max_tokens=2)[0] == 200
    _, _, after = request(url, "GET", "/api/cluster")
    assert after["new_tokens"] == view["new_tokens"] + 2
    assert after["replies"] == []
    assert after["loads"] == view["loads"] == 0


def test_the_page_for_terminals(url: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    shown = run_edge("top", url, "--once", "--api-key-file", keys)
    assert (shown.code, shown.err) == (0, "")
    assert all(each in shown.out for each in ("local-1", "local-2", "tokens per second now"))
    told = json.loads(run_edge("top", url, "--once", "--json", "--api-key-file", keys).out)
    assert told["model"]["name"] == MODEL.name
    named = run_edge("top", url, "--once", "--json", "--model", "default", "--api-key-file", keys)
    assert json.loads(named.out)["model"] == told["model"]
    wrong = run_edge("top", url, "--once", "--model", "other", "--api-key-file", keys)
    assert "'other' is not here" in wrong.sentence()
    assert "--api-key-file" in run_edge("top", url, "--once").sentence()
    assert "no edge serve at" in run_edge("top", f"{url}/page/main.js?", "--once").sentence()
    assert "is not the address of a server" in run_edge("top", "attic", "--once").sentence()


def test_the_page_needs_no_key_and_loads_nothing_else(url: str) -> None:
    status, headers, page = request(url, "GET", "/", authorization="")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    for path in re.findall(r'(?:src|href)="(page/[^"]+)"', page):
        assert request(url, "GET", f"/{path}", authorization="")[0] == 200
    assert request(url, "GET", "/api/cluster", authorization="")[0] == 401


def test_another_placement_is_planned(url: str) -> None:
    _, _, known = request(url, "GET", "/api/plan/models")
    assert known == {"models": [MODEL.name]}
    _, _, view = request(url, "GET", "/api/plan?change=without%20local-2")
    assert [device["name"] for device in view["devices"]] == ["local-1"]
    for query, status, why in (
        ("model=/etc", 404, "is not on this device"),
        ("change=hurry", 400, "is not a known change"),
        ("change=without%20local-1&change=-1TiB%20on%20local-2", 422, "local-2"),
        ("&".join(["change=x"] * 33), 400, "at most 32 changes"),
    ):
        found, _, told = request(url, "GET", f"/api/plan?{query}")
        assert (found, why in json.dumps(told)) == (status, True), told


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--host", "0.0.0.0"), "give --api-key-file"),
        (("--port", "{taken}"), "choose another --port"),
        (("--api-key-file", "{short}"), "16 characters or more"),
        (("--alias", "default"), "is the name of a model already; give each alias"),
        (("--cors-origin", "mine.example/page"), "without a path"),
    ],
)
def test_a_server_that_cannot_be_says_why(
    url: str, tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    (tmp_path / "short").write_text("abc\n")
    filled = {"taken": urlsplit(url).port, "short": tmp_path / "short"}
    with edge_process(
        "serve", MODEL, "--local", "1", *(each.format(**filled) for each in arguments)
    ) as process:
        _out, told = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert why in told
