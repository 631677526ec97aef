"""`edge serve` of two models on a device that has room for one of them."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from edge.demos.bundled import MODEL
from tests.multiprocess.test_server_clients import ANSWER, ASKED, KEY, request
from tests.support.plans import bundled_plan
from tests.support.processes import PATIENCE_S, edge_process, poll_until

ROOM = "12MiB"
"""One takes 7.1 MiB: its weights, and keys and values of four requests."""


def running(url: str) -> list[str]:
    return [each["name"] for each in request(url, "GET", "/api/ps")[2]["models"]]


def test_each_is_loaded_when_it_is_asked_for_and_another_makes_room(tmp_path: Path) -> None:
    import openai

    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(bundled_plan("solo", devices=["local-1"]).to_json()))
    room = ("--local", "1", "--model-memory", ROOM, "--port", "0", "--keep-alive", "3600")
    arguments = (*room, "--plan-of", f"other={plan}")
    with edge_process("serve", MODEL, f"other={MODEL}", *arguments, "--json") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        url = ready["url"]
        assert ready["models"] == [MODEL.name, "other"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            assert [each.id for each in client.models.list().data] == ready["models"]
            assert client.models.retrieve("other").id == "other"
            assert running(url) == [MODEL.name]
            for name in ("other", MODEL.name):
                told = client.chat.completions.create(model=name, messages=ASKED, temperature=0)
                assert (told.model, told.choices[0].message.content) == (name, ANSWER)
                assert running(url) == [name]
            stream = client.chat.completions.create(
                model="other", messages=ASKED, temperature=0, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == ANSWER
            # Who goes away while his model is loaded leaves nothing behind.
            sent = json.dumps({"model": MODEL.name, "prompt": "x", "max_tokens": 1}).encode()
            parts = urlsplit(url)
            with socket.create_connection((parts.hostname, parts.port), PATIENCE_S) as gone:
                head = f"host: localhost\r\ncontent-length: {len(sent)}\r\n\r\n".encode()
                gone.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + sent)
            poll_until(lambda: "/v1/completions" in request(url, "GET", "/metrics")[2])
            assert client.embeddings.create(model="other", input="x").model == "other"
            assert running(url) == ["other"]
            with pytest.raises(openai.NotFoundError, match="this server has 'model', 'other'"):
                client.chat.completions.create(model="third", messages=ASKED)
        body = {"model": "third", "messages": ASKED, "prompt": "x", "input": "x", "max_tokens": 1}
        for path, kind in (("/v1/messages", "not_found_error"), ("/api/chat", "third")):
            status, _, told = request(url, "POST", path, body)
            assert (status, kind in json.dumps(told)) == (404, True)
        assert request(url, "GET", "/v1/models/third")[0] == 404
        figures = request(url, "GET", "/metrics")[2]
        assert 'edge_model_loaded{model="other"} 1.0' in figures
        view = request(url, "GET", "/api/cluster?model=other")[2]
        assert [each["is_loaded"] for each in view["models"]] == [False, True]
        assert request(url, "GET", f"/api/cluster?model={MODEL.name}")[0] == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
