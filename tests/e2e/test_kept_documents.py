"""A document that is kept is computed once, and answers with it are those of its whole prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

import edge
from edge.api.kept_documents import document_ids
from edge.demos.bundled import MODEL
from edge.host.state_paths import STATE_VARIABLE
from tests.support.processes import edge as run_edge

HANDBOOK = "The library of the town opens at nine. " * 12


def test_answers_begin_with_a_kept_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    with edge.Cluster.local(peers=1) as cluster, cluster.load(MODEL, dtype="float32") as model:
        kept = model.keep("handbook", HANDBOOK)
        tokenizer = model.tokenizer
        assert tokenizer is not None
        ids = document_ids(tokenizer, HANDBOOK)
        assert kept.tokens == len(ids) > 100
        question = "When does it open?"  # the template has no messages of the system
        found = model.chat(question, max_new_tokens=12, context=["handbook"])
        whole = model.chat(f"{HANDBOOK}\n\n{question}", max_new_tokens=12)
        assert found.token_ids == whole.token_ids
        assert found.statistics["found_tokens"] >= len(ids) - 2
        text = model.generate("It", context=["handbook"], max_new_tokens=8)
        assert text.token_ids == model.generate(f"{HANDBOOK}\n\nIt", max_new_tokens=8).token_ids
        with pytest.raises(edge.RequestError, match="token ids begin with no document"):
            model.generate([1, 2, 3], context=["handbook"])
        with pytest.raises(edge.RequestError, match="no document 'other' is kept here"):
            model.chat("Hello", context=["other"])
        with pytest.raises(edge.RequestError, match="shorten it"):
            model.keep("long", HANDBOOK * 200)


def test_the_command_line_keeps_lists_and_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    file = tmp_path / "handbook.txt"
    file.write_text(HANDBOOK)
    local = ("--local", "1", "--dtype", "float32")
    done = run_edge("keep", MODEL, file, *local)
    assert done.code == 0, done.err
    assert "handbook is kept" in done.out
    asked = ("-p", "When?", "--max-new-tokens", "4", "--json")
    plain = run_edge("run", MODEL, *local, *asked)
    found = run_edge("run", MODEL, *local, *asked, "--with", "handbook")
    assert found.code == 0, found.err
    assert found.out != plain.out
    assert "handbook" in run_edge("cache", "documents").out
    assert run_edge("cache", "drop", "handbook").out == "1 dropped.\n"
    assert run_edge("cache", "documents").out == "No document is kept.\n"
    gone = run_edge("run", MODEL, *local, *asked, "--with", "handbook")
    assert gone.code != 0
    assert "no document 'handbook' is kept here" in gone.err
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xff")
    assert "no text in UTF-8" in run_edge("keep", MODEL, bad, *local).err
