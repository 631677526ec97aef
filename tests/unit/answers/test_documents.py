"""Kept documents: their files, and what conversations with them begin with."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from edge.answers.documents import (
    MOST_DOCUMENT_BYTES,
    DocumentFolder,
    Message,
    after_documents,
    text_after_documents,
)
from edge.errors import RequestError

USER: Message = {"role": "user", "content": "Hello"}


@pytest.fixture
def documents(tmp_path: Path) -> DocumentFolder:
    return DocumentFolder(tmp_path / "documents")


def test_a_document_is_kept_read_and_dropped(documents: DocumentFolder, tmp_path: Path) -> None:
    assert documents.names() == []
    text = "Ein Handbuch,\nmit Zeilen – und mehr.\n"
    kept = documents.keep("handbook", text, model="m", tokens=12)
    documents.keep("a.b-c_1", "other", model="m", tokens=1)
    assert documents.names() == ["a.b-c_1", "handbook"]
    assert documents.read("handbook") == kept
    assert documents.texts(["a.b-c_1", "handbook"]) == ["other", text]
    (file,) = (tmp_path / "documents").glob("handbook*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    documents.keep("handbook", "new", model="m", tokens=1)
    assert documents.texts(["handbook"]) == ["new"]
    with pytest.raises(RequestError, match="no document 'other' is kept here"):
        documents.remove(["handbook", "other"])
    documents.remove(["handbook", "a.b-c_1"])
    assert documents.names() == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "ü", "a\n"])
def test_a_bad_name_is_refused(documents: DocumentFolder, name: str) -> None:
    with pytest.raises(RequestError, match="is no name of a document"):
        documents.keep(name, "text", model="m", tokens=1)
    with pytest.raises(RequestError, match="is kept here"):
        documents.read(name)


def test_bad_texts_and_files_are_refused(documents: DocumentFolder, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is empty"):
        documents.keep("a", " \n", model="m", tokens=1)
    with pytest.raises(RequestError, match="longer than 32 MiB"):
        documents.keep("a", "x" * (MOST_DOCUMENT_BYTES + 1), model="m", tokens=1)
    documents.keep("a", "text", model="m", tokens=1)
    file = tmp_path / "documents" / "a.document"
    for content in (b"", b"[]\ntext", b'{"model": "m"}\ntext', b"\xff\xfe", b"{" * 5000):
        file.write_bytes(content)
        with pytest.raises(RequestError, match="the document a cannot be read"):
            documents.read("a")


def test_documents_begin_the_system_message() -> None:
    assert after_documents([USER], []) == [USER]
    assert after_documents([USER], ["A", "B"]) == [{"role": "system", "content": "A\n\nB"}, USER]
    brief: Message = {"role": "system", "content": "Be brief.", "name": "x"}
    assert after_documents([brief, USER], ["A"]) == [
        {"role": "system", "content": "A\n\nBe brief.", "name": "x"},
        USER,
    ]
    parts: Message = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert after_documents([parts, USER], ["A"])[0]["content"] == [
        {"type": "text", "text": "A\n\n"},
        {"type": "text", "text": "Be brief."},
    ]
    asked = {"role": "user", "content": "A\n\nHello"}
    assert after_documents([brief, USER], ["A"], role="user") == [brief, asked]
    with pytest.raises(RequestError, match="no message of the user"):
        after_documents([brief], ["A"], role="user")
    assert text_after_documents("Hello", ["A", "B"]) == "A\n\nB\n\nHello"
